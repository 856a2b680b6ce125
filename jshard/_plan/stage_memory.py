"""What a device of a pipeline's stage holds at the peak: arguments, activations in flight, sums, what ticks read or pass on.

Every stage runs one program, so the figures are those of each stage. A value in memory at the peak belongs to the loops over
ticks by where it enters or leaves them: the stacks that forward ticks write for the backward ticks are the activations
in flight, the sums that ticks add to are those over microbatches (gradients of weights).

>>> import jax, jax.numpy as jnp
>>> import jshard
>>> def loss(w, x):
...     return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)
>>> w, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
>>> mesh = jshard.topology("v5e:2x4", {"stage": 4, "data": 2})
>>> pipeline = {"axis": "stage", "microbatches": 4}
>>> plan = jshard.shard(jax.grad(loss), mesh=mesh, config={"pipeline": pipeline}).plan(w, x)
>>> [name for name, _ in plan.memory.stage]  # doctest: +NORMALIZE_WHITESPACE
['argument w', 'argument x', 'activations in flight', 'read by every tick', 'passed on or returned by ticks',
 'other values']
>>> of_a_value = 7 * 2 * (256 // 4 // 2) * 64 * 4  # ticks, layers of a stage, rows, width, bytes
>>> dict(plan.memory.stage)["activations in flight"] % of_a_value
0.0
>>> sum(b for _, b in plan.memory.stage) == plan.cost.peak_bytes
True
"""

from __future__ import annotations

from jshard._program.graph import Call, Literal, Program, calls_of
from jshard._program.stage_shift import STAGE_SHIFT
from jshard._schedule.peak_profile import PeakProfile


IN_FLIGHT, SUMS, PASSED, READ, REST = (
    "activations in flight",
    "sums over microbatches",
    "passed on or returned by ticks",
    "read by every tick",
    "other values",
)


def memory_of_a_stage(program: Program, profile: PeakProfile) -> tuple[tuple[str, float], ...]:
    """(class, bytes) at the peak on a device of any stage, arguments first; empty without a pipeline.

    They add up to the peak. `profile` is that of a schedule of `program`.
    """
    loops = [c for c in calls_of(program.body) if _is_tick_loop(c, program)]
    if not loops:
        return ()
    class_of = _classes(loops, program)
    found = dict.fromkeys(dict.fromkeys(h.kind for h in profile.held if _is_argument(h.kind)), 0.0)
    found.update(dict.fromkeys((IN_FLIGHT, SUMS, READ, PASSED), 0.0))
    for h in profile.held:
        kind = h.kind if _is_argument(h.kind) else class_of.get(h.tensor, REST)
        if kind != REST:
            found[kind] += h.nbytes
    return (*((k, b) for k, b in found.items() if b), (REST, profile.peak - sum(found.values())))


def _is_argument(kind: str) -> bool:
    return kind.startswith("argument")


def _is_tick_loop(call: Call, program: Program) -> bool:
    return call.kind == "scan" and any(
        isinstance(s, int) and program.operators[s].primitive == STAGE_SHIFT for s in call.blocks[0].steps
    )


def _classes(loops: list[Call], program: Program) -> dict[int, str]:
    """Of the tensors that enter and leave the loops over ticks: their class."""
    ops = program.operators
    read_later = {a for c in loops for name in ("xs", "const") for i in c.boundary[name] for a in ops[i].operands
                  if not isinstance(a, Literal)}  # fmt: skip
    out: dict[int, str] = {}
    for call in loops:
        for name in ("xs", "const"):
            for i in call.boundary[name]:
                out.update(
                    (t, READ) for t in (*ops[i].operands, *ops[i].results) if not isinstance(t, Literal)
                )
    for call in loops:
        for i in call.boundary["carry"]:
            kind = SUMS if ops[i].kind == "scan_sum" else PASSED
            out.update(
                (t, kind) for t in (*ops[i].operands[:1], *ops[i].results) if not isinstance(t, Literal)
            )
        for i in call.boundary["ys"]:
            for t in ops[i].results:
                out[t] = IN_FLIGHT if t in read_later else PASSED
    return out
