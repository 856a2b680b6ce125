"""Outputs of Flax modules as named values of the traced program, so that rules of a configuration can pin them.

While `marked_outputs` is active, every call of a module passes each array of its output through an identity with the
module's path (`_program/pin_primitives.py`). Names are `layers.0.attn`; "" is the model. linen's own interception of
methods gives the calls of its modules, `name_scopes.py` those of nnx.

>>> import jax, jax.numpy as jnp
>>> from flax import linen as nn
>>> model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
>>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
>>> with marked_outputs():
...     jaxpr = jax.make_jaxpr(lambda x: model.apply(variables, x))(jnp.ones((1, 3)))
>>> [e.params["pin"].path for e in jaxpr.eqns if e.primitive.name == "jshard_module_output"]
['layers_0', 'layers_1', '']
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence

import jax
from flax import linen as nn

from jshard._core.jax_types import Function, PyTree
from jshard._program.pin_primitives import ModuleOutput, mark_module_output


_ACTIVE: contextvars.ContextVar[bool] = contextvars.ContextVar("marks outputs", default=False)


@contextlib.contextmanager
def marked_outputs() -> Iterator[None]:
    """A context in which the outputs of all modules are named."""
    token = _ACTIVE.set(True)
    try:
        with nn.intercept_methods(_intercept):
            yield
    finally:
        _ACTIVE.reset(token)


def mark_output(y: PyTree, path: Sequence[str]) -> PyTree:
    """The output of the module at a path, its arrays named; unchanged outside of `marked_outputs`."""
    if not _ACTIVE.get():
        return y
    name = ".".join(map(str, path))
    if type(y) not in (tuple, list):
        return jax.tree.map(lambda x: _mark(x, ModuleOutput(name)), y)
    return type(y)(
        jax.tree.map(lambda x, i=i: _mark(x, ModuleOutput(name, i, len(y))), part) for i, part in enumerate(y)
    )


def _mark(x: object, name: ModuleOutput) -> object:
    return mark_module_output(x, name) if isinstance(x, jax.Array) else x


def _intercept(
    call: Function,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    context: nn.module.InterceptorContext,
) -> PyTree:
    y = call(*args, **kwargs)
    return mark_output(y, context.module.path) if context.method_name == "__call__" else y
