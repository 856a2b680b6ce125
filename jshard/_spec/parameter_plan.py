"""`parameter_plan`: entries by parameter name, matched to the paths of the argument leaves.

A name is a dotted path (`/` and MindSpore's `self.` are accepted). It may omit the argument, and the `params`
collections that Flax puts before a model's own names: `block1.dense2.kernel` matches
`state.params.params.block1.dense2.kernel`. If nothing matches, it may omit any leading parts. `*` matches one part (or
some of its letters), `**` any number of parts. The most specific name wins.

>>> leaves = [Leaf(f"model.blocks.{i}.fc1.kernel", (4, 8), None, "model") for i in range(2)]
>>> pins = pins_by_name(leaves, {"blocks.*.fc1.kernel": (1, 8), "blocks.0.fc1.kernel": (4, 1)})
>>> [str(p) for p in pins]
['(4, 1)', '(1, 8)']
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import warnings
from collections.abc import Mapping, Sequence

from jshard._core.errors import StrategyError
from jshard._core.messages import type_with_article
from jshard._spec.entry import Pin, parse_entry
from jshard._spec.tree_paths import VARIABLE_FIELDS, Leaf


Parts = tuple[str, ...]


def pins_by_name(
    leaves: Sequence[Leaf],
    plan: object,
    *,
    strict: bool = False,
    what: str = "parameter_plan",
    devices: int | None = None,
) -> tuple[Pin | None, ...]:
    """One `Pin` (or None) per leaf, from a mapping of names to entries.

    A nested dict is flattened: `{"block1": {"kernel": e}}` is `{"block1.kernel": e}`. Names that match nothing are
    reported with the closest paths: in a warning, or with `strict` in a `StrategyError`.
    """
    if plan is None:
        return (None,) * len(leaves)
    if not isinstance(plan, Mapping):
        raise StrategyError(
            f"{what} is {type_with_article(plan)}",
            where=what,
            fix=f'a dict from parameter names to entries: {what}={{"w1": (1, 4)}}',
        )
    names = flatten_plan(plan, what)
    index = LeafIndex.of(leaves)
    claims: list[list[str]] = [[] for _ in leaves]
    for name in names:
        for i in index.find(name):
            claims[i].append(name)
    matched = {name for claim in claims for name in claim}
    missing = [name for name in names if name not in matched]
    if missing:
        _report_unmatched(missing, leaves, strict, what)
    return tuple(
        _most_specific(claim, names, leaf, what, devices) for claim, leaf in zip(claims, leaves, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class LeafIndex:
    """Leaves by each of their names (`_direct_names`), so that names without wildcards need no search.

    `direct`: name parts -> leaf numbers. `paths`: the parts of every leaf's full path.
    """

    direct: Mapping[Parts, Sequence[int]]
    paths: Sequence[Parts]

    @staticmethod
    def of(leaves: Sequence[Leaf]) -> LeafIndex:
        """Index of the leaves of a call."""
        direct: dict[Parts, list[int]] = {}
        for i, leaf in enumerate(leaves):
            for start in _direct_names(leaf):
                direct.setdefault(start, []).append(i)
        return LeafIndex(direct, [name_parts(leaf.path) for leaf in leaves])

    def find(self, name: str) -> list[int]:
        """Numbers of the leaves that a name matches: by a direct name, else by the end of the path."""
        pattern = name_parts(name)
        shorter = [pattern[:-1]] if len(pattern) > 1 and pattern[-1] in VARIABLE_FIELDS else []
        for wanted in (pattern, *shorter):
            if not any(map(_is_glob, wanted)):
                found = list(self.direct.get(wanted, ()))
                found = found or [i for i, path in enumerate(self.paths) if path[-len(wanted) :] == wanted]
            else:
                hits = (i for path, at in self.direct.items() if _matches(wanted, path) for i in at)
                found = sorted(set(hits))
                found = found or [i for i, path in enumerate(self.paths) if _matches(("**", *wanted), path)]
            if found:
                return found
        return []


def specificity(name: str) -> tuple[int, int, int]:
    """Sort key, largest for the most specific name: fewest `**`, then fewest `*` and `?`, then longest."""
    parts = name_parts(name)
    double = sum(p == "**" for p in parts)
    single = sum(p.count("*") + p.count("?") for p in parts if p != "**")
    return -double, -single, len("".join(parts).replace("*", "").replace("?", "")) + len(parts)


def _most_specific(
    claim: list[str], names: Mapping[str, object], leaf: Leaf, what: str, devices: int | None
) -> Pin | None:
    if not claim:
        return None
    best = max(map(specificity, claim))
    winners = [n for n in claim if specificity(n) == best]
    pins = [
        parse_entry(names[n], leaf.shape, f"{what}[{n!r}] (argument {leaf.path})", devices) for n in winners
    ]
    for name, pin in zip(winners[1:], pins[1:], strict=True):
        same = pin is pins[0] is None or (
            pin is not None and pins[0] is not None and pin.same_constraint(pins[0])
        )
        if not same:
            raise StrategyError(
                f"two names, equally specific, pin one tensor to {pins[0]} and to {pin}",
                where=f"{what}[{winners[0]!r}] and {what}[{name!r}] (argument {leaf.path})",
                fix=f"the full name: {what}[{leaf.path!r}]",
            )
    return pins[0]


def _report_unmatched(missing: list[str], leaves: Sequence[Leaf], strict: bool, what: str) -> None:
    paths = list(dict.fromkeys(leaf.path for leaf in leaves))
    lines = [f"{name!r} ({nearest_names(name, paths)})" for name in missing]
    said = f"{what} names no tensor of the arguments: " + "; ".join(lines)
    if strict:
        raise StrategyError(
            said, where=what, fix="one of the nearest names, or strict=False to skip such names"
        )
    warnings.warn(said, UserWarning, stacklevel=2)


def nearest_names(name: str, paths: Sequence[str], count: int = 3) -> str:
    """The paths nearest to a name that matches none, for messages."""
    wanted = ".".join(p for p in name_parts(name) if p != "**")
    endings = {p: p for p in paths}
    for p in paths:  # also compare with paths without the argument
        endings.setdefault(p.partition(".")[2] or p, p)
    close = [endings[c] for c in difflib.get_close_matches(wanted, endings, n=count, cutoff=0.4)]
    if close:
        return f"nearest: {', '.join(dict.fromkeys(close))}"
    return f"none is near; there are {', '.join(paths[:count])}" if paths else "the arguments hold no tensor"


def flatten_plan(plan: Mapping, what: str, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, entry in plan.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise StrategyError(
                f"{what} has the key {key!r}, {type_with_article(key)}",
                where=what,
                fix="parameter names as strings",
            )
        if not str(key).strip("./ "):
            raise StrategyError(
                f"{what} has an empty name, {key!r}", where=what, fix="parameter names such as 'w1'"
            )
        name = f"{prefix}{key}"
        flat.update(flatten_plan(entry, what, f"{name}.") if isinstance(entry, Mapping) else {name: entry})
    return flat


def name_parts(name: str) -> tuple[str, ...]:
    """Parts of a name: `/` counts as a dot, and `self` is dropped, as in MindSpore."""
    parts = [p for p in name.replace("/", ".").split(".") if p.strip()]
    return tuple(p for i, p in enumerate(parts) if p != "self" or len(parts) == 1 or i == len(parts) - 1)


def _direct_names(leaf: Leaf) -> list[tuple[str, ...]]:
    """The full path, the path without the argument, and without the `params` collections after it."""
    full = name_parts(leaf.path)
    inner = name_parts(leaf.inner)
    starts = [full]
    if inner:
        starts.append(inner)
    while len(inner) > 1 and inner[0] == "params":
        inner = inner[1:]
        starts.append(inner)
    return starts


def _is_glob(part: str) -> bool:
    return any(c in part for c in "*?[")


def _matches(pattern: Parts, path: Parts) -> bool:
    """Whether the pattern matches the whole path; `reached`: how many parts the pattern so far may have matched."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1))
        else:
            reached = {i + 1 for i in reached if i < len(path) and _part_matches(path[i], part)}
        if not reached:
            return False
    return len(path) in reached


def _part_matches(part: str, pattern: str) -> bool:
    return part == pattern or _is_glob(pattern) and fnmatch.fnmatchcase(part, pattern)
