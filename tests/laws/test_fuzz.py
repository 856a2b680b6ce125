"""Random programs: sharded equals unsharded.

Three thousand larger ones, replay by number, and failures made small by hypothesis, in `benchmarks/correctness/fuzz.py`.
"""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

from tests.laws.fuzz_judge import Verdict, judge
from tests.laws.fuzz_programs import Fuzzed, Value, program


COUNT = 36  # what fits in fifteen seconds on one quiet core; the compilers take most of it
FIRST = 0 if jax.__version_info__ < (0, 11) else 72  # each supported JAX judges programs of its own


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs that run once on a few numbers: what counts is the time to compile them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# Numbers, not draws of hypothesis: what it draws depends on which modules this process has imported.
@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_sharded_equals_plain(number: int):
    p = program(random.Random(number), high=16)
    verdict = judge(p)
    assert not verdict.failed, f"{verdict.kind}\n{p}\n{verdict.text}"


def fuzzed(body: str, **changed: object) -> Fuzzed:
    """A program by hand: of two arguments, on two devices."""
    values = tuple(Value(n, (4, 8), "float32") for n in ("x0", "w0"))
    made = dict(source=f"def program(x0, w0):\n{body}\n", inputs=values, outputs=(Value("v1", (4, 8), "float32"),),
                mesh=(2,), in_strategy=((2, 1), None), out_strategy=None, parameter_plan={}, level=0,
                search="optimal", x64=False, mode="inside")  # fmt: skip
    return Fuzzed(**{**made, **changed})  # type: ignore[arg-type]


JUDGED = {
    "equal": fuzzed("    return (jnp.sin(x0) + w0,)"),
    # What runs under `plain` is another program: the judge must see it.
    "different": fuzzed("    return (constrain(x0, P()) * 1 if constrain(x0, P()) is x0 else x0 * 2,)"),
    "a weak type": fuzzed(
        "    return (jnp.full((4, 8), 2.0) if constrain(x0, P()) is x0 else jnp.full((4, 8), 2.0, 'float32'),)"
    ),
    "warning": fuzzed("    __import__('warnings').warn('told')\n    return (x0,)"),
    "error": fuzzed("    raise RuntimeError('by the program')"),
    "refused": fuzzed(
        "    return (jshard.op(lambda t: lax.fft(t, 'RFFT', (8,)), in_strategy=((1, 2),))(x0),)"
    ),
    "unstable": fuzzed(
        "    y = jnp.sin(1e7 * x0)\n    return (y if constrain(y, P()) is y else jnp.cos(1e7 * x0),)"
    ),
}


@pytest.mark.parametrize("kind", JUDGED)
@pytest.mark.filterwarnings("ignore")
def test_the_judge_sees(kind: str):
    verdict = judge(JUDGED[kind])
    assert isinstance(verdict, Verdict), verdict
    assert verdict.kind == {"a weak type": "different"}.get(kind, kind), verdict.text


def test_a_wish_that_is_not_kept_is_seen(monkeypatch: pytest.MonkeyPatch):
    p = fuzzed("    return (x0 * w0,)", mode="direct", out_strategy=((1, 2),))
    assert judge(p).kind == "equal"
    monkeypatch.setattr("jshard.shard", lambda f, i, o, **k: SHARD(f, i, ((2, 1),), **k))
    assert judge(p).kind == "different"


SHARD = __import__("jshard").shard


def test_the_same_seed_draws_the_same_program():
    a, b = (program(random.Random(5)) for _ in range(2))
    assert a == b and all(np.array_equal(x, y) for x, y in zip(a.arguments(), b.arguments(), strict=True))
    with jax.enable_x64(a.x64):
        assert jax.tree.leaves(jax.jit(a.function(plain=True))(*a.arguments()))
