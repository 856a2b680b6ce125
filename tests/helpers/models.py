"""Models for tests: the demo's own, in sizes for a test.

>>> step, (params, opt_state, batch) = gpt_step(Config(layers=1, width=8, heads=2, context=4, batch=2))
>>> batch.shape
(2, 5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from demo.chargpt import Config as Config, batches, init, standard_library_text, train_step
from demo.tutorial import (
    dense_relu as dense_relu,
    dense_relu_inputs as dense_relu_inputs,
    ffn as ffn,
    ffn_inputs as ffn_inputs,
)


def gpt_step(config: Config | None = None, seed: int = 0) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """A GPT training step and arguments for it: `step(*args) -> (params, opt_state, loss)`."""
    config = config or Config()
    params, opt_state = init(config, seed)
    batch = next(batches(standard_library_text(100_000), config, seed))
    return train_step(config), (params, opt_state, batch)
