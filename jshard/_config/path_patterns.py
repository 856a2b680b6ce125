"""Names of rules as patterns over paths: globs, braces, layers that are stacked or numbered, and how specific they are.

`*` stands for one part of a path or for letters in it, `**` for any number of parts, `{q,k,v}` for each of them. A rule
that matches no path as it is written matches the end of a path. Independent of this, `layers.*.w` also matches
`layers.w` where all layers are stacked in one tensor, and linen's `layers_0.w`.

>>> paths = PathIndex([("model", "layers", str(i), n, "kernel") for i in range(2) for n in "qkv"])
>>> [sorted(paths.find(expand(n)[0])) for n in ("model.layers.*.q.kernel", "layers.1.k.kernel", "layers.*.v")]
[[0, 3], [4], []]
>>> expand("attn.{q,k}.{a,b}")
['attn.q.a', 'attn.q.b', 'attn.k.a', 'attn.k.b']
>>> max(["**.kernel", "layers.*.kernel", "layers.0.kernel"], key=specificity)
'layers.0.kernel'
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from jshard._spec.parameter_plan import name_parts, specificity as specificity


Parts = tuple[str, ...]

_NUMBERED = re.compile(r"(.+)_(\d+)")


def expand(name: str) -> list[str]:
    """The names that a name with braces stands for, in order."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        return [name]
    head, tail = name[: match.start()], name[match.end() :]
    return [n for choice in match[1].split(",") for n in expand(head + choice.strip() + tail)]


def without_numbers(parts: Sequence[str]) -> Parts:
    """A path without its numbers of layers: that of the class of a tensor.

    >>> without_numbers(("layers", "3", "Dense_0", "kernel"))
    ('layers', 'Dense', 'kernel')
    """
    return tuple(_NUMBERED.sub(r"\1", p) for p in parts if not p.isdigit())


class PathIndex:
    """Paths by number, to be searched by the names of rules.

    `aliases`: other paths of the same tensors, in parallel with `paths`: without the argument's name, for example.
    """

    def __init__(self, paths: Sequence[Parts], aliases: Sequence[Iterable[Parts]] = ()):
        self.paths = list(paths)
        self._exact: dict[Parts, list[int]] = {}
        self._lines: list[tuple[str, int]] = []
        self._split: list[tuple[str, int]] = []
        for i, path in enumerate(paths):
            names = dict.fromkeys([path, *(aliases[i] if aliases else ())])
            for own in names:
                self._exact.setdefault(own, []).append(i)
                self._lines.append((_line(own), i))
                split = _split_numbers(own)
                if split != own:
                    self._split.append((_line(split), i))

    def find(self, name: str) -> list[int]:
        """Numbers of the paths that a name without braces matches: whole, else by their end."""
        wanted = name_parts(name)
        found = self._whole(wanted)
        if not found and wanted:
            found = self._search(("**", *wanted), self._lines)
        return found

    def find_whole(self, name: str) -> list[int]:
        """Numbers of the paths that a name matches as it is written."""
        return self._whole(name_parts(name))

    def find_layers(self, name: str) -> list[int]:
        """Numbers of the paths that a name matches where a part `*` is a number, as in torchprime."""
        wanted = tuple("<number>" if p == "*" else p for p in name_parts(name))
        return self._whole(wanted) or (self._search(("**", *wanted), self._lines) if wanted else [])

    def find_numbered(self, name: str) -> list[int]:
        """Numbers of the paths in which linen writes `layers_0` for `layers.0`."""
        wanted = name_parts(name)
        if not wanted:
            return []
        return self._search(wanted, self._split) or self._search(("**", *wanted), self._split)

    def find_stacked(self, name: str) -> list[int]:
        """Numbers of the paths that a name matches without some of its `*`: layers stacked in one tensor."""
        wanted = name_parts(name)
        stars = [k for k, p in enumerate(wanted) if p == "*"]
        for count in range(1, len(stars) + 1):
            for dropped in itertools.combinations(stars, count):
                shorter = tuple(p for k, p in enumerate(wanted) if k not in dropped)
                found = self._whole(shorter) or self._search(("**", *shorter), self._lines)
                if found and shorter:
                    return found
        return []

    def _whole(self, wanted: Parts) -> list[int]:
        if not any(map(is_glob, wanted)):
            return list(self._exact.get(wanted, ()))
        return self._search(wanted, self._lines)

    def _search(self, wanted: Parts, lines: Sequence[tuple[str, int]]) -> list[int]:
        match = _regex(wanted).fullmatch
        return sorted({i for line, i in lines if match(line)})


def is_glob(part: str) -> bool:
    """Whether a part of a name has wildcards."""
    return "*" in part or "?" in part or part == "<number>"


def matches(name: str, path: Sequence[str]) -> bool:
    """Whether a name, braces included, matches a whole path.

    >>> matches("moe.**", ("moe", "experts", "0")), matches("moe.*", ("moe", "experts", "0"))
    (True, False)
    """
    return any(_regex(name_parts(n)).fullmatch(_line(path)) for n in expand(name))


def _line(path: Sequence[str]) -> str:
    return "".join(f"{p}." for p in path)


def _split_numbers(path: Parts) -> Parts:
    def parts() -> Iterator[str]:
        for p in path:
            match = _NUMBERED.fullmatch(p)
            yield from match.groups() if match else (p,)

    return tuple(parts())


@functools.lru_cache(maxsize=4096)
def _regex(wanted: Parts) -> re.Pattern[str]:
    return re.compile("".join(r"(?:[^.]*\.)*" if p == "**" else _part_regex(p) + r"\." for p in wanted))


def _part_regex(part: str) -> str:
    if part == "<number>":
        return r"\d+"
    return "".join("[^.]*" if c == "*" else "[^.]" if c == "?" else re.escape(c) for c in part)
