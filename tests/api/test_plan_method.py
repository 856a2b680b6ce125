"""`f.plan(...)`: verification on request, a progress line when it takes long, names in error texts."""

from __future__ import annotations

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import pytest

import jshard
from tests.helpers.models import dense_relu
from tests.helpers.report_plans import f32, mesh, plan, sharded


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_verified_plan_says_so_in_every_form():
    f, args = sharded("dense")
    p = f.plan(*args, verify=True)
    check = p.verification
    assert check is not None and check.ok and check.predicted == check.emitted > 0
    assert p == plan("dense") and plan("dense").verification is None
    line = f"compiled program: emitted as planned: {check.emitted:,.0f} B per device for {check.predicted:,.0f} predicted"
    assert line in str(p) and line in p.to_markdown() and line in p._repr_html_()
    assert "compiled program" not in str(plan("dense"))
    assert str(p).count("\n") == str(plan("dense")).count("\n") + 1


def test_a_program_that_moves_something_else_is_told():
    f, args = sharded("dense")
    rows = tuple(dataclasses.replace(r, collectives=()) for r in plan("dense").operators)
    silent = dataclasses.replace(plan("dense"), collectives=(), operators=rows)
    check = silent.verify(f.lower(*args).compile())
    told = dataclasses.replace(silent, verification=check)
    # An all-reduce, and the slice that `max` takes of it: a reduce-scatter's bytes where no all-reduce is planned.
    assert not check.ok and check.emitted == sum(c.bytes for c in plan("dense").collectives) / 2 == 160
    assert "compiled program: emitted differs from the plan: 160 B per device for 0 predicted" in str(told)
    assert 'class="proof open">compiled program' in told._repr_html_()


def test_what_cannot_compile_says_what_to_install():
    machine = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    f = jshard.shard(dense_relu, mesh=machine)
    with pytest.raises(jshard.ShardError, match="plans only, nothing can be compiled for it") as error:
        f.plan(f32(32, 128), f32(128, 16), f32(16), verify=True)
    assert "libtpu for TPU" in error.value.fix and "verify=True" in error.value.where


def test_a_function_with_an_argument_called_verify_gets_it():
    def checked(x, verify=True):
        return jnp.where(x > 0, x, 0) if verify else x

    f = jshard.shard(checked, static_argnames="verify", mesh=mesh(2))
    whole, bare = f.plan(f32(8)), f.plan(f32(8), verify=False)
    assert len(whole.operators) > len(bare.operators) and whole.verification is None


def test_slow_planning_shows_its_progress_and_quick_planning_does_not(monkeypatch):
    def slow(x):
        return jax.nn.relu(x) @ x

    for after in (0.0, 60.0):
        said = Terminal()
        monkeypatch.setattr(sys, "stderr", said)
        from jshard._report import progress as bars

        monkeypatch.setattr(
            "jshard._api.shard.progress",
            lambda title, after, seconds=after, said=said: bars.progress(title, after=seconds, stream=said),
        )
        jshard.shard(slow, mesh=mesh(2, 4)).plan(f32(8, 8))
        assert ("planning slow" in said.getvalue()) == (after == 0.0)
        assert after or "planning slow reductions" in said.getvalue()
