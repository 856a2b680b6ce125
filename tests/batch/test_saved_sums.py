"""Sums over the batch that checkpointed layers compute again: what the forward loop returns in their place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._batch.batch_class import SHARED, per_example
from jshard._batch.body_classes import Analysis
from jshard._batch.saved_sums import with_sums_saved
from jshard._core import jaxcompat as compat


def test_loops_may_read_literals() -> None:
    """A number that a call hands to its loop is a literal of the loop once the call is written out."""

    @jax.jit
    def layers(w: Any, x: Any, scale: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            h, balance = carry
            y = scale * jnp.tanh(h @ w)
            return (h + y, balance + jnp.sum(jnp.mean(y, 0) ** 2)), None

        return jax.lax.scan(jax.checkpoint(layer), (x, 0.0), w)[0]

    def loss(w: Any, x: Any) -> Any:
        h, balance = layers(w, x, np.float32(0.5))
        return jnp.mean(h**2) + balance

    w, x = jnp.ones((4, 3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 24
    closed = jax.make_jaxpr(jax.grad(loss))(w, x)
    saved = with_sums_saved(closed, [SHARED, per_example(0)], Analysis(8, 4))
    assert [len(e.outvars) for e in saved.jaxpr.eqns if e.primitive.name == "scan"] == [4, 3]
    (found,) = compat.as_function(saved)(w, x)
    np.testing.assert_allclose(found, jax.grad(loss)(w, x), rtol=1e-6)
