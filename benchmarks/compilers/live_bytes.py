"""Bytes that live at once in a program of libtpu, in the chip's memory and on the chip, by its own buffer assignment.

`memory_analysis()` says what is in use in the memory only: what libtpu keeps in the 128 MiB on a v5e's chip is no part of
it. With `xla_dump_to` it writes the range of instructions in which every value lives, and where each value lies. The sum
over the values alive at an instruction, each piece of memory counted once, is what a plan estimates.

>>> ranges = "  InstructionSequence:\\n    0:a\\n    1:b\\n  BufferLiveRange:\\n    a{}:0-1\\n    b{0}:1-2\\n"
>>> places = '''allocation 0: size 512, parameter 0:
...  value: <1 a @0> (size=512,offset=0): f32[128]{0}
... allocation 1: size 1024, color 1, preallocated-temp:
...  value: <2 b{0} @1> (size=1024,offset=0): f32[256]{0:S(1)}
... '''
>>> most_live(ranges, places)
(512, 1024)
>>> held_at_peak(ranges, places)
[(1024, 'b{0}', True), (512, 'a{}', False)]
"""

from __future__ import annotations

import collections
import re
import tempfile
from pathlib import Path
from typing import Any


MEMORY, ON_CHIP = 0, 1  # colours of allocations
_RANGE = re.compile(r"^\s+(\S+?\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+):")
_VALUE = re.compile(r"^\s+value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\)")

Place = tuple[int, int, int]
"""Colour, allocation and offset."""


def allocated_bytes(compiled: Any) -> int:
    """What a compiled program needs by its `memory_analysis()`: arguments, results that lie elsewhere, and its arena."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def compiled_with_live_bytes(lowered: Any) -> tuple[Any, tuple[int, int]]:
    """The compiled program, and the most bytes that live at once: in the memory, and on the chip at that time."""
    compiled, ranges, places = compiled_with_buffers(lowered)
    return compiled, most_live(ranges, places)


def compiled_with_buffers(lowered: Any) -> tuple[Any, str, str]:
    """The compiled program, and the two texts of its dump: ranges of values, and their places."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (ranges,) = Path(folder).glob("*.after_optimizations-live-range.txt")
        (places,) = Path(folder).glob("*.after_optimizations-buffer-assignment.txt")
        return compiled, ranges.read_text(), places.read_text()


def most_live(ranges: str, places: str) -> tuple[int, int]:
    """The same, from the two texts of a dump."""
    return _most_live(ranges, places)[0]


def held_at_peak(ranges: str, places: str) -> list[tuple[int, str, bool]]:
    """What lives when most does, for each piece of memory: bytes, the largest value in it, and if it is on the chip."""
    found, at = _placed_values(places), _most_live(ranges, places)[1]
    pieces: dict[Place, tuple[int, str]] = {}
    for name, begin, end in _RANGE.findall(ranges):
        if name in found and int(begin) <= at <= int(end):
            place, size = found[name]
            pieces[place] = max(pieces.get(place, (0, "")), (size, name))
    return sorted(((*held, colour == ON_CHIP) for (colour, _, _), held in pieces.items()), reverse=True)


def _most_live(ranges: str, places: str) -> tuple[tuple[int, int], int]:
    """The most bytes, and the instruction at which they live."""
    found = _placed_values(places)
    changes: dict[int, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, begin, end in _RANGE.findall(ranges):
        if name in found:
            changes[int(begin)].append((name, 1))
            changes[int(end) + 1].append((name, -1))
    alive: dict[Place, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    most, when = (0, 0), 0
    for at in sorted(changes):
        for name, count in changes[at]:
            place, size = found[name]
            alive[place][size] += count
        held = [0, 0]
        for (colour, _, _), sizes in alive.items():
            if colour in (MEMORY, ON_CHIP):
                held[colour] += max((size for size, n in sizes.items() if n > 0), default=0)
        if sum(held) > sum(most):
            most, when = (held[MEMORY], held[ON_CHIP]), at
    return most, when


def _placed_values(text: str) -> dict[str, tuple[Place, int]]:
    """Where every value lies, and its bytes."""
    out: dict[str, tuple[Place, int]] = {}
    allocation = -1
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            allocation = int(found[1])
        elif found := _VALUE.match(line):
            name, index, colour, size, offset = found.groups()
            out[name + (index or "{}")] = (int(colour), allocation, int(offset)), int(size)
    return out
