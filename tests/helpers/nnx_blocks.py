"""The network of MindSpore's tutorial on `shard`, in nnx: three blocks of two dense layers."""

from __future__ import annotations

from flax import nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense1 = nnx.Linear(32, 32, rngs=rngs)
        self.dense2 = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.dense2(nnx.gelu(self.dense1(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block1, self.block2, self.block3 = Block(rngs), Block(rngs), Block(rngs)

    def __call__(self, x):
        return self.block3(self.block2(self.block1(x)))
