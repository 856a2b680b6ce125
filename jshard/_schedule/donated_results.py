"""Results that a collective makes and that take over a donated argument's buffer.

Problem.  The new weights of a step are often gathered last: each device updates its part, and an all-gather makes the
whole. The result has the buffer of the donated weights. But the TPU compiler lets no collective write there: it gives
the all-gather a buffer of its own, copies that into the argument's, and copies the argument when the program starts,
so that whole weights are in memory twice from beginning to end. Three stacked weights of 235 MB on a v5e: 705 MB more.

Idea.  Where an elementwise operator makes the result, it writes into the argument's buffer, and no argument is copied. So
such a result is selected from itself by a predicate that compilers do not know (`_lower/local_interpreter.py`). What
is left is the collective's own buffer until it is copied: counted beside the result (`peak_reference.py`,
`peak_vectorized.py`). Large ones are made one after the other, so that there is one such buffer at a time.

Seen with libtpu 0.0.42 on v5e:4x4, three donated stacks of 134 MB that are gathered last: six copies and 946 MB; 828
without the copies; 572 one after the other; 547 planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from jshard._core.layout import Layout
from jshard._program.graph import Literal
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.schedule import Schedule
from jshard._schedule.writer import Reshard


def results_over_arguments(
    assignment: Assignment, outputs: Sequence[Value | Literal], donated: Collection[int]
) -> set[Value]:
    """The results that take over the buffer of a donated argument.

    As JAX pairs them: each donated argument with the first result of its shape, type and layout.
    """
    if not donated or not assignment.topology.chip.name.startswith("tpu"):
        return set()
    program = assignment.program
    arguments = [program.operators[program.inputs[k]].results[0] for k in sorted(donated)]
    free = Counter(_buffer(assignment, t, assignment.result_layout(t)) for t in arguments)
    out: set[Value] = set()
    for v in outputs:
        if isinstance(v, Literal) or v in out:
            continue
        buffer = _buffer(assignment, *v)
        if free[buffer]:
            free[buffer] -= 1
            out.add(v)
    return out


def _buffer(assignment: Assignment, tensor: int, layout: Layout) -> Hashable:
    aval = assignment.program.tensors[tensor]
    return tuple(aval.shape), aval.dtype, layout


def gathered_over_arguments(schedule: Schedule, donated: Collection[int]) -> frozenset[Value]:
    """The results that a collective makes and that take over a donated argument's buffer."""
    over = results_over_arguments(schedule.assignment, schedule.outputs, donated)
    reshards = (a for a in (schedule.actions if over else ()) if isinstance(a, Reshard))
    made = {(a.tensor, a.target) for a in reshards if any(n >= 0 for n in a.collective_ids)}
    return frozenset(over & made)
