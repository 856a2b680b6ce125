"""`traced_scan`: a scan with another body has a variable for each result, also where the body only returns what it reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard._core import jaxcompat as compat
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import with_calls_inlined
from jshard._program.traced_scan import traced_scan


def returned_as_read(c: jax.Array, x: jax.Array) -> Any:
    """The slice as it is twice, the carry of before as it is, a constant, and one result that is computed."""
    return c @ x, (x, x, c, jnp.ones((4, 4)), jnp.sin(x))


def barrier_of_the_user(c: jax.Array, x: jax.Array) -> Any:
    return jax.lax.optimization_barrier(c @ x), (jax.lax.optimization_barrier((x, c)), x)


@pytest.mark.parametrize("body", [returned_as_read, barrier_of_the_user])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_result_is_made_by_an_equation_and_no_barrier_is_left(body: Any, reverse: bool) -> None:
    def f(c: jax.Array, xs: jax.Array) -> Any:
        return jax.lax.scan(jax.jit(body), c, xs, reverse=reverse)  # the call hides what is returned as it is

    rng = np.random.default_rng(3)
    c, xs = jnp.asarray(rng.normal(size=(4, 4))), jnp.asarray(rng.normal(size=(3, 4, 4)))
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(f)(c, xs))[0]
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    scan = with_bodies(scan, lambda _, inner: with_calls_inlined(inner))
    inner, _ = compat.open_jaxpr(scan.params["jaxpr"])
    eqns, results = traced_scan(scan, inner, *compat.scan_split(scan.params), scan.invars)
    made = [v for e in eqns for v in e.outvars]
    assert len(results) == len(scan.outvars) and len(set(results)) == len(results)
    assert set(results) <= set(made)
    (again,) = [e for e in eqns if e.primitive.name == "scan"]
    names = [e.primitive.name for e in compat.open_jaxpr(again.params["jaxpr"])[0].eqns]
    assert sorted(names) == sorted(e.primitive.name for e in inner.eqns)
    renamed = dict(zip(results, scan.outvars, strict=True))
    new = [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in eqns]
    others = [e for e in jaxpr.eqns if e.primitive.name != "scan"]
    jaxpr = jaxpr.replace(eqns=[*others, *new])
    for a, b in zip(compat.run_jaxpr(jaxpr, (c, xs)), jax.tree.leaves(f(c, xs)), strict=True):
        np.testing.assert_array_equal(a, b)
