"""`python -m benchmarks.models.zoo.tunix_llama`: `.shard(...)` on the Llama of google-tunix (nnx), against the plain
model.

Needs Python 3.12 and `pip install google-tunix==0.1.7`, which brings JAX 0.12. The model is built inside a mesh, as
its own sharding metadata wants, and no line of it is changed. Printed: error of the outputs and of the gradients of
every parameter.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from tunix.models.llama3 import model as llama3

import jshard.flax  # noqa: F401  gives modules `.shard`
from benchmarks.models.zoo.__main__ import CHIP, error
from jshard import hardware


CONFIG = llama3.ModelConfig(
    num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=4,
    norm_eps=1e-5, rope_theta=500_000, weight_tying=False,
)  # fmt: skip
BATCH, LENGTH = 8, 16


def main() -> None:
    """Outputs and gradients of the sharded model beside the plain one."""
    hardware.register(CHIP)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        plain = llama3.Llama3(CONFIG, rngs=nnx.Rngs(0))
        sharded = llama3.Llama3(CONFIG, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, 256)
    labels = jax.nn.one_hot(jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, 256), 256)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    sharded.shard(in_strategy=((8, 1), (8, 1), None, (8, 1, 1)), mesh=mesh, hardware=CHIP.name)

    def loss(model):
        logits, _ = model(tokens, positions, None, mask)
        return -(jax.nn.log_softmax(logits.astype(jnp.float32)) * labels).mean()

    with jax.set_mesh(mesh):
        got, _ = nnx.jit(lambda m: m(tokens, positions, None, mask))(sharded)
        wanted, _ = nnx.jit(lambda m: m(tokens, positions, None, mask))(plain)
        forward, _ = error(got, wanted)
        of_sharded, of_plain = nnx.jit(nnx.grad(loss))(sharded), nnx.jit(nnx.grad(loss))(plain)
    leaves = jax.tree.leaves(of_plain)
    gradient, at = error(jax.tree.leaves(of_sharded), leaves)
    parameters = f"gradients of {len(leaves)} parameters {gradient:.1e} (leaf {at})"
    print(f"tunix Llama: outputs {forward:.1e}, {parameters}, {wanted.dtype}")
    if not max(forward, gradient) <= 1e-5:
        raise SystemExit("outputs or gradients differ from the plain model's")


if __name__ == "__main__":
    main()
