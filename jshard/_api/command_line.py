"""The command line: `plan` a function of a module, `report` and `diff` saved plans, `doctor` for what is installed.

    python -m jshard plan train:step --args "f32[1024,512]" "f32[512,512]" --mesh v5e:4x8 --in-strategy "((32, 1), None)"
    python -m jshard report plan.json --html plan.html
    python -m jshard diff before.json after.json
    python -m jshard doctor

`plan` imports the named module from the current folder, traces the function and searches; nothing is run on devices.
A `ShardError` ends a command with its text and exit status 1, a wrong command line with 2.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jshard._api.doctor import inspect_installation
from jshard._api.plan import Plan
from jshard._api.shard import Sharded, shard
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import suggest
from jshard._core.named_topology import MeshRequest, topology


_SHORT_TYPES = {"f": "float", "bf": "bfloat", "s": "int", "i": "int", "u": "uint", "c": "complex"}
_SHAPE = re.compile(r"\s*([a-z]+)(\d*)(\w*)\s*\[\s*([\d\s,]*)\]\s*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        print_text(options.run(options))
    except ShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def print_text(value: Plan | str) -> None:
    """Print a text as it is; a plan in colours on a terminal if rich is installed."""
    if not isinstance(value, str) and sys.stdout.isatty():
        try:
            from rich import print as rich_print
        except ImportError:
            pass
        else:
            rich_print(value)
            return
    print(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jshard", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], Plan | str], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    planning = command("plan", run_plan, "plan a function of a module and print the plan")
    planning.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="such as train:step, package.train:step or scripts/train.py:step",
    )
    planning.add_argument(
        "--args",
        nargs="*",
        default=[],
        metavar="ARG",
        help='shapes such as "f32[8,128]"; or MODULE:NAME of an example, or of a function that makes a tuple of all',
    )
    planning.add_argument("--mesh", help="a machine (v5e:4x8), axes (x=4,y=2), or auto, auto:8, auto:v5e:4x8")
    planning.add_argument("--axes", help="of a machine: data=4,model=8; default: the best grid is searched")
    planning.add_argument("--hardware", help="the chip's name, where --mesh names axes only")
    planning.add_argument("--in-strategy", type=_literal, help='such as "((4, 2), None)"')
    planning.add_argument("--out-strategy", type=_literal)
    planning.add_argument("--parameter-plan", type=_literal, help="such as \"{'dense.kernel': (1, 8)}\"")
    planning.add_argument("--level", type=int, choices=(0, 1, 2), default=None)
    planning.add_argument("--memory-budget", help="bytes, or text such as 14GiB")
    planning.add_argument("--search", choices=("optimal", "propagation"), default=None)
    planning.add_argument(
        "--config", metavar="FILE.yaml", help="shardings and options of a file; those given here win"
    )
    planning.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    planning.add_argument(
        "--save-config", metavar="FILE.yaml", help="write the plan's shardings as a file for --config"
    )
    planning.add_argument("--html", metavar="FILE", help="write the report as a page")

    reporting = command("report", run_report, "print a saved plan")
    reporting.add_argument("plan", metavar="PLAN.json")
    reporting.add_argument("--html", metavar="FILE", help="write the report as a page")
    reporting.add_argument("--markdown", action="store_true")
    reporting.add_argument("--ir", action="store_true", help="one line an operator")

    comparing = command("diff", run_diff, "what the second of two saved plans does differently")
    comparing.add_argument("before", metavar="BEFORE.json")
    comparing.add_argument("after", metavar="AFTER.json")

    command("doctor", run_doctor, "versions, devices, compilers, and what is missing")
    return parser


def run_plan(options: argparse.Namespace) -> Plan | str:
    """Plan the named function; the plan itself, or its JSON text."""
    function, args = load_object(options.function, "function"), example_arguments(options.args)
    named = {
        "in_strategy": options.in_strategy,
        "out_strategy": options.out_strategy,
        "parameter_plan": options.parameter_plan,
        "level": options.level,
        "hardware": options.hardware,
        "memory_budget": options.memory_budget,
        "search": options.search,
        "config": options.config,
        "mesh": None if options.mesh is None else parse_mesh(options.mesh, options.axes),
    }
    given = {k: v for k, v in named.items() if v is not None}
    if isinstance(function, Sharded) and given:
        raise ShardError(
            f"{options.function} is sharded already, and --{next(iter(given)).replace('_', '-')} would change how",
            where="python -m jshard plan",
            fix="the plain function, or no options",
        )
    plan = (function if isinstance(function, Sharded) else shard(function, **given)).plan(*args)
    if options.save:
        plan.save(options.save)
    if options.save_config:
        plan.to_config().save(options.save_config)
    if options.html:
        plan.to_html(options.html)
    return plan.to_json() if options.json else plan


def run_report(options: argparse.Namespace) -> Plan | str:
    """A saved plan in the form asked for."""
    plan = load_plan(options.plan)
    if options.html:
        plan.to_html(options.html)
    if options.json:
        return plan.to_json()
    return plan.to_markdown() if options.markdown else plan.ir() if options.ir else plan


def run_diff(options: argparse.Namespace) -> str:
    """What the second plan does differently, as text or as JSON of the figures that changed."""
    found = load_plan(options.before).diff(load_plan(options.after))
    if not options.json:
        return str(found)
    figures = {f.name: {"before": f.before, "after": f.after} for f in found.figures}
    return json.dumps(
        {"different": bool(found), "figures": figures, "headings": list(found.headings)}, indent=1
    )


def run_doctor(options: argparse.Namespace) -> str:
    """What is installed and what it can do."""
    found = inspect_installation()
    return json.dumps(found.as_dict(), indent=1) if options.json else str(found)


def load_plan(path: str) -> Plan:
    """A plan from a file; an unreadable file is a `ShardError`."""
    try:
        return Plan.load(path)
    except OSError as error:
        raise ShardError(
            f"{path} cannot be read: {error.strerror}",
            where="python -m jshard",
            fix="a file that plan.save(path), or python -m jshard plan ... --save FILE, wrote",
        ) from None


def _folder_and_module(name: str, where: str) -> tuple[str, str]:
    """The folder to import from and the module's name, of a module's name or the path of its file."""
    if not name.endswith(".py"):
        return os.getcwd(), name
    path = Path(name).resolve()
    if not path.is_file():
        raise ShardError(
            f"there is no file {name!r}", where=where, fix="the path of a file from the current folder"
        )
    return str(path.parent), path.stem


def load_object(name: str, what: str) -> Any:
    """The object of `module:name` or `file.py:name`, imported from its folder or from what is installed."""
    module, colon, attribute = name.partition(":")
    where = "python -m jshard plan"
    if not colon or not module or not attribute:
        raise ShardError(
            f"{name!r} names no {what}", where=where, fix=f"MODULE:NAME, such as train:{attribute or 'step'}"
        )
    folder, module = _folder_and_module(module, where)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module is there, one of its own imports is not: that error says more
        raise ShardError(
            f"there is no module {module!r}",
            where=where,
            fix="a module of the current folder or an installed one",
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_")]
            raise ShardError(
                f"{module} has no {part!r}", where=where, fix=f"one of its names: {suggest(part, public)}"
            )
        found = getattr(found, part)
    return found


def example_arguments(texts: Sequence[str]) -> tuple[PyTree, ...]:
    """The arguments of a call: a shape each, or objects by name; one callable makes a tuple of all of them."""
    values = [load_object(t, "argument") if ":" in t and "[" not in t else parse_shape(t) for t in texts]
    if len(values) == 1 and callable(values[0]):
        made = values[0]()
        return made if isinstance(made, tuple) else (made,)
    return tuple(values)


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """A shape in short.

    >>> parse_shape("bf16[8,128]"), parse_shape("int32[]").dtype.name
    (ShapeDtypeStruct(shape=(8, 128), dtype=bfloat16), 'int32')
    """
    match = _SHAPE.fullmatch(text)
    if match:
        stem, bits, rest, sizes = match.groups()
        name = f"{_SHORT_TYPES.get(stem, stem) if bits else stem}{bits}{rest}"
        try:
            shape = tuple(int(s) for s in sizes.replace(" ", "").split(",") if s)
            return jax.ShapeDtypeStruct(shape, jnp.dtype({"pred": "bool"}.get(name, name)))
        except TypeError:
            pass
    raise ShardError(
        f"{text!r} is no shape",
        where="python -m jshard plan --args",
        fix='type and sizes: "f32[8,128]", "int32[]"; or MODULE:NAME of a value or of a function that makes the arguments',
    )


def parse_mesh(text: str, axes: str | None) -> MeshRequest:
    """A mesh to plan for: of named axes, of a machine, or the text that `mesh=` of `shard` takes."""
    if "=" in text:
        sizes = parse_axes(text)
        return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    if axes is not None:
        return topology(text, parse_axes(axes), compiles=False)
    if re.fullmatch(r"\d+(x\d+)+", text):
        raise ShardError(
            f"{text!r} names no chip and no axes", where="python -m jshard plan --mesh",
            fix=f"a machine, v5e:{text}, or names of the axes, "
            + ",".join(f"{name}={size}" for name, size in zip("xyzuvw", text.split("x"), strict=False)),
        )  # fmt: skip
    return text if text.startswith("auto") else f"auto:{text}"


def parse_axes(text: str) -> dict[str, int]:
    """Axes and their sizes.

    >>> parse_axes("data=4,model=8")
    {'data': 4, 'model': 8}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.strip().isdigit() for name, _, size in pairs):
        raise ShardError(f"{text!r} names no axes", where="python -m jshard plan", fix="data=4,model=8")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((n for n in names if names.count(n) > 1), ""):
        fix = "another name for each axis: data=4,model=8"
        raise ShardError(f"{text!r} names the axis {twice} twice", where="python -m jshard plan", fix=fix)
    return {name.strip(): int(size) for name, _, size in pairs}


def _literal(text: str) -> object:
    """A Python literal; nothing is executed."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[a-z_]+", text):
            return text  # "full_batch", "data_parallel"
        raise argparse.ArgumentTypeError(f"{text!r} is no tuple, dict or name") from None
