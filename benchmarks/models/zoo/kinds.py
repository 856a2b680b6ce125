"""The interface of a model of the zoo: parameters, a batch, how to apply it, and its loss.

`apply(params, state, batch, train)` gives the outputs and the new state (batch statistics, seeds), for every
library, so that a whole training step is the same few lines for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Model:
    """One network at a tiny size, with a batch whose every leaf has the batch as its first dimension."""

    params: Any
    batch: Any
    apply: Callable[[Any, Any, Any, bool], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    state: Any = ()
    # The training step as users of its library write it, instead of ours.
    step: Callable[..., Any] | None = None
    # Parameters anew, as a function that can be traced.
    create: Callable[[], Any] | None = None
    # The same model with attention as one operator, or fused norms, by name; with no names, what that is compared with.
    fused: Callable[[tuple[str, ...]], Model] | None = None


def cross_entropy(logits: Any, batch: Any) -> Any:
    """Mean cross entropy against `batch["labels"]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# eps: a gradient that is zero but for rounding stays an update that is zero but for rounding, so that what is
# compared after the step is the step and not the noise's sign.
OPTIMIZER = optax.adamw(1e-3, eps=1e-3)


def forward(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function from parameters, state and batch to outputs, and its arguments."""

    def predict(params, state, batch):
        return model.apply(params, state, batch, False)[0]

    return predict, (model.params, model.state, model.batch)


def train_step(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The whole step: loss, gradients, AdamW; and its arguments."""

    def step(params, state, optimizer, batch):
        def loss(p):
            out, new = model.apply(p, state, batch, True)
            return model.loss(out, batch), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return value, grads, optax.apply_updates(params, updates), new, optimizer

    shapes = jax.eval_shape(OPTIMIZER.init, model.params)
    held = jax.tree.leaves(model.params)
    concrete = not isinstance(held[0], jax.ShapeDtypeStruct)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes) if concrete else shapes
    return model.step or step, (model.params, model.state, start, model.batch)
