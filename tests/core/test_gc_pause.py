"""The garbage collector rests while a plan is made, and is as it was after, whatever happens."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._plan import level_search


X = jax.ShapeDtypeStruct((8, 8), "float32")


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collector(request):
    """The collector on or off, as the user has it."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_is_as_it_was_after_a_plan(collector, monkeypatch):
    seen = []
    solve = level_search.solve
    monkeypatch.setattr(level_search, "solve", lambda *a, **k: seen.append(gc.isenabled()) or solve(*a, **k))
    jshard.shard(lambda x: x @ x, in_strategy=((2, 1),)).plan(X)
    assert seen and not any(seen) and gc.isenabled() is collector


def test_it_is_as_it_was_while_the_user_is_traced(collector):
    seen = []
    jshard.shard(lambda x: (seen.append(gc.isenabled()), x + 1)[1]).plan(X)
    assert seen == [collector]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_it_is_as_it_was_after_an_error(collector, monkeypatch, error):
    def stopped(*_, **__):
        raise error

    monkeypatch.setattr(level_search, "solve", stopped)
    with pytest.raises(error):
        jshard.shard(lambda x: jnp.sin(x) @ x, in_strategy=((2, 1),)).plan(X)
    assert gc.isenabled() is collector


def test_what_the_user_has_frozen_stays_frozen(collector):
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        jshard.shard(lambda x: x @ x, in_strategy=((2, 1),)).plan(X)
        assert gc.get_freeze_count() > before / 2  # some are freed meanwhile
    finally:
        gc.unfreeze()


def test_without_the_users_freezing_nothing_is_frozen(collector):
    jshard.shard(lambda x: x @ x + 1, in_strategy=((2, 1),)).plan(X)
    assert gc.get_freeze_count() == 0
