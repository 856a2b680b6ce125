"""Bad input: each row of the table gets its own error, with the three parts of its text, and harms nothing.

Every row goes through floor 1 alone, and through the doors: there a good call on the same function and arguments
comes before and after it, whose plan is the one of before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core.errors import ShardError
from tests.helpers.bad_inputs import DENSE, ROWS, Row, read


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_message(row: Row):
    with pytest.raises(ShardError) as caught:
        read(row.call, **row.arguments)
    assert type(caught.value) is row.error
    assert (caught.value.what, caught.value.where, caught.value.fix) == (row.what, row.where, row.fix)


def test_rows_are_complete():
    assert len({r.name for r in ROWS}) == len(ROWS) >= 100
    assert all(r.what and r.where and r.fix for r in ROWS)


def test_good_input_of_the_table_passes():
    # The table would prove nothing if its reader refused everything.
    chosen = read(
        DENSE,
        in_strategy=((4, 2), None, None),
        parameter_plan={"w": (2, 1)},
        device="cpu",
        level=2,
        out_strategy="full_batch",
        memory_budget="14GiB",
        search="propagation",
        strict=True,
    )
    assert [str(p) for p in chosen.pins] == ["(4, 2)", "(2, 1)", "None", "(1, 1)"]


@functools.lru_cache
def planned_well(fn):
    """The function of a row, sharded without options: one object for all rows, whose plans are kept."""
    return jshard.shard(fn)


def arrays(tree):
    return jax.tree.map(lambda s: jnp.full(s.shape, 2.0) if isinstance(s, jax.ShapeDtypeStruct) else s, tree)


CALLABLE = [r for r in ROWS if callable(r.call.fn)]


@pytest.mark.parametrize("row", CALLABLE, ids=[r.name for r in CALLABLE])
def test_through_the_doors_and_a_good_call_after(row: Row):
    fn, (args, kwargs) = row.call.fn, arrays((row.call.args, row.call.kwargs))
    good_args = args if all(isinstance(x, jax.Array) for x in jax.tree.leaves(args)) else (jnp.ones(4),)
    good = planned_well(fn)
    want = good(*good_args, **kwargs)
    plans = dict(good._executables)
    bad = None
    for _ in range(2):  # the second time too: nothing half made is found
        with pytest.raises(ShardError) as caught:
            bad = jshard.shard(fn, **row.arguments)
            bad(*args, **kwargs)
        assert type(caught.value) is row.error
        assert (caught.value.what, caught.value.where, caught.value.fix) == (row.what, row.where, row.fix)
    if bad is not None:
        with pytest.raises(row.error):
            bad.plan(*args, **kwargs)
        assert not bad._executables
    assert all((x == 2).all() for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array))
    again = good(*good_args, **kwargs)
    assert good._executables == plans
    jax.tree.map(np.testing.assert_array_equal, again, want)
    jax.tree.map(np.testing.assert_array_equal, again, fn(*good_args, **kwargs))
