"""From a closed jaxpr to a `Program`.

`jax.jit(f).trace` does the tracing, so static and donated arguments, keywords and pytrees mean what they mean in JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.gc_pause import gc_paused
from jshard._core.jax_types import ClosedJaxpr, Jaxpr
from jshard._program import loops
from jshard._program.builder import KEPT_CALLS, Builder, LoopWriter, PinOfName
from jshard._program.dead_operators import without_dead_operators
from jshard._program.empty_results import with_empty_constants
from jshard._program.graph import Program
from jshard._program.loop_invariants import INLINED_CALLS
from jshard._program.unread_sorted import without_unread_operands
from jshard._program.written_back import with_updates_in_place


_LOOPS: Mapping[str, LoopWriter] = {"scan": loops.scan, "while": loops.while_loop, "cond": loops.cond}
CALL_PRIMITIVES = frozenset({*INLINED_CALLS, *KEPT_CALLS, *_LOOPS})
"""Primitives whose bodies are entered."""


@gc_paused()
def build(
    jaxpr: Jaxpr | ClosedJaxpr, *, name: str, input_names: Sequence[str], output_names: Sequence[str] = (),
    captured: Sequence[jax.Array] = (), pin_of_name: PinOfName | None = None,
) -> Program:  # fmt: skip
    """Flatten a closed jaxpr into a `Program`.

    Arguments:

    - `name`: of the function, for reports and errors.
    - `input_names`, `output_names`: paths of the flat arguments and results; missing ones are numbered.
    - `pin_of_name`: the user's pins on named values, by the equations that name them.
    - `captured`: tracers that the function closes over: they are the first inputs of the jaxpr.
    """
    opened, consts = compat.open_jaxpr(jaxpr)
    opened = with_empty_constants(compat.without_dead_code(opened))
    opened = with_updates_in_place(without_unread_operands(opened))
    builder = Builder(name, _LOOPS, pin_of_name)
    program = builder.program(jaxpr, opened, consts, list(input_names), list(output_names), list(captured))
    return without_dead_operators(program)
