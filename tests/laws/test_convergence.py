"""Training on real texts is the same on several devices as on one: the benchmark `convergence` at a small size."""

from __future__ import annotations

import numpy as np

from benchmarks.correctness import convergence
from benchmarks.correctness.docstrings import docstrings


def test_accuracy_f1_and_loss_are_those_of_plain_jax():
    """Microbatches, dropout and AdamW, by the recipe `fsdp+megatron` on 2 x 4 devices."""
    texts = docstrings(packages=("json", "ctypes", "concurrent"), length=16, vocabulary=200)
    s = convergence.Setting(layers=1, width=16, classes=3, batch=32, accumulation=4, epochs=1)
    machine = "8 devices, fsdp+megatron"
    found = convergence.runs(s, texts, "float32", {machine: convergence.MACHINES[machine]})
    plain, sharded = found["plain JAX"], found[machine]
    assert len(plain.losses) > 8 and plain.losses[-1] < plain.losses[0]
    np.testing.assert_allclose(sharded.losses, plain.losses, rtol=1e-5)
    np.testing.assert_array_equal(sharded.predictions, plain.predictions)
    assert (sharded.accuracy, sharded.f1) == (plain.accuracy, plain.f1)
    np.testing.assert_allclose(sharded.test_loss, plain.test_loss, rtol=1e-5)
