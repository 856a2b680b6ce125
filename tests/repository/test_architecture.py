"""The rules of the house that a machine can check by reading the source: floors, sizes, public names.

Each rule is a function from source text to complaints, tried on a text that breaks it as well as on the
package: a rule that never complains would keep nothing.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import jshard


ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "jshard").rglob("*.py"))
SOURCES = sorted(
    p for d in ("jshard", "tests", "demo", "benchmarks", "notebooks") for p in (ROOT / d).rglob("*.py")
)

# By the first part of a name below `jshard`; names without underscore are the front door's, on the top floor.
FLOORS = [
    {"_errors", "_calls", "_layout", "_numbers", "_hardware", "_topology", "_jaxcompat"},
    {"_wish"},
    {"_program"},
    {"_rules"},
    {"_cost"},
    {"_search"},
    {"_plan", "_lower", "_verify", "_report"},
    {
        "_shard",
        "_dispatch",
        "_signature",
        "_training",
        "_op",
        "_doors",
        "_prepare",
        "_request",
        "_state",
        "_ties",
        "_pareto",
        "_sweep",
        "_flax_nnx",
        "_flax_linen",
        "_flax_call",
        "_flax_names",
        "_flax_step",
        "_flax_pins",
        "_flax_place",
    },
]
MOST_LINES = 500
MOST_PUBLIC_NAMES = 15


def module_name(path: pathlib.Path) -> str:
    """`jshard._rules.rule` for its file, `jshard` for the package's own `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(name: str) -> int:
    """The floor of a module of the package, or of something in it."""
    top = name.removeprefix("jshard").removeprefix(".").split(".")[0]
    if not top.startswith("_"):
        return len(FLOORS) - 1
    found = [i for i, names in enumerate(FLOORS) if top in names]
    assert found, f"{name} has no floor: give {top} one in tests/repository/test_architecture.py"
    return found[0]


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(here[: len(here) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that go up a floor, reach JAX's internals, or use a library that the module must not know."""
    complaints = []
    for line, name in imports(source, module, is_package):
        if within(name, "jshard") and floor(name) > floor(module):
            complaints.append(f"{module}:{line} imports {name}, floor {floor(module)} -> {floor(name)}")
        if (within(name, "jax._src") or within(name, "jax.extend")) and module != "jshard._jaxcompat":
            complaints.append(f"{module}:{line} imports {name}; only jshard._jaxcompat may")
        if within(name, "flax") and not module.startswith(("jshard.flax", "jshard._flax")):
            complaints.append(f"{module}:{line} imports {name}; only jshard.flax may")
        if within(name, "jax") and within(module, "jshard._search"):
            complaints.append(f"{module}:{line} imports {name}; the search knows arrays only")
    return complaints


def reaches_inside(source: str, module: str) -> list[str]:
    """Uses of `jax._src` or `jax.extend` as attributes, which no import statement shows."""
    if module == "jshard._jaxcompat":
        return []
    return [
        f"{module}:{node.lineno} reads jax.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
        and node.attr in ("_src", "extend")
    ]


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
PUBLIC_MODULES = [p.stem for p in sorted((ROOT / "jshard").glob("*.py")) if not p.stem.startswith("_")]


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_imports_go_down(path: pathlib.Path) -> None:
    source, module = path.read_text(), module_name(path)
    assert not wrong_imports(source, module, path.name == "__init__.py") + reaches_inside(source, module)


@pytest.mark.parametrize(
    "module, line",
    [
        ("jshard._core.layout", "import jshard._rules.rule"),
        ("jshard._core.layout", "from jshard import _rules"),
        ("jshard._core.layout", "from . import _wish"),
        ("jshard._rules.rule", "from .._cost import collectives"),
        ("jshard._api.plan", "def f():\n    from jshard._api.shard import shard"),
        ("jshard._api.plan", "from jshard import shard"),
        ("jshard._memory.hbm_traffic", "import jshard"),
        ("jshard._program.trace", "from jax._src import core"),
        ("jshard._program.trace", "import jax.extend.core as jex"),
        ("jshard._program.trace", "from jax.extend import core"),
        ("jshard._api.shard", "import flax"),
        ("jshard._api.shard", "from flax import nnx"),
        ("jshard._search.solve", "import jax.numpy as jnp"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str) -> None:
    assert wrong_imports(line, module)


@pytest.mark.parametrize(
    "module, line",
    [
        ("jshard._rules.rule", "from jshard._core.layout import Layout"),
        ("jshard._rules.rule", "from . import registry"),
        ("jshard._jaxcompat", "from jax._src import core"),
        ("jshard.flax", "from flax import nnx"),
        ("jshard._search.solve", "import numpy as np"),
        ("jshard._api.shard", "from jshard import _plan"),
    ],
)
def test_a_right_import_passes(module: str, line: str) -> None:
    assert not wrong_imports(line, module)


def test_attributes_of_jax_are_found_too() -> None:
    assert reaches_inside("import jax\njax._src.core.Tracer", "jshard._api.shard")
    assert reaches_inside("import jax\njax.extend.core.Var", "jshard._api.shard")
    assert not reaches_inside("import jax\njax.numpy.sin", "jshard._api.shard")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_too_long(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_every_module_says_what_it_is_for(path: pathlib.Path) -> None:
    source = path.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source))


def test_the_public_surface_is_small() -> None:
    assert 0 < len(PUBLIC + PUBLIC_MODULES) <= MOST_PUBLIC_NAMES, PUBLIC + PUBLIC_MODULES
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
    """`import jshard` alone must leave Flax unimported: asked of a fresh interpreter."""
    code = "import sys, jshard; sys.exit(any(m.split('.')[0] in ('flax', 'optax') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
