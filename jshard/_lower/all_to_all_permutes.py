"""An all-to-all as permutes of its parts: device i sends part i + d to device i + d, for each distance d.

Problem.  Compilers for TPUs reorder the operand of an all-to-all before it, and its result after it, with copies that may
take as long as the transfer: 72 us for 4.8 MB on v5e, beside 96 us on the links of a line of four devices.

Idea.  A permute sends a part as it is sliced and receives it as it is read, in any memory layout. The permutes by 1 to n - 1
positions around the group load the busiest link of a line or a ring with what the all-to-all does: min(d, n - d) parts on a
line, n^2 / 4 in all. Each place of the result then selects among n parts, since what arrives from which distance depends on
the device: so this is for small groups, and for arrays whose copies take longer than the permutes' start
(`_cost/all_to_all_kind.py` decides).

>>> import numpy as np
>>> from jax.sharding import AxisType, PartitionSpec as P
>>> mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
>>> def exchanged(x):
...     return all_to_all_by_permutes(x, ("x",), split=1, join=0, mesh=MeshAxes(("x",), (4,)))
>>> x = np.arange(64).reshape(8, 8)
>>> f = jax.shard_map(exchanged, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"), check_vma=False)
>>> bool((jax.jit(f)(x) == x).all())
True
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.layout import MeshAxes
from jshard._rules.registry import block_index


def all_to_all_by_permutes(
    x: jax.Array, axes: tuple[str, ...], split: int, join: int, mesh: MeshAxes
) -> jax.Array:
    """`lax.all_to_all(x, axes, split, join, tiled=True)`; the parts' permutes are named as one all-to-all."""
    n = mesh.size(*axes)
    size = x.shape[split] // n
    device = jnp.asarray(block_index(axes, mesh), jnp.int32)
    # `lax.ppermute` counts positions in the group by the mesh's order of its axes.
    in_mesh_order = tuple(a for a in mesh.names if a in axes)
    sizes = [mesh.size(a) for a in in_mesh_order]
    order = [in_mesh_order.index(a) for a in axes]
    position = np.arange(n).reshape(sizes).transpose(order).ravel().tolist()
    arrived = []
    with jax.named_scope("all_to_all"):
        for distance in range(n):
            part = lax.dynamic_slice_in_dim(x, (device + distance) % n * size, size, split)
            if distance:
                pairs = [(position[i], position[(i + distance) % n]) for i in range(n)]
                part = lax.ppermute(part, in_mesh_order, pairs)
            arrived.append(part)
        # The part of device i comes from the distance at which this device lies behind it.
        parts = [lax.select_n((device - i) % n, *arrived) if n > 2 else
                 lax.select(device == i, arrived[0], arrived[1]) for i in range(n)]  # fmt: skip
        return lax.concatenate(parts, join)
