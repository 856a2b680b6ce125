"""A checker of the text of `plan.ir(local=True)`: reports lines that contradict each other, without the plan.

Every value must be there, under that name and in that very type, where a line reads it; a name is given once; and
what a line makes must be what its kind of step makes of that block on a mesh of such axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


_TYPED = re.compile(r"(bool|[a-z]+\d*(?:_\w+)?|key<\w+>)\[([\d,]*)\]")
_STEP = re.compile(
    r"%(?P<made>.+?) = (?P<kind>\w+)(?:\[(?P<axes>[\w*]+)\])?\(%(?P<given>.+)\)(?: x[\d,.e+]+)? : (?P<types>.*)"
)
_KINDS = ("slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def wrong_lines(text: str, mesh: Mapping[str, int]) -> list[str]:
    """The lines that cannot be, each with what is wrong with it."""
    scopes: list[dict[str, str]] = [{}]
    given: set[str] = set()
    out: list[str] = []

    def have(line: str, name: str, kind: str) -> None:
        if name in given:
            out.append(f"{name} is there already: {line}")
        given.add(name)
        scopes[-1][name] = kind

    def read(line: str, name: str, kind: str) -> None:
        known = next((s[name] for s in reversed(scopes) if name in s), None)
        if known != kind:
            out.append(f"%{name} is {known}: {line}")

    for line in text.splitlines()[1:]:
        bare = line.strip()
        if bare.endswith("{"):
            scopes.append({})
        elif bare.startswith("} gives") or bare.startswith(("branch on", "return ")):
            for name, kind in re.findall(r"%([^:]+?) : (\S+\])", bare):
                read(line, name, kind)
            if bare.startswith("}"):
                ended = scopes.pop()
                # What a body ends in is read right after it, by its boundary.
                scopes[-1].update({k: v for k, v in ended.items() if f"%{k} :" in bare})
        elif " = " not in bare:
            m = re.match(r"%(.+?) : (\S+\])", bare)
            if m:
                have(line, *m.groups())
            elif " inside " not in bare:
                out.append(f"not understood: {line}")
        elif "in_strategy" in bare:
            left, right = bare.split(" = ", 1)
            types = right.split("} : ", 1)[1].split("  #")[0]
            before, after = types.split(" -> ")
            kinds = ["".join((d, "[", s, "]")) for d, s in _TYPED.findall(before)]
            names = re.findall(
                r"(?:%([^,()]+))|const", right[: right.index(" {in_strategy")].split("(", 1)[1]
            )
            if len(names) != len(kinds):
                out.append(f"{len(names)} operands of {len(kinds)} types: {line}")
            for name, kind in zip(names, kinds, strict=False):
                if name:
                    read(line, re.sub(r"\) x[\d,.e+]+$", "", name), kind)
            made = ["".join((d, "[", s, "]")) for d, s in _TYPED.findall(after)]
            for name, kind in zip(re.findall(r"%([^,]+)", left), made, strict=False):
                have(line, name, kind)
        else:
            m = _STEP.match(bare)
            if m is None or m["kind"] not in _KINDS:
                out.append(f"not understood: {line}")
                continue
            before, after = m["types"].split("  #")[0].strip().split(" -> ")
            read(line, m["given"], before)
            n = math.prod(mesh[a] for a in (m["axes"] or "").split("*") if a)
            if not _possible(m["kind"], before, after, n):
                out.append(f"{m['kind']} over {n} cannot give that: {line}")
            have(line, m["made"], after)
    return out


def _possible(kind: str, before: str, after: str, n: int) -> bool:
    """Whether a step over a group of `n` makes a block of one type from one of another."""
    (a, p), (b, q) = _TYPED.findall(before)[0], _TYPED.findall(after)[0]
    old, new = ([int(d) for d in s.split(",") if d] for s in (p, q))
    if a != b or len(old) != len(new):
        return False
    whole, part = math.prod(old), math.prod(new)
    less = [x != y for x, y in zip(old, new, strict=True)]
    if kind == "slice":
        return sum(less) == 1 and all(x % y == 0 and x >= y for x, y in zip(old, new, strict=True) if y)
    if kind == "all_reduce":
        return old == new
    if kind == "permute":
        return whole == part
    if kind == "all_to_all":
        return whole == part and sum(less) == 2
    grown = (part, whole) if kind == "all_gather" else (whole, part)
    return grown[0] == grown[1] * n and sum(less) == 1
