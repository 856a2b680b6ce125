"""Relations between layouts as arrays are those of every single pair."""

import itertools

import pytest

from jshard._core.layout import Layout
from jshard._network.layout_pairs import equal_layouts, is_local_slice_of, slices


def some_layouts(dims: int) -> list[Layout]:
    """All layouts of a few shardings a dimension, partial and not."""
    shardings = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]
    partials = [(), ("x",), ("y",)]
    return [Layout(d, p) for d in itertools.product(shardings, repeat=dims) for p in partials]


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_pairs_are_those_of_every_single_pair(dims: int) -> None:
    layouts = some_layouts(dims)
    sources, targets = layouts[::2], layouts[::-1][: len(layouts) // 2 + 1]
    assert equal_layouts(sources, targets).tolist() == [[a == b for b in targets] for a in sources]
    assert slices(sources, targets).tolist() == [[is_local_slice_of(b, a) for b in targets] for a in sources]


def test_lists_may_be_empty() -> None:
    layouts = some_layouts(1)
    assert slices([], layouts).shape == (0, len(layouts)) and slices(layouts, []).shape == (len(layouts), 0)
    assert equal_layouts([], layouts).shape == (0, len(layouts))
