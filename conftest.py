"""Sixteen CPU devices for every test and doctest, set before anything imports JAX.

It lies beside `jshard/` and `tests/` so that `pytest jshard/_core/layout.py` alone has the devices too. Strict
dtype and rank promotion stay off: the functions that users hand to `shard` may rely on promotion.
"""

from __future__ import annotations

import os
import re
from collections import Counter


DEVICES = 16

_FLAG = "--xla_force_host_platform_device_count"
_others = re.sub(rf"{_FLAG}=\S+", "", os.environ.get("XLA_FLAGS", ""))
# Programs of tests run once on a few numbers: what counts is the time to compile them. HLO passes are as ever.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The same instructions on every x86 machine, so the same rounding: AVX-512 orders sums otherwise.
_SAME = "--xla_cpu_max_isa=AVX2"
os.environ["XLA_FLAGS"] = f"{_QUICK} {_SAME} {_others} {_FLAG}={DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402


jax.config.update("jax_platforms", "cpu")

# The same examples every time, on a machine of any speed: a failure seen once is seen again.
hypothesis.settings.register_profile("jshard", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jshard")


# Folders whose parametrised tests may run on every second case: what they test lies below the public functions.
_SWEPT = frozenset(
    "batch config cost laws lower network plan program rules schedule search spec verify".split()
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases even` and `--cases odd`: every second case of the parametrised tests below the public functions.

    Continuous integration runs one half on each pair of Python and JAX: all functions on both, all cases once.
    """
    parser.addoption("--cases", choices=("all", "even", "odd"), default="all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other half of the cases."""
    half = config.getoption("--cases")
    if half == "all":
        return
    swept = [i for i in items if i.path.parent.name in _SWEPT and hasattr(i, "callspec")]
    functions = [i.nodeid.partition("[")[0] for i in swept]
    count, number = Counter(functions), Counter[str]()
    other: set[pytest.Item] = set()
    for item, function in zip(swept, functions, strict=True):
        if number[function] % 2 == (half == "even") and count[function] > 1:
            other.add(item)
        number[function] += 1
    config.hook.pytest_deselected(items=[i for i in items if i in other])
    items[:] = [i for i in items if i not in other]


def pytest_report_header() -> str:
    """Say at the top of a run what it ran on."""
    return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"
