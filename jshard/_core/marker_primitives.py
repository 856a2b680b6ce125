"""Two primitives that return their operand and say something of it: whose argument it is, that nothing may run it.

>>> import jax
>>> print(jax.make_jaxpr(lambda x: mark_argument(x, "f") + 1)(1.0).eqns[0].primitive)
jshard_boundary
"""

from __future__ import annotations

from typing import NoReturn

import jax
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.errors import MeshError, NestedShardError, ShardError


ARGUMENT_MARKER = "jshard_boundary"

# Tangents bypass it, so that derivatives of a sharded function carry no marker.
argument_marker_p = compat.identity_primitive(ARGUMENT_MARKER)


def _refuse_batching(args: object, dims: object, *, name: str) -> NoReturn:
    raise NestedShardError(
        f"vmap of the sharded function {name}",
        where=f"jax.vmap({name})",
        fix=f"put vmap inside: jshard.shard(jax.vmap(f), ...) instead of jax.vmap(jshard.shard(f, ...)) for f = {name}",
    )


batching.primitive_batchers[argument_marker_p] = _refuse_batching


def mark_argument(x: ArrayLike, name: str) -> jax.Array:
    """`x`, marked as an argument of the sharded function `name`: `vmap` and an outer `shard` then raise an error."""
    return argument_marker_p.bind(x, name=name)


def _nothing_runs(ctx: object, x: object, *, what: str, where: str, fix: str) -> NoReturn:
    raise MeshError(what, where=where, fix=fix)


described_p = compat.identity_primitive("jshard_described")
described_p.def_impl(lambda x, *, what, where, fix: _nothing_runs(None, x, what=what, where=where, fix=fix))
mlir.register_lowering(described_p, _nothing_runs)


def never_compiled(x: jax.Array, error: ShardError) -> jax.Array:
    """`x`, such that programs containing it can be traced for shapes, but raise the error when compiled."""
    return described_p.bind(x, what=error.what, where=error.where, fix=error.fix)
