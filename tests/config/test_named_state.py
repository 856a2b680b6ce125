"""Which tensors are optimizer state of which parameters, where parameters have names that optimizers use too."""

from __future__ import annotations

import pytest

from jshard._config.matching import match
from jshard._config.source import read_config
from jshard._config.tensors import TensorName, is_state, mirrors


def tensors(*paths: str) -> list[TensorName]:
    return [TensorName(p, (4, 4), "float32", p.split(".")[0]) for p in paths]


@pytest.mark.parametrize(
    ("paths", "parameters", "found"),
    [
        (["p.q.kernel", "p.k.kernel", "p.v.kernel", "p.head.kernel"], [0, 1, 3], {}),
        (["p.layers.0.att.v.kernel", "p.layers.0.att.k.kernel", "p.head.kernel"], [1, 2], {}),
        (["p.mu.kernel", "p.dec.kernel"], [1], {}),
        (["m.fc.w", "o.opt_state.0.mu.fc.w", "v.fc.w"], [0], {1: 0, 2: 0}),
        (["s.params.fc.w", "s.opt_state.0.mu.fc.w", "s.params.mu.w"], [0, 2], {1: 0}),
        (["s.0.fc.w", "s.1.0.nu.fc.w"], [0], {1: 0}),
        (["s.net.fc.w", "s.opt.0.nu.fc.w"], [0], {1: 0}),
        (["p.v.kernel", "p.k.kernel", "o.mu.v.kernel", "o.mu.k.kernel"], [0, 1], {2: 0, 3: 1}),
    ],
)  # fmt: skip
def test_state_is_known_by_the_path_of_its_parameter(paths, parameters, found):
    assert mirrors(tensors(*paths), parameters) == found


def test_a_value_projection_keeps_its_own_rule_and_gives_it_to_its_moments():
    names = tensors("p.q.kernel", "p.k.kernel", "p.v.kernel", "o.0.mu.k.kernel", "o.0.mu.v.kernel")
    config = {"mesh": {"x": 2}, "parameters": {"k.kernel": ["x", None], "v.kernel": [None, "x"]}}
    winners = match(read_config(config), names).of_tensor
    rules = [None if w is None else (w.rule.name, w.of) for w in winners]
    assert rules == [
        None, ("k.kernel", ""), ("v.kernel", ""), ("k.kernel", "p.k.kernel"), ("v.kernel", "p.v.kernel")
    ]  # fmt: skip


def test_a_model_named_m_is_no_state():
    assert [is_state(t) for t in tensors("m.fc.w", "v.fc.w", "nu.fc.w", "o.mu.fc.w")] == [
        False,
        False,
        True,
        True,
    ]
