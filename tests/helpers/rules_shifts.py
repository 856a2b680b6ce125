"""Examples that shift elements along a dimension: rolls, paddings of either sign, interleavings, slices of few positions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jshard._program.roll_primitive import roll
from tests.helpers.rules_table import example, floats, ints


@example
def shifts() -> tuple[Any, ...]:
    def fn(x: Any, y: Any) -> Any:
        rolled = [roll(x, 0, by) for by in (1, 3, 8, 15)] + [roll(y, 1, 2)]
        config = [(1, -1), (-1, 1), (3, -3), (-2, 2), (4, -4), (0, -8), (-8, 0), (8, 0), (-4, -4), (0, 0)]
        padded = [lax.pad(x, 2.5, ((low, high, 0), (0, 0, 0))) for low, high in config]
        interleaved = [
            lax.pad(x, 0.5, ((0, 1, 1), (0, 0, 0))),
            lax.pad(x, 0.0, ((2, 0, 2), (1, 0, 1))),
            lax.pad(x, 0.0, ((2, 1, 1), (0, 0, 0))),
        ]
        few = [lax.pad(x[:1], 1.0, ((0, 15, 0), (0, 0, 0))), lax.pad(x[:2], 1.0, ((9, 5, 0), (0, 0, 0)))]
        turned = [jnp.flip(x, 0), lax.rev(y, (0, 1))]
        both = lax.pad(y, -1, ((1, -1, 0), (-1, 1, 0)))
        owned = [x[3:4], x[15:, 1:3], x[:1]]
        return rolled, padded, interleaved, few, turned, both, owned

    return fn, floats(16, 4), ints(8, 8)
