"""Collectives between TPU slices, which libtpu writes as a `send` and a `recv` with attributes.

The text of a multi-slice program is that of one slice: `num_partitions` counts the devices of one slice, and a
collective between slices is a host transfer with its kind and devices as attributes. A collective within and between
slices is split in levels: an all-reduce is a reduce-scatter inside, an all-reduce across, an all-gather inside.

>>> from jshard._verify.hlo_parser import parse
>>> m = parse('''
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8] parameter(0)
...   %t = token[] after-all()
...   %send = (f32[8], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true,
... frontend_attributes={_xla_megascale_target="{1,2,3,4}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
... }'''.replace("true,\\n", "true, "))
>>> main = m.computations["main"]
>>> parse_transfer(main.by_name["send"], main)
MegascaleTransfer(kind='all_reduce', operand_bytes=32, group_size=4, num_slices=4, target='{1,2,3,4}x{0:7}')
"""

from __future__ import annotations

import dataclasses
import re

from jshard._verify.hlo_parser import Computation, Instruction


_KINDS = {
    "ALL_GATHER": "all_gather",
    "ALL_REDUCE": "all_reduce",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
}
_SLICE_STRIDE = 100_000  # the number of a device in a target is its slice (from 1) times this, plus its index


@dataclasses.dataclass(frozen=True)
class MegascaleTransfer:
    """One collective between slices: kind, local bytes, devices of a group, slices, and its devices as written."""

    kind: str
    operand_bytes: int
    group_size: int
    num_slices: int
    target: str


def transfer_type(inst: Instruction) -> str:
    """The kind of collective that a `send` or `recv` is part of, in libtpu's words; empty for other transfers."""
    m = re.search(r'_xla_megascale_transfer_type="(\w+)"', inst.attrs)
    return m[1] if m else ""


def parse_transfer(inst: Instruction, computation: Computation) -> MegascaleTransfer | None:
    """The transfer of a `send` between slices; None for other sends or if its operand is not in the text."""
    word = transfer_type(inst)
    source = computation.by_name.get(inst.operands[0]) if inst.operands else None
    if not word or source is None:
        return None
    m = re.search(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})', inst.attrs)
    target = m[1].strip('"') if m else ""
    operand = sum(s.bytes for s in source.shapes)
    grid = re.match(r"\{([\d,]+)\}x\{", target)
    if grid:
        size = slices = len(grid[1].split(","))
    else:
        first = re.match(r"\{\{([\d,>\-]+)\}", target)
        size = len(re.findall(r"\d+", first[1])) if first else 2
        slices = max((int(n) // _SLICE_STRIDE for n in re.findall(r"\d+", target)), default=size)
    return MegascaleTransfer(_KINDS.get(word, "permute"), operand, size, slices, target)
