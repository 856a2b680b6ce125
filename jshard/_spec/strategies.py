"""`in_strategy`, `parameter_plan` and `out_strategy` parsed into one `Pin` per leaf.

`in_strategy` has one entry per positional argument, or is a dict by argument name. An argument that is a pytree takes
one entry for all of its leaves, or a pytree prefix of entries: a dict by key or attribute, a tuple or list by
position. Leaves without an entry are left to the search.

>>> x, w = jax.ShapeDtypeStruct((32, 128), "float32"), jax.ShapeDtypeStruct((128, 8), "float32")
>>> pins = pins_for_inputs((x, {"w": w}), {}, ((4, 2), {"w": (2, 1)}), names=("x", "params"))
>>> [(str(p), p.where) for p in pins]
[('(4, 2)', 'in_strategy[0] (argument x)'), ('(2, 1)', "in_strategy[1]['w'] (argument params.w)")]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jshard._core.errors import StrategyError
from jshard._core.jax_types import PyTree
from jshard._core.messages import (
    abbreviate,
    count_of,
    describe_value,
    suggest,
    type_with_article,
)
from jshard._spec.entry import (
    ENTRY_FORMS,
    Pin,
    format_entry,
    is_entry,
    is_strategy,
    looks_like_strategy,
    parse_entry,
)
from jshard._spec.parameter_plan import pins_by_name
from jshard._spec.tree_paths import (
    KeyPath,
    dtype_of,
    input_leaves,
    is_leaf,
    join,
    key_name,
    one_level,
    path_name,
    shape_of,
)


NAMED_OUT_STRATEGIES = ("full_batch", "data_parallel")
CUTS_AS_TEXT = re.compile(r"\(?\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*\)?")
"""A strategy as text, such as "4,2" or "(4, 2)"."""


def pins_for_inputs(
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    in_strategy: PyTree,
    parameter_plan: PyTree = None,
    *,
    names: Sequence[str],
    strict: bool = False,
    what: str = "in_strategy",
    devices: int | None = None,
) -> tuple[Pin | None, ...]:
    """One `Pin` (or None) per leaf of a call, in the order of `jax.tree.flatten((args, kwargs))`.

    Arguments:

    - `names`: of the positional parameters (`argument_names`), at least one for each of `args`; a parameter passed by
        keyword takes its positional entry, one left at its default ignores it.
    - `strict`: whether a name of `parameter_plan` that matches nothing is an error instead of a warning.
    - `devices`: number of devices, if known (`parse_entry`).

    Raises `StrategyError` with the path of the argument.
    """
    entries = _entries_by_argument(args, kwargs, in_strategy, names, what)
    pins: list[Pin | None] = []
    for name, value in (*zip(names, args, strict=False), *sorted(kwargs.items())):
        written_at, entry = entries.get(name, (what, None))
        pins += match_prefix(entry, value, written_at, "argument", name, devices=devices)
    if parameter_plan is None:
        return tuple(pins)
    leaves = input_leaves(args, kwargs, names)
    planned = pins_by_name(leaves, parameter_plan, strict=strict, devices=devices)
    return tuple(_merge_pins(a, b) for a, b in zip(pins, planned, strict=True))


def pins_for_outputs(
    results: PyTree, out_strategy: PyTree, *, what: str = "out_strategy", devices: int | None = None
) -> tuple[Pin | None, ...]:
    """One `Pin` (or None) per leaf of the results, in flattening order.

    - `results`: the pytree of results, as arrays or `ShapeDtypeStruct`s.
    - `out_strategy`: None, "full_batch" (replicated), "data_parallel" (dimension 0 over all devices, scalars
        replicated), one entry per result, or the entry of a single result.

    >>> y = jax.ShapeDtypeStruct((32, 128), "float32")
    >>> [str(p) for p in pins_for_outputs((y, y), ((4, 2), None))]
    ['(4, 2)', 'None']
    >>> [str(p) for p in pins_for_outputs(y, "data_parallel")]
    ['(every device, 1)']
    """
    if out_strategy is None:
        return (None,) * len(jax.tree.leaves(results))
    if isinstance(out_strategy, str):
        return _named_out_strategy(results, out_strategy, what)
    if isinstance(out_strategy, tuple | list):
        for word in out_strategy:
            if isinstance(word, str) and word in NAMED_OUT_STRATEGIES:
                raise StrategyError(
                    f"{word!r} is about all results, and stands in a {type(out_strategy).__name__}",
                    where=what,
                    fix=f"{what}={word!r}, or one entry per result",
                )
    if is_leaf(results):
        if isinstance(out_strategy, tuple | list) and any(map(_is_inner_entry, out_strategy)):
            _check_results(out_strategy, 1, what)
            return tuple(match_prefix(out_strategy[0], results, f"{what}[0]", "result", "", devices=devices))
        if isinstance(out_strategy, tuple | list) and list(out_strategy) == [None]:
            return (None,)
        return tuple(match_prefix(out_strategy, results, what, "result", "", devices=devices))
    if type(results) in (tuple, list):
        if is_entry(out_strategy):
            if len(results) == 1:
                return tuple(match_prefix(out_strategy, results[0], what, "result", "0", devices=devices))
            raise StrategyError(
                f"{what} is one entry, {format_entry(out_strategy)}, but the function returns "
                f"{count_of(len(results), 'result')}",
                where=what,
                fix=f"one entry per result: {what}={_format_entries([out_strategy], len(results))}",
            )
        if isinstance(out_strategy, tuple | list):
            _check_results(out_strategy, len(results), what)
    return tuple(match_prefix(out_strategy, results, what, "result", "", devices=devices))


def match_prefix(
    entry: object,
    tree: PyTree,
    written_at: str,
    kind: str,
    root: str,
    keys: KeyPath = (),
    devices: int | None = None,
) -> list[Pin | None]:
    """Pins of the leaves of `tree` under `entry`, a pytree prefix of entries.

    `written_at`: position of the entry in the user's strategy, `in_strategy[1]['w']`. `kind`: "argument" or "result".
    `root`, `keys`: the path of `tree` in the call.
    """
    path = join(root, path_name(keys))
    where = f"{written_at} ({kind} {path})" if path else f"{written_at} (the {kind})"
    if entry is None:
        return [None] * len(jax.tree.leaves(tree))
    if is_leaf(tree):
        if dtype_of(tree) is None:
            raise StrategyError(
                f"{type_with_article(tree)} is not an array and cannot be cut", where=where, fix="None"
            )
        return [parse_entry(entry, shape_of(tree), where, devices)]
    if is_entry(entry):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return [
            p
            for below, leaf in leaves
            for p in match_prefix(entry, leaf, written_at, kind, root, (*keys, *below), devices)
        ]
    parts = one_level(tree)
    pins: list[Pin | None] = []
    for (suffix, inner), (key, child) in zip(
        _entries_of_children(entry, tree, parts, where), parts, strict=True
    ):
        pins += match_prefix(inner, child, written_at + suffix, kind, root, (*keys, key), devices)
    return pins


def _entries_of_children(
    entry: object, tree: PyTree, parts: list[tuple[object, PyTree]], where: str
) -> list[tuple[str, object]]:
    """For each child of a pytree node: its index in the container `entry`, as text, and its entry."""
    names = [key_name(key) for key, _ in parts]
    if isinstance(entry, Mapping):
        wanted = {str(k): k for k in entry}
        for name in wanted:
            if name not in names:
                raise StrategyError(f"no part is named {name!r}", where=where, fix=suggest(name, names))
        return [(f"[{wanted[n]!r}]", entry[wanted[n]]) if n in wanted else ("", None) for n in names]
    if isinstance(entry, tuple | list):
        if len(entry) != len(parts):
            raise StrategyError(
                f"{count_of(len(entry), 'entry', 'entries')} for {count_of(len(parts), 'part')}",
                where=where,
                fix=f"one entry for each part: {abbreviate(names)}" if parts else "None",
            )
        return [(f"[{i}]", e) for i, e in enumerate(entry)]
    if type(entry) is type(tree):
        wanted_parts = {key_name(key): inner for key, inner in one_level(entry)}
        if list(wanted_parts) == names:
            return [(f".{n}", e) for n, e in wanted_parts.items()]
    raise StrategyError(
        f"{type_with_article(entry)} is not an entry",
        where=where,
        fix=f"{ENTRY_FORMS}; or a dict, tuple or list of these for the parts of a pytree",
    )


def without_static(
    in_strategy: PyTree, names: Sequence[str], static: Sequence[str], *, what: str = "in_strategy"
) -> PyTree:
    """`in_strategy` without the entries of static arguments, which may be omitted or None.

    >>> without_static(((4, 2), None, None), ("x", "config", "w"), ("config",))
    ((4, 2), None)
    """
    if not static:
        return in_strategy
    if isinstance(in_strategy, Mapping):
        entries = {n: e for n, e in in_strategy.items() if n in static}
        kept: PyTree = {n: e for n, e in in_strategy.items() if n not in static}
    elif isinstance(in_strategy, tuple | list) and not is_entry(in_strategy):
        if len(in_strategy) <= len(names) - len(static):
            return in_strategy
        entries = {n: e for n, e in zip(names, in_strategy, strict=False) if n in static}
        kept = (*(e for i, e in enumerate(in_strategy) if i >= len(names) or names[i] not in static),)
    else:
        return in_strategy
    for name, entry in entries.items():
        if entry is not None:
            raise StrategyError(
                f"argument {name} is static and has no layout",
                where=f"{what} (argument {name})",
                fix="None for it",
            )
    return kept


def _entries_by_argument(
    args: Sequence[PyTree], kwargs: Mapping[str, PyTree], in_strategy: PyTree, names: Sequence[str], what: str
) -> dict[str, tuple[str, object]]:
    """Argument name -> (position in the user's strategy, entry)."""
    if in_strategy is None:
        return {}
    given = [*names[: len(args)], *sorted(kwargs)]
    if isinstance(in_strategy, Mapping):
        for name in in_strategy:
            if name not in given and name not in names:
                raise StrategyError(
                    f"no argument is named {name!r}", where=what, fix=suggest(str(name), given)
                )
        return {n: (f"{what}[{n!r}]", e) for n, e in in_strategy.items()}
    if isinstance(in_strategy, tuple | list):
        for i, entry in enumerate(in_strategy):
            if isinstance(entry, str) and (cuts := CUTS_AS_TEXT.fullmatch(entry.strip())):
                pieces = tuple(map(int, cuts[1].split(",")))
                raise StrategyError(f"{entry!r} is a str", where=f"{what}[{i}]", fix=f"a tuple, {pieces!r}")
    bare = isinstance(in_strategy, PartitionSpec | NamedSharding)
    if bare or (is_strategy(in_strategy) and len(in_strategy) > 0) or looks_like_strategy(in_strategy):
        raise StrategyError(
            f"{what} is one entry, {format_entry(in_strategy)}, not one entry per argument",
            where=what,
            fix=f"{what}={_format_entries([in_strategy], max(len(given), 1))}",
        )
    if not isinstance(in_strategy, tuple | list):
        raise StrategyError(
            f"{what} is {describe_value(in_strategy)}",
            where=what,
            fix="a tuple with one entry per positional argument, a dict by argument name, or None",
        )
    if isinstance(in_strategy, list) and in_strategy and looks_like_strategy(tuple(in_strategy)):
        raise StrategyError(
            f"{what} is a list of cuts, {in_strategy!r}, not one entry per argument",
            where=what,
            fix=f"{what}={_format_entries([tuple(in_strategy)], max(len(given), 1))}",
        )
    need = max([len(args), *(i + 1 for i, n in enumerate(names) if n in kwargs)])
    if not need <= len(in_strategy) <= len(names):
        takes = names if len(in_strategy) > len(names) else names[:need]
        raise StrategyError(
            f"{what} has {count_of(len(in_strategy), 'entry', 'entries')}, but there "
            f"{'is' if len(takes) == 1 else 'are'} {count_of(len(takes), 'argument')}: {abbreviate(takes)}",
            where=what,
            fix=f"one entry per positional argument: {what}={_format_entries(in_strategy, len(takes))}",
        )
    return {n: (f"{what}[{i}]", e) for i, (n, e) in enumerate(zip(names, in_strategy, strict=False))}


def _named_out_strategy(results: PyTree, name: str, what: str) -> tuple[Pin | None, ...]:
    known = NAMED_OUT_STRATEGIES
    if name not in known:
        raise StrategyError(f"{what}={name!r} is not known", where=what, fix=suggest(name, known))
    pins = []
    for keypath, leaf in jax.tree_util.tree_flatten_with_path(results)[0]:
        path = path_name(keypath)
        where = f"{what}={name!r} ({f'result {path}' if path else 'the result'})"
        rank = len(shape_of(leaf))
        if rank and name == "data_parallel":
            pins.append(Pin((None, *(1,) * (rank - 1)), None, where, all_devices_dim=0))
        else:
            pins.append(Pin((1,) * rank, None, where))
    return tuple(pins)


def _is_inner_entry(entry: object) -> bool:
    """Whether an element is an entry itself, so that its container is a list of entries and no strategy."""
    return isinstance(entry, PartitionSpec | NamedSharding | tuple | list)


def _check_results(entries: Sequence[object], count: int, what: str) -> None:
    if len(entries) != count:
        raise StrategyError(
            f"{what} has {count_of(len(entries), 'entry', 'entries')}, but the function returns "
            f"{count_of(count, 'result')}",
            where=what,
            fix=f"one entry per result: {what}={_format_entries(entries, count)}",
        )


def _merge_pins(a: Pin | None, b: Pin | None) -> Pin | None:
    if a is None or b is None or a.same_constraint(b):
        return a or b
    raise StrategyError(
        f"one tensor is pinned twice, to {a} and to {b}",
        where=f"{a.where} and {b.where}",
        fix="one of the two, or the same in both",
    )


def _format_entries(entries: Sequence[object], count: int) -> str:
    texts = [format_entry(e) for e in list(entries)[:count]] + ["None"] * (count - len(entries))
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
