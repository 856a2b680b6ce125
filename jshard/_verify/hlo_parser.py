"""HLO text as plain values: computations of instructions, with shapes, attributes and source lines.

The text of a compiled JAX program (`compiled.as_text()`) is the one form that all three compilers (CPU, TPU, GPU)
share, so it is parsed line by line. A line that cannot be parsed is listed in `unread` with its number.

>>> module = parse('''
... HloModule jit_f, num_partitions=8
... ENTRY %main (p: f32[4,8]) -> f32[8,8] {
...   %p = f32[4,8]{1,0} parameter(0)
...   ROOT %ag = f32[8,8]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
... }''')
>>> ag = module.computations[module.entry].root
>>> ag.opcode, ag.operands, str(ag.shapes[0]), ag.attr("dimensions"), module.partitions
('all-gather', ('p',), 'f32[8,8]', '{0}', 8)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping


# Bits an element takes in memory. Names: XLA's primitive_util.h, LowercasePrimitiveTypeName.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16, "u1": 1, "s1": 1}


def element_bits(dtype: str) -> int | None:
    """Bits of one element of an HLO element type; None for unknown names.

    >>> element_bits("bf16"), element_bits("f8e4m3fn"), element_bits("s4"), element_bits("wat")
    (16, 8, 4, None)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    m = re.fullmatch(r"[suf](\d+)(e\w+)?", dtype)
    return int(m[1]) if m else None


COLLECTIVE_KINDS: Mapping[str, str] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}
"""Opcodes of collectives, without `-start`, and the kind that a plan counts them as."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an HLO type; a tuple type is parsed as the list of its leaves."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes, without the padding of tiled layouts; 0 for tokens and unknown types."""
        return -(-self.elements * (element_bits(self.dtype) or 0) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


_CALLED_ATTRIBUTES = (
    "calls",
    "called_computations",
    "branch_computations",
    "true_computation",
    "false_computation",
    "async_computation",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `attrs` is the raw text after the operands; `line` counts from 1."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attrs: str
    line: int
    root: bool = False
    literal: str = ""

    def attr(self, key: str) -> str | None:
        """Raw text of one attribute, with its braces; None if it is absent."""
        if f"{key}=" not in self.attrs:  # true of most lines, and much faster than the pattern
            return None
        m = re.search(rf"(?:^|[,\s]){re.escape(key)}=", self.attrs)
        if m is None:
            return None
        end = _end_of_value(self.attrs, m.end())
        # `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}`: groups of a mesh in another order are one value.
        order = _DEVICE_IDS.match(self.attrs, end) if self.attrs.startswith("mesh[", m.end()) else None
        return self.attrs[m.end() : _end_of_value(self.attrs, order.end()) if order else end]

    @property
    def op_name(self) -> str:
        """The `op_name` of the metadata, JAX's name stack; empty if there is none."""
        m = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attrs)
        return m[1] if m else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, without reducers (`to_apply` of anything but `call`)."""
        out: list[str] = []
        for key in _CALLED_ATTRIBUTES + (("to_apply",) if self.opcode in ("call", "call-start") else ()):
            value = self.attr(key)
            if value:
                out += [v.strip().lstrip("%") for v in value.strip("{}").split(",") if v.strip()]
        return tuple(out)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions in text order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The users of each instruction, by name."""
        out: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for o in dict.fromkeys(i.operands):
                out.setdefault(o, []).append(i)
        return {k: tuple(v) for k, v in out.items()}

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Parameters by number."""
        parameters = [i for i in self.instructions if i.opcode == "parameter" and i.literal.isdigit()]
        return {int(i.literal): i for i in parameters}

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The result; the last instruction if none is marked."""
        marked = [i for i in self.instructions if i.root]
        return (marked or list(self.instructions[-1:]) or [None])[-1]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program.

    - `entry`: name of the entry computation.
    - `partitions`, `replicas`: numbers of devices.
    - `sources`: `file:line` of each stack frame.
    - `tiled`: whether layouts are tiled, as those of TPU programs are.
    - `scheduled`: whether the instructions are in the order in which they run.
    - `unread`: the lines that were skipped, each as `line N: text`.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    replicas: int
    sources: Mapping[int, str]
    tiled: bool
    unread: tuple[str, ...] = ()
    scheduled: bool = False

    def source(self, inst: Instruction) -> str:
        """`file:line` of the user's code behind an instruction; empty if not recorded."""
        m = re.search(r"stack_frame_id=(\d+)", inst.attrs)
        if m:
            return self.sources.get(int(m[1]), "")
        m = re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', inst.attrs)
        return f"{m[1]}:{m[2]}" if m else ""


_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-$]+)\s*=\s*(.*)$")
_COMPUTATION = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-$]+)\s*(?:\(.*\)\s*->\s*.*)?\{\s*$")
_DEVICE_IDS = re.compile(r",?\s*device_ids=")
_ARRAY_TYPE = re.compile(r"([a-z]\w*)\[([\d,<=? ]*)\]")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]')


def _after_closing_bracket(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`; -1 if it is not closed."""
    closing: list[str] = []
    for m in _BRACKET.finditer(text, start):
        c = m[0]
        if c in _CLOSING:
            closing.append(_CLOSING[c])
        elif c == closing[-1]:
            closing.pop()
            if not closing:
                return m.end()
    return -1


def _end_of_value(text: str, start: int) -> int:
    """End of the attribute value at `start`: up to the next comma outside brackets and strings.

    A blank ends it too, except before a brace: `mesh['x'=2,'y'=4] {'y'}` is one value.
    """
    i = start
    while i < len(text):
        c = text[i]
        if c in _CLOSING:
            end = _after_closing_bracket(text, i)
            if end < 0:
                return len(text)
            i = end
        elif c == '"':
            i += 1
            while i < len(text) and text[i] != '"':
                i += 2 if text[i] == "\\" else 1
            i += 1
        elif c == "," or c.isspace() and text[i + 1 : i + 2] != "{":
            return i
        else:
            i += 1
    return len(text)


def split_top(text: str) -> list[str]:
    """Split at commas outside brackets.

    >>> split_top("f32[2,3]{1,0} %a, (s32[], f32[2]) %b")
    ['f32[2,3]{1,0} %a', '(s32[], f32[2]) %b']
    """
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*out, text[start:]] if part.strip()]


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The leaves of an HLO type; a bounded dynamic dimension `<=n` counts as n.

    >>> [str(s) for s in read_shapes("((f32[8,2]{1,0:T(8,128)}, s32[]), /*index=1*/bf16[<=4])")]
    ['f32[8,2]', 's32[]', 'bf16[4]']
    """
    text = re.sub(r"/\*.*?\*/", "", text)
    return tuple(
        Shape(d, tuple(int(n.strip().lstrip("<=") or 0) for n in dims.split(",") if n.strip()))
        for d, dims in _ARRAY_TYPE.findall(text)
    )


def _instruction(line: str, number: int) -> Instruction | None:
    m = _INSTRUCTION.match(line)
    if m is None:
        return None
    rest = m[3].lstrip()
    end = _after_closing_bracket(rest, 0) if rest.startswith("(") else rest.find(" ")
    if end < 0:
        return None
    op = re.match(r"\s*([a-z][\w\-]*)\(", rest[end:])
    if op is None:
        return None
    open_at = end + op.end() - 1
    close = _after_closing_bracket(rest, open_at)
    if close < 0:
        return None
    inner, attrs = rest[open_at + 1 : close - 1], rest[close:].lstrip(", ")
    literal, operands = "", ()
    if op[1] in ("parameter", "constant", "iota"):
        literal = inner.strip()
    elif "%" in inner:
        operands = tuple(re.findall(r"%([\w.\-$]+)", inner))
    else:
        operands = tuple(part.split()[-1] for part in split_top(re.sub(r"/\*.*?\*/", "", inner)))
    return Instruction(m[2], op[1], read_shapes(rest[:end]), operands, attrs, number, bool(m[1]), literal)


def _sources(sections: Mapping[str, list[str]]) -> dict[int, str]:
    """`file:line` of each stack frame, from the tables that newer texts print before the computations."""
    files = {}
    for row in sections.get("FileNames", ()):
        m = re.match(r'(\d+) "(.*)"', row)
        if m:
            files[int(m[1])] = m[2]
    places = {}
    for row in sections.get("FileLocations", ()):
        m = re.match(r"(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", row)
        if m:
            places[int(m[1])] = f"{files.get(int(m[2]), '?')}:{m[3]}"
    frames = {}
    for row in sections.get("StackFrames", ()):
        m = re.match(r"(\d+) \{file_location_id=(\d+)", row)
        if m:
            frames[int(m[1])] = places.get(int(m[2]), "")
    return frames


def _header_int(header: str, key: str) -> int:
    m = re.search(rf"\b{key}=(\d+)", header)
    return int(m[1]) if m else 1


def parse(text: str) -> Module:
    """Parse the text of a compiled program, as `compiled.as_text()` returns it.

    Any text is accepted; lines that cannot be parsed are listed in `unread`. Without a computation, `entry` is empty.
    """
    header, entry, current, body = "", "", None, []
    computations: dict[str, Computation] = {}
    sections: dict[str, list[str]] = {}
    section, unread = "", []
    for number, line in _joined_lines(text):
        bare = line.strip()
        if current is None:
            if bare.startswith("HloModule"):
                header = bare
            elif bare in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                section = bare
            elif bare.endswith("{") and (m := _COMPUTATION.match(line)):
                current, section = m[2], ""
                entry = m[2] if m[1] else entry
            elif section and bare:
                sections.setdefault(section, []).append(bare)
            elif bare and not bare.startswith(("//", "#", "execution_thread")):
                unread.append(f"line {number}: {bare[:160]}")
        elif bare == "}" or bare.startswith("}, execution_thread"):
            computations[current] = Computation(current, tuple(body))
            current, body = None, []
        elif bare and not bare.startswith("//"):
            inst = _instruction(line, number)
            if inst is None:
                unread.append(f"line {number}: {bare[:160]}")
            else:
                body.append(inst)
    if current is not None:
        computations[current] = Computation(current, tuple(body))
        unread.append(f"line {text.count(chr(10)) + 1}: the text ends inside computation {current}")
    if not computations and not unread:
        unread.append("line 1: no computation in the text")
    m = re.match(r"HloModule\s+([^\s,]+)", header)
    return Module(
        m[1] if m else "",
        computations,
        entry or next(reversed(computations), ""),
        _header_int(header, "num_partitions"),
        _header_int(header, "replica_count"),
        _sources(sections),
        ":T(" in header,
        tuple(unread),
        "is_scheduled=true" in header,
    )


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with numbers; what spans several (a printed matrix, a kernel's metadata) is joined to its first line."""
    held, at = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if held:
            held += " " + line.strip()
            if line.strip() == "}" or _open_brackets(held) <= 0:
                yield at, held
                held = ""
        elif (" constant(" in line or "kernel_metadata={" in line) and _open_brackets(line) > 0:
            held, at = line, number
        else:
            yield number, line
    if held:
        yield at, held


def _open_brackets(line: str) -> int:
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
    return sum(bare.count(c) for c in "({") - sum(bare.count(c) for c in ")}")
