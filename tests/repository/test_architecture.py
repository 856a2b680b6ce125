"""The rules of the package's structure that reading the source can check: import graph, sizes, public names.

Each rule is a function from source text, or from a graph of imports, to the places that break it, and is tried on a
text that breaks it as well as on the package.
"""

from __future__ import annotations

import ast
import collections
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jshard
from tests.helpers.import_graph import (
    ORDER,
    ROOT,
    cycles,
    import_graph,
    imports,
    module_name,
    package_files,
    part,
    parts,
    read_import_graph,
    upward_imports,
)


PACKAGE = package_files()
SOURCES = sorted(
    p for d in ("jshard", "tests", "demo", "benchmarks", "notebooks") for p in (ROOT / d).rglob("*.py")
)

ROOT_FILES = {"__init__", "__main__"}
MAX_PARTS = 18
MAX_IMPORTS_BETWEEN_PARTS = 65
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PUBLIC_NAMES = 18
MAX_LINES_WITH_ANY = 100


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def forbidden_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of JAX's internals, or of a library that the module must do without."""
    complaints = []
    for line, name in imports(source, module, is_package):
        if (within(name, "jax._src") or within(name, "jax.extend")) and module != "jshard._core.jaxcompat":
            complaints.append(f"{module}:{line} imports {name}; only jshard._core.jaxcompat may")
        if within(name, "flax") and part(module) != "flax":
            complaints.append(f"{module}:{line} imports {name}; only jshard.flax may")
        if within(name, "jax") and part(module) == "_search":
            complaints.append(f"{module}:{line} imports {name}; the search is about arrays only")
    return complaints


def internal_attributes(source: str, module: str) -> list[str]:
    """Uses of `jax._src` or `jax.extend` as attributes, which no import statement shows."""
    if module == "jshard._core.jaxcompat":
        return []
    return [
        f"{module}:{node.lineno} reads jax.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
        and node.attr in ("_src", "extend")
    ]


def long_functions(source: str, most: int = MAX_FUNCTION_LINES) -> list[str]:
    """Functions with more lines of code than `most`: docstring, comments and empty lines do not count."""
    lines = source.splitlines()
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = lines[node.lineno - 1 : node.end_lineno]
        code = sum(1 for line in text if line.strip() and not line.lstrip().startswith("#"))
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            code -= sum(1 for line in lines[doc.lineno - 1 : doc.end_lineno] if line.strip())
        if code > most:
            complaints.append(f"line {node.lineno}: {node.name} has {code} lines of code")
    return complaints


def lines_with_any(source: str) -> int:
    """Lines that say `Any` in code or text, imports aside."""
    return sum(bool(re.search(r"\bAny\b", line)) and "import" not in line for line in source.splitlines())


def repeated_names(paths: list[pathlib.Path]) -> list[str]:
    """File names that occur more than once, `__init__.py` aside."""
    count = collections.Counter(p.name for p in paths if p.name != "__init__.py")
    return sorted(name for name, n in count.items() if n > 1)


def public_names(source: str) -> list[str]:
    """What `jshard/__init__.py` offers: `import X as X`, definitions and assignments without underscore."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [a.asname for a in node.names if a.asname]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [n for n in names if not n.startswith("_")]


def undocumented(owner: str, thing: object) -> list[str]:
    """The thing, and its public methods and properties when it is a class of ours, without a docstring."""
    missing = [] if inspect.getdoc(thing) else [owner]
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                missing += [] if inspect.getdoc(member) else [f"{owner}.{name}"]
    return missing


def api_table(readme: str) -> set[str]:
    """Names in code quotes in the first column of the README's table of names."""
    section = readme.split("## Names", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`(?:jshard\.)?(\w+)", row)}


PUBLIC = public_names((ROOT / "jshard" / "__init__.py").read_text())
# Imported by their own name, since they need a library that jshard does not: `import jshard.flax`.
PUBLIC_MODULES = [p.parent.name for p in sorted((ROOT / "jshard").glob("[a-z]*/__init__.py"))]


# -- the import graph ---------------------------------------------------------------------------------------


def test_every_part_has_its_place_in_the_order() -> None:
    assert set(parts(read_import_graph())) == set(ORDER)
    assert len(ORDER) <= MAX_PARTS


def test_parts_import_earlier_parts_only() -> None:
    assert upward_imports(read_import_graph()) == []


def test_imports_between_parts_are_few() -> None:
    assert sum(map(len, parts(read_import_graph()).values())) <= MAX_IMPORTS_BETWEEN_PARTS


def test_no_files_import_each_other_in_a_cycle() -> None:
    assert cycles(read_import_graph()) == []


def test_an_upward_import_is_found() -> None:
    sources = {
        "jshard": "from jshard._api.shard import shard",
        "jshard._core.layout": "def f():\n    from jshard import _rules",
        "jshard._rules": "",
        "jshard._rules.rule": "from jshard._core.layout import Layout\nfrom .._cost import collectives",
        "jshard._cost.collectives": "from ..._spec.entry import Pin\nfrom jshard._core import layout",
        "jshard._plan.planner": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jshard._api.plan",
        "jshard._api.plan": "import jshard._plan.planner",
        "jshard._api.shard": "from jshard import __version__",
    }
    assert upward_imports(import_graph(sources)) == [
        ("jshard._core.layout", "jshard._rules"),
        ("jshard._plan.planner", "jshard._api.plan"),
        ("jshard._api.shard", "jshard"),
    ]


def test_cycles_are_found() -> None:
    chain = {"jshard.a": "from jshard.b import x", "jshard.b": "import jshard.c", "jshard.c": ""}
    assert cycles(import_graph(chain)) == []
    ring = chain | {"jshard.c": "def f():\n    from jshard import a", "jshard.d": "import jshard.a"}
    assert cycles(import_graph(ring)) == [["jshard.a", "jshard.b", "jshard.c"]]
    package = {"jshard.p": "from jshard.p.f import g", "jshard.p.f": "from . import h", "jshard.p.h": ""}
    assert cycles(import_graph(package, ["jshard.p"])) == []
    assert cycles(import_graph(package | {"jshard.p.f": "from jshard.p import g"}, ["jshard.p"])) == [
        ["jshard.p", "jshard.p.f"]
    ]


def test_imports_between_parts_are_counted_once_a_pair() -> None:
    graph = import_graph(
        {
            "jshard._core.layout": "import jax",
            "jshard._rules.rule": "from jshard._core.layout import Layout, MeshAxes",
            "jshard._rules.primitives.gather": "import jshard._core.layout\nfrom jshard._rules import rule",
        }
    )
    assert parts(graph) == {"_core": set(), "_rules": {"_core"}}


# -- what a module may import besides -----------------------------------------------------------------------


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_no_module_imports_what_is_not_for_it(path: pathlib.Path) -> None:
    source, module = path.read_text(), module_name(path)
    assert not forbidden_imports(source, module, path.name == "__init__.py")
    assert not internal_attributes(source, module)


@pytest.mark.parametrize(
    "module, line",
    [
        ("jshard._program.trace", "from jax._src import core"),
        ("jshard._program.trace", "import jax.extend.core as jex"),
        ("jshard._program.trace", "from jax.extend import core"),
        ("jshard._program.trace", "def f():\n    from jax import extend"),
        ("jshard._api.shard", "import flax"),
        ("jshard._spec.options", "from flax import nnx"),
        ("jshard._search.solve", "import jax.numpy as jnp"),
        ("jshard._search.dual.trws", "from jax import numpy"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert forbidden_imports(line, module)


@pytest.mark.parametrize(
    "module, line",
    [
        ("jshard._core.jaxcompat", "from jax._src import core"),
        ("jshard.flax", "from flax import nnx"),
        ("jshard.flax._nnx", "from flax import nnx"),
        ("jshard._search.solve", "import numpy as np"),
        ("jshard._api.shard", "import jax.numpy as jnp"),
    ],
)
def test_other_imports_pass(module: str, line: str) -> None:
    assert not forbidden_imports(line, module)


def test_attributes_of_jax_are_found_too() -> None:
    assert internal_attributes("import jax\njax._src.core.Tracer", "jshard._api.shard")
    assert internal_attributes("import jax\njax.extend.core.Var", "jshard._api.shard")
    assert not internal_attributes("import jax\njax.numpy.sin", "jshard._api.shard")


# -- files and functions ------------------------------------------------------------------------------------


def test_only_two_files_stand_at_the_root_of_the_package() -> None:
    assert {p.stem for p in (ROOT / "jshard").glob("*.py")} == ROOT_FILES


def test_no_two_files_have_one_name() -> None:
    assert repeated_names(PACKAGE) == []


def test_a_repeated_file_name_is_found() -> None:
    paths = [
        pathlib.Path(p) for p in ("a/__init__.py", "b/__init__.py", "a/graph.py", "b/graph.py", "b/c.py")
    ]
    assert repeated_names(paths) == ["graph.py"]


def test_the_tests_have_the_folders_of_the_package() -> None:
    stages = {p.name.removeprefix("_") for p in (ROOT / "jshard").iterdir() if (p / "__init__.py").exists()}
    folders = {p.name for p in (ROOT / "tests").iterdir() if (p / "__init__.py").exists()}
    assert folders - {"laws", "helpers", "repository", "compilers", "hosts"} == stages


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_and_no_function_is_too_long(path: pathlib.Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not long_functions(source)


def test_a_long_function_is_found() -> None:
    body = ["    # a comment", "", "    x = 1", "    y = 2"]
    lines = ["class C:", "    def f(self):", '        """Two', "", '        lines."""']
    source = "\n".join(lines + ["    " + line if line else line for line in body])
    assert long_functions(source, most=3) == []
    assert long_functions(source, most=2) == ["line 2: f has 3 lines of code"]


def test_few_annotations_are_any() -> None:
    """Types that JAX leaves open have one name each in `_core/jax_types.py`; others are written out."""
    assert sum(lines_with_any(path.read_text()) for path in PACKAGE) <= MAX_LINES_WITH_ANY


def test_a_line_with_any_is_counted() -> None:
    source = "from typing import Any\ndef f(x: Any) -> dict[str, Any]:\n    return AnyThing(x)\n    # any\n"
    assert lines_with_any(source) == 1


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_every_module_has_a_docstring(path: pathlib.Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


# -- public names -------------------------------------------------------------------------------------------


def test_the_public_surface_is_small() -> None:
    assert 0 < len(PUBLIC + PUBLIC_MODULES) <= MAX_PUBLIC_NAMES, PUBLIC + PUBLIC_MODULES
    assert len(PUBLIC) == len(set(PUBLIC))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(jshard, name)
    assert not undocumented(name, thing)
    if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        assert ">>>" in (inspect.getdoc(thing) or ""), f"{name} has no example that runs"


def test_the_readme_lists_exactly_the_public_names() -> None:
    assert api_table((ROOT / "README.md").read_text()) == set(PUBLIC + PUBLIC_MODULES)


def test_an_undocumented_name_is_found() -> None:
    class Thing:
        """Documented."""

        def said(self) -> None:
            """Documented."""

        def unsaid(self) -> None: ...

    assert undocumented("Thing", Thing) == ["Thing.unsaid"]
    assert public_names(
        "from a import b as b, c as _d\nfrom a import e\n\ndef f(): ...\n\n_g = 1\nh: int = 2"
    ) == [
        "b",
        "f",
        "h",
    ]
    assert api_table("## Names\n| name | what |\n|---|---|\n| `shard(f)` | `op` |\n## Next\n| `no` |") == {
        "shard"
    }


def test_flax_is_a_leaf() -> None:
    """`import jshard` alone leaves Flax unimported, in a fresh interpreter."""
    code = "import sys, jshard; sys.exit(any(m.split('.')[0] in ('flax', 'optax') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_import_loads_no_search_and_no_optional_library() -> None:
    """What plans, reads files or draws is imported at its first use: `import jshard` costs little beside `import jax`."""
    heavy = (
        "scipy",
        "yaml",
        "flax",
        "matplotlib",
        "pandas",
        "rich",
        "jshard._search.solve",
        "jshard._network.build",
    )
    code = f"import jax, jshard, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
