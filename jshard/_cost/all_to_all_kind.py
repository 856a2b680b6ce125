"""Which all-to-alls are written as permutes, and what of their seconds is transfer.

Compilers for TPUs write an all-to-all with copies that reorder its operand and its result. Written as permutes
(`_lower/all_to_all_permutes.py`) it has the same load on the links, and in place of the copies a kernel that slices the
parts, one that selects among those that arrived, and one that puts them together. For 16.8 MB on v5e libtpu estimates 80,
82 and 147 thousand cycles for the three, 206 us together; the copies' formula gives 207 us. So the price is the same.

Permutes are asynchronous on v5e: products run beside the transfer, though not beside the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from jshard._core.topology import Topology
from jshard._cost.collectives import reordering_seconds


MOST_PARTS = 4
"""The largest group: each place of the result reads as many parts."""


def all_to_all_in_permutes(axes: tuple[str, ...], nbytes: float, topology: Topology) -> bool:
    """Whether an all-to-all of blocks of so many bytes is written as permutes.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x", "y"), (4, 8)), hardware.get("v5e"))
    >>> [all_to_all_in_permutes((a,), n, t) for a, n in (("x", 4e6), ("x", 4e4), ("y", 4e6))]
    [True, False, False]
    """
    n = topology.mesh.size(*axes)
    torus = all(w.kind == "ici" for a in axes for w in topology.link(a).wires if w.size > 1)
    return (
        torus
        and 1 < n <= MOST_PARTS
        and reordering_seconds(nbytes, topology.chip) > n * topology.chip.startup
    )


def asynchronous_seconds(
    kind: str, axes: Sequence[str], received: float, seconds: float, topology: Topology
) -> float:
    """The seconds of a collective of a reshard beside which products may run.

    Arguments:

    - `received`: bytes that a device receives. `seconds`: of the whole collective.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> v5e, v5p = (from_mesh(MeshAxes(("x",), (4,)), hardware.get(c)) for c in ("v5e", "v5p"))
    >>> some = ((3e6, v5e), (3e4, v5e), (3e6, v5p))
    >>> [f"{asynchronous_seconds('all_to_all', ('x',), n, 2e-4, t):.3g}" for n, t in some]
    ['0.000151', '0', '0']
    """
    kinds = topology.chip.async_kinds
    if kind in kinds:
        return seconds
    n = topology.mesh.size(*axes)
    if kind != "all_to_all" or "permute" not in kinds or n == 1:
        return 0.0
    operand = received * n / (n - 1)
    if not all_to_all_in_permutes(tuple(axes), operand, topology):
        return 0.0
    return max(0.0, seconds - reordering_seconds(operand, topology.chip))
