"""`print(plan)` and `plan.ir()`: contents, width, length; grouped rows add up to what they replace."""

from __future__ import annotations

import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._report.grouping import fold_paths, operator_groups
from jshard._report.timeline import events
from tests.helpers.local_ir_check import wrong_lines
from tests.helpers.report_plans import NAMES, f32, mesh, plan, sharded


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_a_hundred_columns_wide_and_short(name):
    lines = str(plan(name)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 120


def test_a_hundred_layers_are_as_long_as_a_few():
    few, many = (len(str(plan(n)).splitlines()) for n in ("tall8", "tall126"))
    assert many <= few + 3
    assert re.search(r"params\.0-125\.up +float32\[16,64\] x126", str(plan("tall126")))


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_and_collective_is_in_one_group_and_in_the_order_once(name):
    p = plan(name)
    for found in (
        [r.name for g in operator_groups(p) for r in g.rows],
        [e.name for e in events(p) if hasattr(e, "reads")],
    ):
        assert sorted(found) == sorted(r.name for r in p.operators)
    for ids in (
        [i for g in operator_groups(p) for m in g.collectives for i in m.ids],
        [e.id for e in events(p) if hasattr(e, "id")],
    ):
        assert sorted(ids) == sorted(c.id for c in p.collectives)
    assert sum(g.seconds for g in operator_groups(p)) == pytest.approx(p.cost.compute + p.cost.communication)


def test_only_a_proof_is_called_optimal():
    p = plan("dense")
    assert "optimal: cost 40.3 us equals the proved bound" in str(p)
    loose = dataclasses.replace(p, cost=dataclasses.replace(p.cost, objective=2e-4, bound=1.9e-4))
    assert "optimal:" not in str(loose) and "gap 5.3%: cost 200 us, proved bound 190 us" in str(loose)
    assert "optimal:" not in str(plan("propagation")) and "nothing proved" in str(plan("propagation"))


def test_what_the_page_of_a_small_plan_says():
    text = str(plan("dense"))
    for expected in (
        "plan of dense_relu on x=4 x y=2 (8 x cpu), level 0: least communication and redundant compute",
        "x (pinned)                                 float32[32,128]            (4, 2)         (x, y)",
        "all_reduce[y]           8x10 -> 8x10                    1 x, 320 B, 40.2 us",
        "all_reduce       over y                 1 times                320 B     40.2 us",
        "compute 263 ns (redundant 104 ns), communication 40.2 us, step 40.4 us",
        "peak memory 5.16 KiB a device, in program order",
        "argument w 2.5 KiB",
    ):
        assert expected in text, expected


def test_budget_and_unknown_primitives_are_named():
    assert "of 1 MiB allowed a device" in str(plan("budget")) and "least peak memory" in str(plan("budget"))
    unknown = plan("unknown").unknown
    assert unknown and f"replicated for want of a rule: {', '.join(unknown)}" in str(plan("unknown"))


def test_results_that_lie_as_an_argument_say_so():
    assert re.search(r"0\.\* +29 tensors as params\.\*\n", str(plan("gpt")))
    step, args = sharded("gpt")
    p = plan("gpt")
    moved = dataclasses.replace(p.outputs[0], layout=jshard._core.layout.Layout((("x", "y"),)))
    text = str(dataclasses.replace(p, outputs=(moved, *p.outputs[1:])))
    assert re.search(r"0\.\* +29 tensors as params\.\*, but 1 of them:", text)
    assert "0.blocks.0.down.b " in text


def test_what_is_held_at_the_peak_is_the_peak():
    for name in NAMES:
        p = plan(name)
        assert sum(b for _, b in p.memory.held) == pytest.approx(p.cost.peak_bytes)
        assert len(p.memory.curve) == len(p.operators) and max(p.memory.curve) <= p.cost.peak_bytes * (
            1 + 1e-9
        )


@pytest.mark.parametrize(
    "paths, folded",
    [
        (["a.0.w", "a.1.w", "a.2.w"], ["a.0-2.w"]),
        (["a.0.w", "a.2.w"], ["a.*.w"]),
        (["a.w", "b.w"], ["a.w", "b.w"]),
        (["p.a", "p.b", "p.c.d"], ["p.{a,b}", "p.c.d"]),
        (["p.a", "p.b", "p.c", "p.d", "p.e"], ["p.{a,b,c,+2}"]),
        (["0", "1"], ["0-1"]),
        (["p.0.a", "p.x.a"], ["p.0.a", "p.x.a"]),
    ],
)
def test_paths_fold(paths, folded):
    assert [f for f, _ in fold_paths((p, None) for p in paths)] == folded
    assert sorted(n for _, ns in fold_paths((p, None) for p in paths) for n in ns) == list(range(len(paths)))


def test_paths_of_other_keys_do_not_fold():
    assert len(fold_paths([("a.0", 1), ("a.1", 2)])) == 2


def test_the_ir_of_the_tutorial():
    """A first product pinned as MindSpore's tutorial does; one line an operator, types and strategy in it."""
    lines = plan("pinned").ir().splitlines()
    assert lines[1] == "%x : f32[64,64] (x, -)"
    (product,) = [line for line in lines if line.startswith("%dot_general.5 ")]
    assert product.startswith(
        "%dot_general.5 = dot_general(%x, %w1) {in_strategy: ((2, 1), (1, 4))} : "
        "(f32[64,64], f32[64,64]) -> f32[64,64]  # "
    )
    assert re.search(r"\w+\.py:\d+$", product)
    assert lines[-1].startswith("return result : f32[64,64] (")
    assert len(lines) == 1 + 5 + len(plan("pinned").operators) + 1


def test_the_ir_shows_where_loops_begin():
    text = plan("scan").ir()
    assert "%scan carry 0, %scan result 0 = scan_carry(%x, %div.13)" in text
    assert text.index("= scan_xs(%w)") < text.index("(%scan carry 0, %scan xs 1) x3 {in_strategy")


def test_the_local_ir_names_collectives_and_slices():
    lines = plan("dense").ir(local=True).splitlines()
    assert "  %add.5.1 = slice(%add.5) : f32[8,10] -> f32[4,10]  # for max.6" in lines
    at = lines.index(
        "  %dot_general.3.1 = all_reduce[y](%dot_general.3) : f32[8,10] -> f32[8,10]  # for add.5"
    )
    assert lines[at + 1].startswith("%add.5 = add(%dot_general.3.1, %broadcast_in_dim.4)")
    assert sum("all_reduce" in line for line in lines) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_the_local_ir_can_be(name):
    """Every value is read under the name and in the type in which it was made, and every step makes what it can."""
    p = plan(name)
    text = p.ir(local=True)
    assert wrong_lines(text, dict(zip(p.mesh.names, p.mesh.sizes, strict=True))) == []
    moved = re.findall(r"^ *(?:%.+ = )?(?:all_\w+|reduce_scatter|permute)\[", text, re.MULTILINE)
    assert len(moved) == len(p.collectives)


def test_the_judge_of_the_local_ir_finds_lines_that_cannot_be():
    text = plan("dense").ir(local=True)
    mesh = {"x": 4, "y": 2}
    assert wrong_lines(text.replace("f32[8,10] -> f32[4,10]", "f32[32,16] -> f32[8,64]"), mesh)
    assert wrong_lines(text.replace("all_reduce[y](%dot_general.3)", "all_gather[y](%dot_general.3)"), mesh)
    assert wrong_lines(text.replace("max(%add.5.1, const)", "max(%add.5, const)"), mesh)
    assert wrong_lines(text.replace("%add.5.1 =", "%add.5 ="), mesh)


@pytest.mark.parametrize("name", ["dense", "ffn", "pinned", "scan", "gpt"])
def test_verify_agrees_with_what_is_compiled(name):
    f, args = sharded(name)
    verification = plan(name).verify(f.lower(*args).compile())
    assert verification.ok, str(verification)
    assert "emitted as planned" in str(verification)


def test_verify_of_a_program_that_moves_something_else_does_not_agree():
    f, args = sharded("ffn")
    other = jshard.shard(
        f.__wrapped__, {"x": (2, 1)}, parameter_plan={"w1": (1, 4), "w2": (1, 4)}, mesh=mesh(2, 4)
    )
    lying = dataclasses.replace(plan("ffn"), collectives=())
    assert not lying.verify(f.lower(*args).compile()).ok
    with pytest.raises(jshard.ShardError, match="argument 3 of the compiled program"):
        plan("ffn").verify(other.lower(*args).compile())


def test_rich_prints_the_same_words_in_colours_on_a_terminal_only():
    rich = pytest.importorskip("rich.console")

    def printed(**how):
        console = rich.Console(width=120, file=io.StringIO(), **how)
        console.print(plan("gpt"))
        return console.file.getvalue()

    assert printed().rstrip() == str(plan("gpt"))
    assert "\x1b[" in printed(force_terminal=True, color_system="256") and "\x1b[" not in printed()


def wide() -> jshard.Plan:
    """A plan whose names and layouts do not fit the usual columns."""

    def attention(blocks, x):
        x = x + jax.nn.softmax(jnp.einsum("btghk,gkd->btghd", x, blocks["attention_output"])) * 2
        return jnp.einsum("btghd,gdk->btghk", x, blocks["attention_values"]).sum(-1)

    weights = dict.fromkeys(("attention_output", "attention_values"), f32(8, 128, 128))
    args = ({"transformer_layer": weights}, f32(64, 16, 8, 4, 128))
    axes = jax.sharding.AbstractMesh((4, 2), ("fully_sharded", "model"))
    f = jshard.shard(
        lambda state, x: attention(state["transformer_layer"], x),
        ({"transformer_layer": dict.fromkeys(weights, jax.P(None, ("fully_sharded", "model")))}, None),
        mesh=axes, level=2, hardware="v5e",
    )  # fmt: skip
    return f.plan(*args)


def test_layouts_are_whole_where_a_table_is_too_wide_for_the_cuts():
    p = wide()
    text = str(p)
    for row in p.inputs:
        assert f" {row.layout}\n" in text, row
    assert "(1, 8, 1)" not in text.split("operators that")[0]
    assert max(map(len, text.splitlines())) <= 100
    for c in p.collectives:
        assert f"{c.kind}[{'*'.join(c.axes)}]"[:26] in text


def test_what_moves_data_is_listed_however_little_time_it_takes():
    p = plan("gpt")
    slow = dataclasses.replace(
        p, operators=tuple(dataclasses.replace(r, seconds=r.seconds * 1e6) for r in p.operators)
    )
    most = max(p.collectives, key=lambda c: c.seconds * c.count)
    assert f"{most.kind}[{'*'.join(most.axes)}]" in str(slow).split("per device and call")[0]
