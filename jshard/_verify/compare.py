"""A plan compared with the compiled program: predicted and emitted bytes, by kind and operator.

The lowering emits collective number k of the plan inside `jax.named_scope("jshard.<k>")`, so the compiler's metadata
says which prediction an emitted collective belongs to. Compilers combine collectives and then keep one of the names or
none: those with several numbers are compared as a group, those without a number are matched by kind and bytes. The rest
are extra collectives, named and located, or missing ones.

>>> from jshard._verify import Emitted, EmittedProgram
>>> plan = [Predicted("all_gather", ("y",), 96, "dense_1 dot_general"),
...         Predicted("all_reduce", ("x",), 64, "loss")]
>>> program = EmittedProgram((Emitted("all_gather", 96, 4, "", op_name="jit(f)/jshard.0/all_gather"),
...                           Emitted("permute", 8, 2, "", name="cp", line=12)), partitions=8)
>>> print(compare(plan, program))
emitted differs from the plan: 104 B per device for 160 predicted
  kind             predicted       emitted      off
  all_gather              96            96     0.0%
  all_reduce              64             0  -100.0%
  permute                  0             8      new
  operator                         kind            axes         predicted       emitted
  dense_1 dot_general              all_gather      y                   96            96
  loss                             all_reduce      x                   64             0
  not planned: permute of  over 2: 8 B; cp, line 12
  not emitted: all_reduce over x of loss: 64 B
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jshard._core.errors import PlanMismatchError
from jshard._core.messages import format_seconds
from jshard._core.text_width import wrapped
from jshard._plan.compiled_timeline import CompiledTimeline
from jshard._program.user_shard_map import USER_SHARD_MAP_SCOPE
from jshard._verify.emitted import KINDS, Emitted, EmittedProgram
from jshard._verify.match import NEGLIGIBLE, MatchedRow, Predicted, bytes_agree, match_collectives
from jshard._verify.read_collectives import read_program


@dataclasses.dataclass(frozen=True)
class Verification:
    """The collectives of a compiled program compared with those of the plan.

    `by_kind` has predicted and emitted bytes per device, as the program requested them: if the compiler changed the type
    of a collective (CPU widens bfloat16) or padded one (TPU), that is a note and not a disagreement; `wire` includes
    these bytes. `own` are the collectives in the user's own `jax.shard_map` inside the sharded function, which no plan
    predicts; `unrequested` are the compiler's additions. `timeline` says which collectives the program waits for; None
    for programs of a CPU, which hide none.
    """

    rows: tuple[MatchedRow, ...]
    by_kind: dict[str, tuple[float, float]]
    extra: tuple[Emitted, ...]
    missing: tuple[Predicted, ...]
    program: EmittedProgram
    own: tuple[Emitted, ...] = ()
    unrequested: tuple[Emitted, ...] = ()
    predicted_in_open_loops: int = 0  # predicted collectives in loops of unknown trip count
    timeline: CompiledTimeline | None = None

    @property
    def collectives(self) -> tuple[Emitted, ...]:
        """All emitted collectives: those of the rows, then the others."""
        return (*(e for r in self.rows for e in r.emitted), *self.extra, *self.own, *self.unrequested)

    @property
    def predicted(self) -> float:
        """Bytes per device that the plan predicts."""
        return sum(p for p, _ in self.by_kind.values())

    @property
    def emitted(self) -> float:
        """Bytes per device that the program moves."""
        return sum(e for _, e in self.by_kind.values())

    @property
    def wire(self) -> float:
        """Bytes per device on the wire, the compiler's widening and padding included."""
        return self.program.total

    @property
    def error(self) -> float:
        """Emitted bytes that differ from the prediction, kind by kind, over the predicted bytes."""
        off = sum(abs(e - p) for p, e in self.by_kind.values())
        return off / self.predicted if self.predicted else float(bool(off))

    @property
    def ok(self) -> bool:
        """Whether the program was read completely and every kind agrees within 2%."""
        slack = NEGLIGIBLE * max(self.predicted, self.emitted)
        return self.program.complete and all(bytes_agree(p, e, slack) for p, e in self.by_kind.values())

    @property
    def summary(self) -> str:
        """One line. Totals that leave out unread lines or further trips of a loop say "at least"."""
        verdict = "emitted as planned" if self.ok else "emitted differs from the plan"
        unread = len(self.program.unread)
        if unread:
            verdict += f", {unread} line{'s' * (unread > 1)} not read, the total is incomplete"
        emitted, predicted = self.program.at_least_prefix, "at least " if self.predicted_in_open_loops else ""
        return f"{verdict}: {emitted}{self.emitted:,.0f} B per device for {predicted}{self.predicted:,.0f} predicted"

    @property
    def text(self) -> str:
        """The table by kind and by operator, then collectives not planned or not emitted, and lines not read."""
        lines = [self.summary]
        if self.by_kind:
            lines.append(f"  {'kind':<14}{'predicted':>12}{'emitted':>14}{'off':>9}")
        for kind, (p, e) in self.by_kind.items():
            off = f"{(e - p) / p:.1%}" if p else "new"
            lines.append(f"  {kind:<14}{p:>12,.0f}{e:>14,.0f}{off:>9}")
        if self.rows:
            lines.append(f"  {'operator':<28}{'kind':<15}{'axes':<9}{'predicted':>12}{'emitted':>13}")
        lines += [_row_text(row) for row in self.rows]
        lines += [f"  not planned: {e}" for e in self.extra]
        lines += [f"  the user's own: {e}" for e in self.own]
        lines += [f"  not emitted: {p}{self._emitted_instead(p)}" for p in self.missing]
        lines += [f"  counted once: {loop}" for loop in self.program.open_loops]
        lines += [f"  not read: {u}" for u in self.program.unread]
        lines += [f"  {note}" for note in self._compiler_changes()]
        lines += timeline_lines(self.timeline) if self.timeline is not None else []
        return wrapped(lines)

    def _emitted_instead(self, missing: Predicted) -> str:
        """Of a collective that is not emitted, the emitted one that moves the same value: compilers make one of both."""
        same = [
            p.operator for row in self.rows if row.emitted for p in row.predicted if p.moves_the_same(missing)
        ]
        return f"; that of {same[0] or '?'} moves the same and is emitted" if same else ""

    def _compiler_changes(self) -> list[str]:
        """The compiler's changes to the bytes of the plan: other types, padding."""
        notes = []
        changed = [e for e in self.collectives if e.requested_bytes is not None]
        retyped = [e for e in changed if e.requested_dtype]
        other = [e for e in changed if not e.requested_dtype and "padded" not in e.form]
        for words, members in (
            ("widened by the compiler", [e for e in retyped if e.total > e.requested_total]),
            ("narrowed by the compiler", [e for e in retyped if e.total < e.requested_total]),
            ("padded by the compiler", [e for e in changed if not e.requested_dtype and "padded" in e.form]),
            ("all-reduced for a part", [e for e in other if e.total > e.requested_total]),
            ("only the part that is read was sent", [e for e in other if e.total < e.requested_total]),
        ):
            more = sum(e.total - e.requested_total for e in members)
            types = "/".join(sorted({e.requested_dtype for e in members if e.requested_dtype}))
            of = f" asked for in {types}" if types else ""
            if members:
                sign = "more" if more >= 0 else "less"
                notes.append(f"{words}: {len(members)} collectives{of}, {abs(more):,.0f} B {sign} to move")
        return notes

    def __str__(self) -> str:
        return self.text


def _row_text(row: MatchedRow) -> str:
    operators = list(dict.fromkeys(p.operator or "?" for p in row.predicted))
    name = operators[0] + (f" and {len(operators) - 1} more" if len(operators) > 1 else "")
    kinds = list(dict.fromkeys(p.kind for p in row.predicted))
    axes = list(dict.fromkeys("*".join(p.axes) for p in row.predicted))
    predicted, emitted = row.bytes
    forms = sorted({e.kind for e in row.emitted} - set(kinds))
    note = f"  as {', '.join(forms)}" if forms else ""
    if len(row.predicted) > 1:
        note += f"  ({len(row.predicted)} planned, {len(row.emitted)} emitted)"
    return (
        f"  {_keep_end(name, 27):<28}{_keep_end('+'.join(kinds), 14):<15}{_keep_end(','.join(axes), 8):<9}"
        f"{predicted:>12,.0f}{emitted:>13,.0f}{note}"
    )


def timeline_lines(timeline: CompiledTimeline, most: int = 12) -> list[str]:
    """The totals of a timeline and its collectives, the longest exposed ones first."""
    lines = [f"  {timeline.summary}"]
    by: dict[tuple[str, str, bool], list[float]] = {}
    for i in timeline.collectives:
        row = by.setdefault((i.operator, i.kind, i.asynchronous), [0.0, 0.0, 0.0])
        row[:] = row[0] + i.planned, row[1] + i.seconds, row[2] + i.exposed
    if by:
        lines.append(f"  {'operator':<27}{'kind':<15}{'':<6}{'planned':>10}{'emitted':>10}{'exposed':>10}")
    ranked = sorted(by.items(), key=lambda r: -r[1][2])
    for (operator, kind, asynchronous), figures in ranked[:most]:
        shown = "".join(f"{format_seconds(s):>10}" for s in figures)
        lines.append(
            f"  {_keep_end(operator, 26):<27}{kind:<15}{'async' if asynchronous else 'sync':<6}{shown}"
        )
    if ranked[most:]:
        rest = [sum(r[1][k] for r in ranked[most:]) for k in range(3)]
        shown = "".join(f"{format_seconds(s):>10}" for s in rest)
        lines.append(f"  {f'and {len(ranked) - most} more':<27}{'':<21}{shown}")
    return lines + [f"  not scheduled: {u}" for u in timeline.unread]


def _keep_end(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def compare(predicted: Iterable[Predicted], program: EmittedProgram) -> Verification:
    """Compare a compiled program with the collectives that a plan predicts.

    Arguments:

    - `predicted`: the plan's collectives; those without bytes (groups of one device) are left out.
    - `program`: the compiled program, from `read_program`.
    """
    plan = [p if p.id is not None else dataclasses.replace(p, id=i) for i, p in enumerate(predicted)]
    plan = [p for p in plan if p.total]
    known = {p.id for p in plan}
    own = [
        e for e in program.collectives if USER_SHARD_MAP_SCOPE in e.op_name and not known.intersection(e.tags)
    ]
    rest = [e for e in program.collectives if e not in own] if own else program.collectives
    rows, extra = match_collectives(plan, rest)
    missing = tuple(p for r in rows if not r.emitted for p in r.predicted)
    found = [e for r in rows for e in r.emitted] + extra
    by_kind = {}
    for kind in KINDS:
        p = sum(x.total for r in rows for x in r.predicted if x.kind == kind)
        e = sum(x.requested_total for x in found if x.kind == kind)
        if p or e:
            by_kind[kind] = (p, e)
    # The edges of the compiler's own padding count in the notes only.
    unasked = [e for e in rest if not e.requested_total and not known.intersection(e.tags)]
    turns = sum(p.in_open_loop for r in rows for p in r.predicted)
    return Verification(
        tuple(rows), by_kind, tuple(extra), missing, program, tuple(own), tuple(unasked), turns
    )


def verify_program(
    predicted: Iterable[Predicted],
    compiled: jax.stages.Compiled | str,
    *,
    devices: int | None = None,
    slices: int = 1,
    inputs: Sequence[str] | None = None,
) -> Verification:
    """Read a compiled program and compare it with a plan, after checking that it is a program of that plan.

    >>> verify_program([], "HloModule jit_f, num_partitions=4", devices=8)
    Traceback (most recent call last):
    ...
    jshard._core.errors.PlanMismatchError: the compiled program runs on 4 devices, the plan is for 8
      where: program jit_f
      write instead: plan.verify(f.lower(...).compile()) with the function, mesh and arguments of the plan

    Arguments:

    - `predicted`: the plan's collectives.
    - `compiled`: a compiled object, HLO text, or the result of `read_program`.
    - `devices`: number of devices of the plan's mesh; not checked if None.
    - `slices`: number of TPU slices: the text of a program counts the devices of one slice.
    - `inputs`: local types of the plan's flat arguments, as `hlo_shape` writes them. Unused arguments, which the compiler
      drops, may be absent.

    Raises `PlanMismatchError` if the program has another number of devices or other arguments.
    """
    program = compiled if isinstance(compiled, EmittedProgram) else read_program(compiled)
    where = f"program {program.name}" if program.name else ""
    fix = "plan.verify(f.lower(...).compile()) with the function, mesh and arguments of the plan"
    if devices is not None and program.partitions not in (0, devices, devices / slices):
        raise PlanMismatchError(
            f"the compiled program runs on {program.partitions} devices, the plan is for {devices}",
            where=where,
            fix=fix,
        )
    if inputs is not None:
        remaining = iter(inputs)
        for k, argument in enumerate(program.inputs):
            if argument not in remaining:  # consumes up to the match: a test for a subsequence
                raise PlanMismatchError(
                    f"argument {k} of the compiled program is {argument} on each device; the plan's arguments "
                    f"are {', '.join(inputs) or 'none'}",
                    where=where,
                    fix=fix,
                )
    return compare(predicted, program)


def hlo_shape(shape: Sequence[int], dtype: np.dtype) -> str:
    """An array type in HLO's notation; a PRNG key is written as its words.

    >>> import jax, jax.numpy as jnp
    >>> hlo_shape((4, 8), jnp.bfloat16), hlo_shape((), bool), hlo_shape((3,), jax.random.key(0).dtype)
    ('bf16[4,8]', 'pred[]', 'u32[3,2]')
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), dtype))
        return hlo_shape(words.shape, words.dtype)
    name = np.dtype(dtype).name
    short = {"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}.get(name, name)
    for long, letter in (("uint", "u"), ("int", "s"), ("float8_", "f8"), ("float", "f")):
        if short.startswith(long):
            short = letter + short.removeprefix(long)
            break
    return f"{short}[{','.join(map(str, shape))}]"
