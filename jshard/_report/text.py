"""`print(plan)`: the decision in one page, at most 100 columns, repeated layers folded.

Head and proof first, then arguments and results, then the operators that move data or take time, then totals.
The page is built of sections, tables of plain cells, which Markdown and HTML render too.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jshard._plan.records import TensorRow
from jshard._report.format_units import format_bytes, format_count, format_percent, format_seconds
from jshard._report.grouping import (
    OperatorGroup,
    fold_tensors,
    operator_groups,
    results_placed_like_arguments,
)
from jshard._report.ir import short_source
from jshard._report.optional_imports import require
from jshard._report.totals import (
    USER_OWN,
    at_least_prefix,
    formatted_totals,
    lower_bound_text,
    objective_text,
    optimality_text,
    step_seconds,
    traffic,
)


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


WIDTH = 100
MAX_ROWS = 24  # lines of one table; what does not fit is summed up in a last line
LAST_CELL_WIDTH = 40  # columns for the last cell of an operator's line
MAX_NAME_WIDTH = 30  # columns for the name of an operator or collective
REMAT_SCOPES = ("checkpoint", "rematted_computation")  # scopes that `jax.checkpoint` opens
MIN_COMPUTE_SHARE = 0.02  # share of the compute from which an operator without collectives is listed


@dataclasses.dataclass(frozen=True)
class Section:
    """A table: title, names of its columns, rows of cells, and what was left out.

    `widths` are those in text: negative for a column flush right, 0 for the rest of the line.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]
    omitted: str = ""


def text_report(plan: PlanRecord) -> str:
    """The whole report."""
    lines = [_clip(line, WIDTH).rstrip() for section in sections(plan) for line in _table(section)]
    # What is proved is never cut short.
    first = [
        part for line in header_lines(plan) for part in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 6)
    ]
    return "\n".join((*first, *lines, *(_clip(line, WIDTH).rstrip() for line in footer_lines(plan))))


def rich_report(plan: PlanRecord) -> Any:
    """The report for `rich.print`: proof, collectives and pins stand out; only rich calls this."""
    page = require("rich.text", "report", "coloured output").Text(text_report(plan))
    proved = plan.cost.optimal and plan.search != "propagation"
    page.highlight_regex(r"(?m)^(plan of .*|[a-z].*)$", "bold")
    page.highlight_regex(r"optimal: .* bound|gap [^;]*|nothing proved", "green" if proved else "yellow")
    page.highlight_regex(r"(?m)^ +(all_|reduce_|permute|broadcast)\w*.*$", "dark_orange")
    page.highlight_regex(r"\S+\*(?= )", "bold cyan")
    page.highlight_regex(r"replicated for want of a rule.*|emitted differs.*", "red")
    page.highlight_regex(r"emitted as planned.*", "green")
    return page


def header_lines(plan: PlanRecord) -> list[str]:
    """Function, mesh, level, proof; how far from physics, where the plan has products that must receive something."""
    lines = [
        f"plan of {plan.name} on {plan.mesh} ({plan.mesh.total} x {plan.chip}), level {plan.level}: least {objective_text(plan)}",
        f"  {optimality_text(plan)}; {len(plan.operators)} operators"
        + (", by propagation" if plan.search == "propagation" else ""),
    ]
    if plan.cost.unpriced:
        lines.append(f"  with products repeated: {format_seconds(plan.cost.unpriced)} (replication_price=0)")
    return lines + ([f"  {lower_bound_text(plan)}"] if plan.physics.bytes else [])


def sections(plan: PlanRecord, most: int = MAX_ROWS) -> list[Section]:
    """Arguments, results, operators, traffic; empty ones are left out."""
    said, rest = results_placed_like_arguments(plan)
    as_rows = [
        (f"{r}.*", f"{n} tensors as {a}.*" + (f", but {d} of them:" if d else ""), "", "")
        for r, a, n, d in said
    ]
    every = [
        tensor_section("arguments", plan.inputs, plan, (), most),
        tensor_section("results", rest, plan, as_rows, most),
        entry_section(plan, most),
        operator_section(plan, most),
        traffic_section(plan),
    ]
    return [s for s in every if s.rows]


def tensor_section(
    title: str, rows: Sequence[TensorRow], plan: PlanRecord, first: Sequence[tuple[str, ...]], most: int
) -> Section:
    """Arguments or results: path, type, cut, layout; a star where the user pinned it."""
    out = list(first)
    for path, same in fold_tensors(rows):
        r = same[0]
        times = f" x{len(same)}" if len(same) > 1 else ""
        kind = f"{r.dtype}[{','.join(map(str, r.shape))}]{times}"
        out.append(
            (path + ("*" if r.pinned else ""), kind, format_tuple(r.layout.cuts(plan.mesh)), str(r.layout))
        )
    more = f"{len(out) - most} more lines; plan.ir() has all" if len(out) > most else ""
    return Section(
        f"{title} (* pinned)", ("path", "type", "cut", "layout"), tuple(out[:most]), (42, 26, 14, 0), more
    )


def entry_section(plan: PlanRecord, most: int = MAX_ROWS) -> Section:
    """Arguments that lie elsewhere than the plan has them, and what moving them there receives."""
    moved = sorted(plan.entry, key=lambda e: -e.bytes)
    rows = [(e.path, e.lies, f"-> {e.planned}", f"{format_bytes(e.bytes)} received") for e in moved]
    if len(rows) > most:
        rest = sum(e.bytes for e in moved[most:])
        more = f"{len(rows) - most} more, {format_bytes(rest)} received"
    else:
        more = ""
    total = format_bytes(sum(e.bytes for e in moved))
    title = f"moved before each such call, {total} a device (no part of the program and its cost)"
    return Section(title, ("path", "lies", "planned", "bytes"), tuple(rows[:most]), (30, 30, 20, 0), more)


def operator_section(plan: PlanRecord, most: int = MAX_ROWS) -> Section:
    """Operators that communicate or take time, folded; where there are too many, those that take most."""
    whole = step_seconds(plan) or 1.0
    worth = [
        g for g in operator_groups(plan) if g.collectives or g.compute > MIN_COMPUTE_SHARE * plan.cost.compute
    ]
    # What moves data has the first half of the room, however little time it takes: people look for it here.
    moving = sorted((g for g in worth if g.collectives), key=lambda g: -sum(m.seconds for m in g.collectives))
    shown = _that_fit(moving, most // 2)
    shown |= _that_fit([g for g in sorted(worth, key=lambda g: -g.seconds) if id(g) not in shown],
                       most - sum(_num_lines(g) for g in moving if id(g) in shown))  # fmt: skip
    kept = [g for g in worth if id(g) in shown]
    rows = [row for g in kept for row in _operator_rows(g, whole)]
    hidden = sum(g.seconds for g in worth if id(g) not in shown)
    more = f"{len(worth) - len(kept)} more kinds, {format_percent(hidden / whole)} of the time; plan.ir() has all"
    return Section(
        "operators that communicate or take time (cut of each operand -> layout of the result)",
        ("operator", "where", "share", "cut -> layout"),
        tuple(rows),
        (25, 25, -5, 0),
        more if len(kept) < len(worth) else "",
    )


def _that_fit(some: Sequence[OperatorGroup], room: int) -> set[int]:
    """The first groups whose lines fit."""
    shown = set[int]()
    for g in some:
        room -= _num_lines(g)
        if room < 0:
            break
        shown.add(id(g))
    return shown


def _num_lines(g: OperatorGroup) -> int:
    return 1 + len(g.collectives)


def _operator_rows(g: OperatorGroup, whole: float) -> list[tuple[str, ...]]:
    rows = []
    for r in g.rows[:1]:
        times = f" x{len(g.rows)}" if len(g.rows) > 1 else ""
        cuts = "".join(format_tuple(s) for s in r.strategy if s) or "()"
        layouts = " ".join(dict.fromkeys(map(str, r.results)))
        how = f"{cuts} -> {layouts}"
        # Operands cut as the result is need no words of their own where there is no room for them.
        how = how if len(how) <= LAST_CELL_WIDTH else f"-> {layouts}"
        rows.append((g.label + times, group_location(g), format_percent(g.seconds / whole), how))
    if not g.rows:
        rows.append((g.label, "", format_percent(g.seconds / whole), ""))
    for m in g.collectives:
        how = f"{format_count(m.count)} x, {format_bytes(m.bytes)}, {format_seconds(m.seconds)}"
        block = f"{m.local}, {USER_OWN}" if m.own else m.local
        rows.append((f"  {m.kind}[{'*'.join(m.axes)}]", block, "", how))
    return rows


def group_location(g: OperatorGroup) -> str:
    """Where a group stands: end of its module path, and the line."""
    parts = [p for p in g.module.split("/") if p not in REMAT_SCOPES]
    again = " remat" if len(parts) < len(g.module.split("/")) else ""
    module = "/".join(parts[-2:])
    line = short_source(g.rows[0].source) if g.rows else ""
    both = f"{module} {line}".strip() + again
    return both if len(both) <= 25 else (module or line) + again


def traffic_section(plan: PlanRecord) -> Section:
    """Bytes and seconds by kind and by axes."""
    rows = [
        (
            t.kind,
            f"over {t.axes}" + ", at least" * t.is_lower_bound,
            f"{format_count(t.count)} times",
            f"{t.bytes:,.0f} B",
            format_seconds(t.seconds),
        )
        for t in traffic(plan)
    ]
    return Section(
        "per device and call",
        ("collective", "axes", "count", "bytes", "time"),
        tuple(rows) or (("no collectives", "", "", "", ""),),
        (16, 17, -12, -20, -11),
    )


def footer_lines(plan: PlanRecord, width: int = WIDTH) -> list[str]:
    """Seconds, memory by class, what was replicated for want of a rule; lists broken at `width` unless it is 0."""
    f = formatted_totals(plan)
    lines = [
        f"  {at_least_prefix(plan)}compute {f['compute']} (redundant {f['redundant']}), "
        f"communication {f['communication']}, step {f['step']}"
    ]
    if at_least_prefix(plan):
        lines.append("  a loop whose turns are not known counts as one turn: totals are the least")
    budget = "" if plan.memory_budget is None else f" of {f['budget']} allowed"
    lines.append(f"  peak memory {f['peak']}{budget} a device, in program order")
    held = [f"{name} {format_bytes(b)}" for name, b in plan.memory.held]
    if len(held) > 1:
        more = f", {len(held) - 5} more" if len(held) > 6 else ""
        lines += _wrapped("    " + ", ".join(held[: 5 if more else 6]) + more, width)
    if plan.unknown:
        lines += _wrapped(f"  replicated for want of a rule: {', '.join(plan.unknown)}", width)
    for said in plan.steps:
        if said.startswith("differentiated from outside"):
            lines += _wrapped(f"  {said}", width)
    if plan.verification is not None:
        lines.append(f"  compiled program: {plan.verification.summary}")
    return lines


def format_tuple(cuts: Sequence[int]) -> str:
    """Pieces per dimension, as Python writes a tuple."""
    return "(" + ", ".join(map(str, cuts)) + ("," if len(cuts) == 1 else "") + ")"


def _table(s: Section) -> list[str]:
    lines, s = [s.title], _fit_columns(s)
    for row in s.rows:
        line, end = "", 1
        for k, (cell, width) in enumerate(zip(row, s.widths, strict=True)):
            start, end = end + 1, end + 1 + abs(width)
            if width < 0:
                line = line.ljust(end - len(cell)) + cell
                continue
            # A cell with nothing to its right may run on.
            room = width if width and any(row[k + 1 : k + 2]) else WIDTH
            line = line.ljust(start) + _clip(cell, room)
        lines.append(line)
    return lines + ([f"  ... and {s.omitted}"] if s.omitted else [])


def _fit_columns(s: Section) -> Section:
    """The section with columns as wide as their cells where the usual widths would clip one.

    What then is still too wide loses the column of cuts: the layouts beside it say the same by the axes' names.
    """

    def natural(rows: Sequence[tuple[str, ...]]) -> list[int]:
        # Rows of words that run on do not count, nor do cells that nothing follows.
        whole = [r for r in rows if all(r)]
        return [max((len(r[k]) for r in whole), default=0) for k in range(len(rows[0]))] if rows else []

    usual = [abs(w) for w in s.widths]
    wide = natural(s.rows)
    usual[-1] = WIDTH - 1 - sum(w + 1 for w in usual[:-1])
    if "cut" not in s.columns:
        longest = min(max((len(r[0]) for r in s.rows), default=0), MAX_NAME_WIDTH)
        if longest <= usual[0] or len(usual) < 3:
            return s
        # Blocks of collectives run on over the share, which their lines do not have.
        second = max(min(len(r[1]), usual[1]) if r[2] else len(r[1]) - usual[2] - 1 for r in s.rows)
        return dataclasses.replace(s, widths=(longest, second, *s.widths[2:]))
    if all(n <= u for n, u in zip(wide, usual, strict=True)):
        return s
    if 1 + sum(n + 1 for n in wide) > WIDTH:
        at = s.columns.index("cut")
        rows = tuple(r[:at] + r[at + 1 :] for r in s.rows)
        columns, wide = s.columns[:at] + s.columns[at + 1 :], wide[:at] + wide[at + 1 :]
        s = dataclasses.replace(s, columns=columns, rows=rows)
    wide[0] -= max(0, 1 + sum(n + 1 for n in wide) - WIDTH)
    return dataclasses.replace(s, widths=(*wide[:-1], 0))


def _clip(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 2] + ".."


def _wrapped(line: str, width: int) -> list[str]:
    """A long list, broken at commas."""
    out, indent = [], " " * (len(line) - len(line.lstrip()) + 2)
    while width and len(line) > width:
        at = line.rfind(", ", 0, width)
        if at < len(indent):
            break
        out.append(line[: at + 1])
        line = indent + line[at + 2 :]
    return [*out, line]
