"""Sixteen CPU devices for every test and doctest, set before anything imports JAX.

It lies beside `jshard/` and `tests/` so that `pytest jshard/_core/layout.py` alone has the devices too. Strict
dtype and rank promotion stay off: the functions that users hand to `shard` may rely on promotion.
"""

from __future__ import annotations

import gc
import os
import random
import re


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


# Folders whose tests lie below the public functions, but for those of jaxprs and of lowering, which JAX changes; and
# those of texts, which it hardly does.
_BELOW = frozenset(
    "batch config cost laws network plan report repository rules schedule search spec verify".split()
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases even` and `--cases odd`: a half of the suite each, for continuous integration on two pairs of Python and JAX.

    Of the cases of a parametrised test every second one, and of the other tests below the public functions, and of those
    marked `one_pair`, every second one of a file, and every second doctest, in an order by seed; of a single one the half
    is drawn. The other tests of the public functions that have no cases, or one, and those of jaxprs and of lowering, are
    in both halves; nothing is in neither.
    """
    parser.addoption("--cases", choices=("all", "even", "odd"), default="all")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of tests of public functions that mostly plan, or take long: a half has every second one."""
    config.addinivalue_line(
        "markers", "one_pair: run on one pair of Python and JAX, as tests below the public functions are"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not in the half asked for."""
    half = config.getoption("--cases")
    if half == "all":
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        group = _group(item)
        if group is not None:
            groups.setdefault(group, []).append(item)
    other: set[pytest.Item] = set()
    for name, group in groups.items():
        # Products of parameters repeat a value at each second or fourth case.
        random.Random(name).shuffle(group)
        if len(group) > 1:
            other.update(group[half == "odd" :: 2])
        elif _is_below(group[0]) and (half == "odd") == (random.Random(name).random() < 0.5):
            other.update(group)
    config.hook.pytest_deselected(items=[i for i in items if i in other])
    items[:] = [i for i in items if i not in other]


def _group(item: pytest.Item) -> str | None:
    """What of which each half has every second one: the test of a case, the file of another test; None for both halves."""
    if isinstance(item, pytest.DoctestItem):
        return "doctests"
    if hasattr(item, "callspec"):
        return item.nodeid.partition("[")[0]
    file = item.nodeid.partition("::")[0]
    return file if file.startswith("tests/") and _is_below(item) else None


def _is_below(item: pytest.Item) -> bool:
    """Whether a test is below the public functions, or marked as if it were."""
    return item.path.parent.name in _BELOW or item.get_closest_marker("one_pair") is not None


def pytest_collection_finish() -> None:
    """Collect garbage less often: modules and tests stay, and traces make many short-lived objects (4% of the seconds).

    They are not frozen: after a plan `gc.get_freeze_count()` is asked, which counts frozen objects one by one (42 ms).
    """
    gc.set_threshold(50_000, 20, 20)


def pytest_report_header() -> str:
    """Say at the top of a run what it ran on."""
    return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"
