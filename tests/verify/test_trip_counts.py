"""Trip counts of loops in HLO text, in the forms that compilers write a counted loop."""

import pytest

from jshard._verify.hlo_parser import parse
from jshard._verify.hlo_trip_counts import trip_count


TEXT = """HloModule m, num_partitions=2

%before (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %a.copy = s32[] copy(%a)
  ROOT %test = pred[] compare(%a.copy, %b), direction=LT
}

%next (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%two, %c)
}

%condition (p: (s32[], s32[], f32[8])) -> pred[] {
  %p = (s32[], s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %limit = s32[] constant(10)
  ROOT %go = pred[] COMPARISON
}

%body (q: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %q = (s32[], s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %x = f32[8] get-tuple-element(%q), index=2
  %step = s32[] constant(3)
  %k = s32[] INCREMENT
  ROOT %out = (s32[], s32[], f32[8]) tuple(%k, BOUND, %x)
}

ENTRY %main (v: f32[8], unknown: s32[]) -> (s32[], s32[], f32[8]) {
  %v = f32[8] parameter(0)
  %unknown = s32[] parameter(1)
  %start = s32[] constant(1)
  %start.copy = s32[] copy(%start)
  %end = s32[] constant(13)
  %init = (s32[], s32[], f32[8]) tuple(START, END, %v)
  ROOT %loop = (s32[], s32[], f32[8]) while(%init), condition=%condition, body=%body
}
"""
DEFAULTS = {
    "COMPARISON": "compare(%i, %limit), direction=LT", "INCREMENT": "add(%j, %step)", "BOUND": "%m",
    "START": "%start.copy", "END": "%end",
}  # fmt: skip


def trips(**changes: str) -> int | None:
    """The trip count of the loop of `TEXT` with some parts written otherwise."""
    text = TEXT
    for name, value in {**DEFAULTS, **changes}.items():
        text = text.replace(name, value)
    module = parse(text)
    computation = module.computations["main"]
    return trip_count(module, computation, computation.by_name["loop"])


@pytest.mark.parametrize(
    "count, changes",
    [
        (3, {}),  # 1, 4, 7
        (4, {"COMPARISON": "compare(%i, %limit), direction=LE"}),  # 1, 4, 7, 10
        (3, {"COMPARISON": "compare(%i, %limit), direction=NE"}),
        (3, {"COMPARISON": "compare(%limit, %i), direction=GT"}),
        (4, {"COMPARISON": "compare(%limit, %i), direction=GE"}),
        (4, {"COMPARISON": "compare(%i, %n), direction=LT"}),  # the bound is carried and does not change: 13
        (3, {"INCREMENT": "add(%step, %j)"}),
        (5, {"INCREMENT": "fusion(%j), kind=kLoop, calls=%next"}),  # 1, 3, 5, 7, 9
        (3, {"COMPARISON": "fusion(%i, %limit), kind=kLoop, calls=%before"}),
        (0, {"INCREMENT": "subtract(%j, %step)"}),
        (
            4,
            {
                "INCREMENT": "subtract(%j, %step)",
                "START": "%end",
                "END": "%start",
                "COMPARISON": "compare(%i, %n), direction=GT",
            },
        ),  # 13, 10, 7, 4
    ],
)
def test_a_counted_loop_in_every_form(count: int, changes: dict[str, str]) -> None:
    """Comparison from both sides, fused or not, with a constant or carried bound, up and down."""
    assert trips(**changes) == count


@pytest.mark.parametrize(
    "changes",
    [
        {"START": "%unknown"},
        {"COMPARISON": "compare(%i, %n), direction=LT", "END": "%unknown"},
        {"COMPARISON": "compare(%i, %n), direction=LT", "BOUND": "%k"},  # the bound changes in the body
        {"COMPARISON": "compare(%i, %limit), direction=EQ"},
        {"COMPARISON": "compare(%limit, %limit), direction=LT"},
        {"COMPARISON": "and(%i, %limit)"},
        {"INCREMENT": "multiply(%j, %step)"},
        {"INCREMENT": "add(%m, %step)"},  # not the variable that is compared
        {"INCREMENT": "add(%j, %m)"},
        {"INCREMENT": "constant(0)"},
    ],
)
def test_what_is_no_counted_loop_has_no_trip_count(changes: dict[str, str]) -> None:
    """A count that cannot be read is None, which the report calls open, never a guess."""
    assert trips(**changes) is None
