"""The demo's model is a causal language model that learns, and its batches are parts of the text."""

from __future__ import annotations

import dataclasses
import itertools
import math

import chex
import jax
import numpy as np
import pytest

from demo import chargpt
from demo.bar import progress
from tests.helpers.models import Config, gpt_step


TINY = Config(layers=1, width=16, heads=2, context=12, batch=4, learning_rate=1e-2)


def random_params(config: Config) -> chargpt.Params:
    """Parameters that are quickly drawn; what is tested with them holds for all."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: chargpt.init_params(config, seed=0))
    return jax.tree.map(lambda s: (0.2 * rng.normal(size=s.shape)).astype(s.dtype), shapes)


def test_a_later_character_changes_no_earlier_score() -> None:
    tokens = np.arange(TINY.context)[None] % TINY.vocab
    changed = tokens.copy()
    changed[0, 7] = 99
    logits = jax.jit(chargpt.logits, static_argnums=2)
    before, after = (logits(random_params(TINY), t, TINY) for t in (tokens, changed))
    chex.assert_trees_all_close(before[:, :7], after[:, :7], atol=1e-6)
    assert not np.allclose(before[:, 7], after[:, 7], atol=1e-3)


def test_at_the_start_every_character_is_as_likely() -> None:
    _, (params, _, batch) = gpt_step(TINY)
    assert chargpt.loss(params, batch, TINY) == pytest.approx(math.log(TINY.vocab), rel=0.02)


def test_scan_and_remat_change_neither_loss_nor_gradients() -> None:
    config = dataclasses.replace(TINY, layers=2)
    batch = next(chargpt.batches("import this\n" * 50, config, seed=0))
    f = jax.jit(jax.value_and_grad(chargpt.loss), static_argnums=2)

    def stacked(params: chargpt.Params) -> chargpt.Params:
        return {**params, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"])}

    params, looped = random_params(config), dataclasses.replace(config, scan=True, remat=True)
    loss, grads = f(params, batch, config)
    other_loss, other_grads = f(stacked(params), batch, looped)
    assert jax.tree.map(np.shape, other_grads) == jax.tree.map(np.shape, random_params(looped))
    grads = stacked(grads)
    chex.assert_trees_all_close(loss, other_loss, rtol=1e-5)
    chex.assert_trees_all_close(grads, other_grads, rtol=1e-4, atol=1e-6)


def test_training_learns() -> None:
    step, (params, opt_state, _) = gpt_step(TINY)
    step, losses = jax.jit(step), []
    for batch in itertools.islice(chargpt.batches("import this\n" * 50, TINY, seed=1), 40):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_the_text_is_the_standard_library_and_batches_are_pieces_of_it() -> None:
    text = chargpt.standard_library_text(300_000)
    assert len(text) == 300_000 and "import" in text and "def " in text
    ascii_text = text.encode("ascii", errors="replace").decode()
    first, again = (next(chargpt.batches(text, TINY, seed=3)) for _ in range(2))
    chex.assert_trees_all_equal(first, again)
    assert first.shape == (4, 13) and first.dtype == np.int32
    assert all("".join(map(chr, row)) in ascii_text for row in first)


def test_progress_counts_and_reports_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress("work", 8)) == list(range(8))
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("]")[1].split()[0] for line in shown] == ["2/8", "4/8", "6/8", "8/8"]
