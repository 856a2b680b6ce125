"""The registry of operator examples, and the values on which they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {}


def example(f: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """Registers an example under its function's name."""
    EXAMPLES[f.__name__] = f
    return f


def floats(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Random normal numbers."""
    return jnp.asarray(np.random.RandomState(seed + sum(shape)).randn(*shape), dtype)


def ints(*shape: int, low: int = -50, high: int = 50, seed: int = 0, dtype: Any = np.int32) -> jax.Array:
    """Random integers in `low..high`."""
    return jnp.asarray(np.random.RandomState(seed + sum(shape)).randint(low, high, shape), dtype)


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


NO_EXAMPLE: dict[str, str] = {
    **_because(
        "the planner's own",
        "cond_join scan_carry scan_sum scan_const scan_xs scan_ys scan_summed_ys while_carry while_const predicate "
        "jshard_fused jshard_own_result jshard_pin_result jshard_module_output",
    ),
    **_because(
        "a pin of the user's: see tests/program/test_pin_primitives.py, tests/spec/test_committed_shardings.py",
        "sharding_constraint reshard layout_constraint out_sharding",
    ),
    **_because("written for devices by the user: see tests/program/test_user_shard_map.py", "shard_map"),
    **_because(
        "equinox's, which the judge does not import: elementwise, or reduced to one scalar",
        "empty2 nonbatchable select_if_vmap unvmap_all unvmap_any unvmap_max",
    ),
    **_because(
        "arises only inside JAX: in typed meshes, tokens, shapes, or the lowering of other primitives",
        "after_all copy_p create_token dimension_size empty eq_to expand_dims from_edtype geqp3 geqrf igamma_grad_a "
        "iota_2x32_shape le_to lt_to mesh_cast mulhi ormqr philox2x32 philox4x32 platform_index pvary reciprocal "
        "relayout rng_uniform scaled_dot select_and_scatter threefry4x32 to_edtype with_memory_space_constraint "
        "xla_metadata_value zeros_like",
    ),
    **_because("traced by JAX 0.12 only", "log2 one_minus_square polynomial"),
}
"""Registered primitives that no example traces to, each with the reason."""
