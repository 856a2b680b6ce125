"""The import graph of `jshard`: `make imports` prints it, `tests/repository/test_architecture.py` asserts its shape.

Every import statement counts, also inside a function and under `TYPE_CHECKING`. A *part* is what stands directly below
`jshard/`: a folder, or one of the files `__init__.py`, `__main__.py`.

>>> graph = import_graph({"jshard._a.f": "from jshard import _b", "jshard._b": "import jshard._a.f"})
>>> graph["jshard._a.f"], cycles(graph)
({'jshard._b'}, [['jshard._a.f', 'jshard._b']])
>>> parts(graph)
{'_a': {'_b'}, '_b': {'_a'}}
"""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping


ROOT = pathlib.Path(__file__).parents[2]
Graph = dict[str, set[str]]

# A part may import the parts above it in this list, and no others.
ORDER = [
    "_core",
    "_spec",
    "_cost",
    "_search",
    "_program",
    "_rules",
    "_batch",
    "_network",
    "_schedule",
    "_plan",
    "_lower",
    "_verify",
    "_report",
    "_config",
    "_api",
    "__init__",
    "__main__",
    "flax",
]


def module_name(path: pathlib.Path) -> str:
    """`jshard._rules.rule` for its file, `jshard` for the package's own `__init__.py`."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def package_files() -> list[pathlib.Path]:
    """All Python files of `jshard/`."""
    return sorted((ROOT / "jshard").rglob("*.py"))


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_graph(sources: Mapping[str, str], packages: Iterable[str] = ()) -> Graph:
    """Module -> the modules of `sources` that it imports.

    - sources: module name -> text; `packages` names those that are an `__init__.py`.

    A name that is no module (`jshard._core.layout.Layout`) counts for the longest module that contains it.
    """
    packages = set(packages)

    def containing(name: str) -> str | None:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name or None

    graph: Graph = {}
    for module, source in sources.items():
        targets = {containing(name) for _, name in imports(source, module, module in packages)}
        graph[module] = {t for t in targets if t is not None and t != module}
    return graph


@functools.cache
def read_import_graph() -> Graph:
    """The import graph of the package's own files."""
    files = {module_name(p): p for p in package_files()}
    packages = [m for m, p in files.items() if p.name == "__init__.py"]
    return import_graph({m: p.read_text() for m, p in files.items()}, packages)


def part(module: str) -> str:
    """`_rules` of `jshard._rules.rule`; `__init__` of `jshard` and of names that it exports."""
    name = f"{module}.".split(".")[1] or "__init__"
    return name if name.startswith("_") or name == "flax" else "__init__"


def parts(graph: Graph) -> Graph:
    """Part -> the other parts that its modules import."""
    of_parts: Graph = {}
    for module, targets in graph.items():
        of_parts.setdefault(part(module), set()).update({part(t) for t in targets} - {part(module)})
    return of_parts


def cycles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for successor in sorted(graph[node]):
            if successor not in index:
                visit(successor)
                low[node] = min(low[node], low[successor])
            elif successor in stack:
                low[node] = min(low[node], index[successor])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def upward_imports(graph: Graph) -> list[tuple[str, str]]:
    """Pairs (module, imported module) in which the import does not go to an earlier part of `ORDER`."""
    rank = {name: i for i, name in enumerate(ORDER)}
    return [
        (module, target)
        for module, targets in graph.items()
        for target in sorted(targets)
        if part(module) != part(target) and rank[part(target)] > rank[part(module)]
    ]


def main() -> None:
    """Print the parts in their order, what each imports, and whatever breaks the rules."""
    graph = read_import_graph()
    of_parts = parts(graph)
    files = collections.Counter(part(module) for module in graph)
    edges = sum(map(len, of_parts.values()))
    print(f"{len(graph)} files, {sum(map(len, graph.values()))} imports between files")
    print(f"{len(of_parts)} parts, {edges} imports between parts")
    for name in sorted(of_parts, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n)):
        targets = sorted(of_parts[name], key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER))
        print(f"  {name:12} {files[name]:3} files  -> {' '.join(targets) or '-'}")
    unknown = sorted(set(of_parts) - set(ORDER))
    print("parts without a place in ORDER:", ", ".join(unknown) or "none")
    known = {m: {t for t in targets if part(t) in ORDER} for m, targets in graph.items() if part(m) in ORDER}
    print("upward imports:", ", ".join(f"{a} -> {b}" for a, b in upward_imports(known)) or "none")
    print("cycles of files:", "; ".join(" ".join(c) for c in cycles(graph)) or "none")


if __name__ == "__main__":
    main()
