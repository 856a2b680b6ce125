"""The cost of a user's `jax.shard_map`: the compute of its body on one device, and the collectives that it calls.

Problem.  The body is the user's: the search neither partitions nor reshards anything in it. But its products and its
collectives take time, and a plan without them would be faster than any device.

Idea.  The body is a program on one device's shards. It is traced like any other: calls are inlined, loops counted by
their trip counts, every operator costed by its rule without partitioning (the roofline of its type; fused values stay in
registers). Equations that name mesh axes are collectives, and their operands give the bytes of a device before them.

The trip count of a `while` loop is unknown; its body counts as one iteration, as everywhere.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jshard._core.jax_types import ClosedJaxpr, Jaxpr
from jshard._core.layout import MeshAxes
from jshard._core.topology import Topology
from jshard._cost import collectives
from jshard._cost.collectives import Collective, CollectiveKind
from jshard._network.candidates import CandidateCache
from jshard._network.kernel_seconds import arithmetic_seconds, parts_seconds_in_all
from jshard._program.graph import Literal, Operator
from jshard._program.memory.kernel_fusion import kernels
from jshard._program.operators import Tensor
from jshard._program.trace import build
from jshard._rules.registry import OpView
from jshard._rules.rule import Rule


_KIND_OF_PRIMITIVE: dict[str, CollectiveKind] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "unreduced_psum"), "all_reduce"),
    **dict.fromkeys(("unreduced_pmax", "unreduced_pmin"), "all_reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce_scatter"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all_to_all"),
    **dict.fromkeys(("ppermute", "pbroadcast", "pbroadcast_dynamic", "psend"), "permute"),
}


@dataclasses.dataclass(frozen=True)
class UserCollective:
    """A collective that the user wrote: one execution of it, how many there are, the shard before it.

    `per_iteration`: it is in a loop of unknown trip count, and `count` is that of one iteration.
    """

    collective: Collective
    count: float
    block: tuple[int, ...]
    dtype: str
    per_iteration: bool


@dataclasses.dataclass(frozen=True)
class ShardMapCost:
    """Seconds of compute of one device in one run of a body, and the collectives in it."""

    compute: float
    collectives: tuple[UserCollective, ...]

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(c.collective.seconds * c.count for c in self.collectives)


def shard_map_cost(jaxpr: Jaxpr | ClosedJaxpr, topology: Topology) -> ShardMapCost:
    """What the body of a `shard_map` does, given its jaxpr on one device's blocks.

    >>> import jax, jax.numpy as jnp
    >>> from jshard._core import hardware
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x",), (4,)), hardware.get("v5e"))
    >>> a = jnp.ones((2048, 2048))
    >>> body = jax.make_jaxpr(lambda a, b: jax.lax.psum(a @ b, "x"), axis_env=[("x", 4)])(a, a)
    >>> cost = shard_map_cost(body, t)
    >>> [(c.collective.kind, c.collective.axes, c.collective.bytes, c.count) for c in cost.collectives]
    [('all_reduce', ('x',), 25165824.0, 1.0)]
    >>> units = t.chip.units
    >>> f"{cost.compute:.3g}", f"{2 * 2048**3 / (units.efficiency * t.chip.f32_flops) + units.launch:.3g}"
    ('9.3e-05', '9.3e-05')
    """
    program = build(jaxpr, name="the body of a shard_map", input_names=[])
    units = topology.chip.units
    found = kernels(program, into_products=units.fuses)
    cache = CandidateCache(program, MeshAxes((), ()))
    seconds, user_collectives = 0.0, []
    for op in program.operators:
        if op.kind != "eqn":
            continue
        kind, axes = _collective(op, topology.mesh)
        if kind is None:
            view, rule, _ = cache.rule_of(op)
            work = np.array([_work(view, rule)])
            codes = np.zeros((1, 0), dtype=np.int64)
            arithmetic = arithmetic_seconds(view, rule, work, codes, MeshAxes((), ()), topology.chip)
            parts = found.parts[op.id] + found.fused_parts(op.id)
            moved = parts_seconds_in_all(parts, topology.chip, op.primitive)
            seconds += op.repeat * (
                max(float(arithmetic[0]), moved) + (units.launch if found.launched[op.id] else 0.0)
            )
            continue
        for a in op.operands if axes else ():
            aval = a.aval if isinstance(a, Literal) else program.tensors[a]
            nbytes = math.prod(aval.shape) * (aval.itemsize if isinstance(aval, Tensor) else 4)
            distance = _distance(op, topology.mesh.size(*axes)) if kind == "permute" else None
            sent = (
                collectives.collective(kind, axes, nbytes, topology)
                if distance is None
                else collectives.shift(axes, distance, nbytes, topology)
            )
            user_collectives.append(
                UserCollective(
                    sent, op.repeat, tuple(aval.shape), str(aval.dtype), op.id in program.in_unbounded_loops
                )
            )
    return ShardMapCost(seconds, tuple(user_collectives))


def operation_count(closed: ClosedJaxpr) -> float:
    """Arithmetic operations of a traced function: a lower bound where it has operators without a rule.

    >>> import jax, jax.numpy as jnp
    >>> a = jnp.ones((8, 16))
    >>> traced = jax.make_jaxpr(lambda a: jax.lax.fori_loop(0, 3, lambda i, c: a @ (a.T @ c), a))(a)
    >>> operation_count(traced) >= 3 * 2 * 2 * 8 * 16 * 16
    True
    """
    program = build(closed, name="a function", input_names=[])
    cache = CandidateCache(program, MeshAxes((), ()))
    return sum(op.repeat * _work(*cache.rule_of(op)[:2]) for op in program.operators if op.kind == "eqn")


def _work(view: OpView, rule: Rule) -> float:
    if rule.opaque:
        return float(sum(math.prod(a.shape) for a in view.outs))
    return rule.work * math.prod(rule.sizes)


def _collective(op: Operator, mesh: MeshAxes) -> tuple[CollectiveKind | None, tuple[str, ...]]:
    """The kind of collective that an operator is, None for no collective, and the mesh axes it goes over."""
    name = op.primitive.removesuffix("_start")
    if name not in _KIND_OF_PRIMITIVE:
        return None, ()
    params = op.equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
    # Axes of size one are not in `mesh`.
    return _KIND_OF_PRIMITIVE[name], tuple(a for a in mesh.names if a in axes)


def _distance(op: Operator, n: int) -> int | None:
    """How far a permute over n devices sends, the same for all and without going round; None for others."""
    pairs = op.equation.params.get("perm", ())
    distances = {int(j) - int(i) for i, j in pairs}
    return abs(distances.pop()) if len(distances) == 1 and 0 < len(pairs) < n else None
