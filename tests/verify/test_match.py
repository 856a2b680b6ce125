"""Matching collectives where the trip count of a loop is known on one side only."""

import pytest

from jshard._verify.emitted import Emitted
from jshard._verify.match import MatchedRow, Predicted, match_collectives


def predicted(count: float = 1, in_open_loop: bool = False) -> Predicted:
    return Predicted("all_reduce", ("x", "y"), 64, "sum", count=count, id=0, in_open_loop=in_open_loop)


def emitted(count: int = 1, in_open_loop: bool = False) -> Emitted:
    scope = "while/body/jshard.0/psum"
    return Emitted("all_reduce", 64, 4, "", count=count, in_open_loop=in_open_loop, op_name=scope)


def only_row(p: Predicted, e: Emitted) -> MatchedRow:
    rows, extra = match_collectives([p], [e])
    assert len(rows) == 1 and not extra
    return rows[0]


@pytest.mark.parametrize(
    "p, e",
    [(predicted(1, True), emitted(7)), (predicted(7), emitted(1, True)), (predicted(2, True), emitted(14))],
)
def test_a_loop_counted_on_one_side_is_compared_trip_by_trip(p: Predicted, e: Emitted) -> None:
    """Whichever of plan and program knows the trip count, the row has it on both sides."""
    row = only_row(p, e)
    most = max(p.count, e.count)
    assert row.bytes == (64 * most, 64 * most) and row.agrees
    assert not row.predicted[0].in_open_loop and not row.emitted[0].in_open_loop


@pytest.mark.parametrize(
    "p, e",
    [
        (predicted(1, True), emitted(1, True)),  # known on neither side
        (predicted(2, True), emitted(7)),  # 3.5 trips
        (predicted(3), emitted(7)),  # known on both sides, and different
    ],
)
def test_counts_that_no_trip_count_explains_stay(p: Predicted, e: Emitted) -> None:
    row = only_row(p, e)
    assert (row.predicted, row.emitted) == ((p,), (e,))
    assert row.agrees == (p.count == e.count)


def test_a_prediction_says_where_it_runs_and_how_often() -> None:
    assert str(predicted()) == "all_reduce over x*y of sum: 64 B"
    assert str(predicted(3)) == "all_reduce over x*y of sum x 3: 192 B"
    assert str(predicted(3, True)) == "all_reduce over x*y of sum x 3 a turn: 192 B"
