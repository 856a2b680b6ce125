"""`print(plan)`: the plan on one page, at most 100 columns wide or as wide as the terminal, repeated layers folded.

The header states the objective and the proof; then come arguments and results, the operators that communicate or take
time, and the totals. The page consists of sections, tables of plain cells, which Markdown and HTML render too.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jshard._core.messages import count_of, short_source
from jshard._core.text_width import WIDTH, clip, text_width
from jshard._plan.rows import TensorRow
from jshard._plan.stage_memory import IN_FLIGHT, SUMS
from jshard._report.crossing import crossing_text
from jshard._report.format_units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    format_tuple,
)
from jshard._report.grouping import (
    OperatorGroup,
    fold_tensors,
    operator_groups,
    results_placed_like_arguments,
)
from jshard._report.left_whole import left_whole_lines
from jshard._report.optional_imports import require
from jshard._report.pipeline_schedules import layers_of, moving_lines, schedules, ticks_of, unused_share
from jshard._report.step_figures import mfu_text
from jshard._report.totals import (
    USER_OWN,
    at_least_prefix,
    formatted_totals,
    hidden_text,
    lower_bound_text,
    objective_text,
    optimality_text,
    tiled_text,
    traffic,
)


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


MAX_ROWS = 24  # lines of one table; a last line sums up the rest
LAST_CELL_WIDTH = 40  # columns for the last cell of an operator's line
MAX_NAME_WIDTH = 30  # columns for the name of an operator or collective
REMAT_SCOPES = ("checkpoint", "rematted_computation")  # scopes that `jax.checkpoint` opens
MIN_COMPUTE_SHARE = 0.02  # share of the compute from which an operator without collectives is listed


@dataclasses.dataclass(frozen=True)
class Section:
    """A table: title, names of the columns, rows of cells, and a note on omitted rows.

    `widths` are columns of text: negative for flush right, 0 for the rest of the line.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]
    omitted: str = ""


def text_report(plan: PlanRecord, width: int | None = None) -> str:
    """The whole report; `width` in columns, that of the terminal for None."""
    width = text_width() if width is None else width
    header = [
        part for line in header_lines(plan) for part in textwrap.wrap(line, width, subsequent_indent=" " * 6)
    ]
    tables = [line for section in sections(plan) for line in _table(section, width)]
    clipped = [clip(line, width).rstrip() for line in (*tables, *footer_lines(plan, width))]
    return "\n".join((*header, *clipped))


def rich_report(plan: PlanRecord) -> Any:
    """The report for `rich.print`, with the proof, collectives and pins highlighted; called by rich only."""
    page = require("rich.text", "report", "coloured output").Text(text_report(plan))
    proved = plan.cost.optimal and plan.search != "propagation"
    page.highlight_regex(r"(?m)^(plan of .*|[a-z].*)$", "bold")
    page.highlight_regex(r"optimal: .* bound|gap [^;]*|nothing proved", "green" if proved else "yellow")
    page.highlight_regex(r"(?m)^ +(all_|reduce_|permute|broadcast)\w*.*$", "dark_orange")
    page.highlight_regex(r"(?<=\S) \(pinned\)", "bold cyan")
    page.highlight_regex(r"replicated for want of a rule.*|emitted differs.*", "red")
    page.highlight_regex(r"emitted as planned.*", "green")
    return page


def header_lines(plan: PlanRecord) -> list[str]:
    """Function, mesh, level and proof; the gap to the lower bound of the step, if its products must receive data."""
    lines = [
        f"plan of {plan.name} on {plan.mesh} ({plan.mesh.total} x {plan.chip}), "
        f"level {plan.level}: least {objective_text(plan)}",
        f"  {optimality_text(plan)}; {len(plan.operators)} operators"
        + (", by propagation" if plan.search == "propagation" else ""),
    ]
    if plan.microbatches > 1:
        lines.append(f"  in {plan.microbatches} microbatches, one after the other")
    if plan.pipeline is not None:
        p = plan.pipeline
        lines.append(
            f"  in a pipeline of {p.stages} stages over {p.axis}: {p.microbatches} microbatches, "
            f"{count_of(p.rounds, 'round')}; {count_of(len(p.layers), 'loop')} of {p.ticks} ticks, "
            f"{p.bubble:.0%} idle"
        )
        lines += [f"  {line}" for line in moving_lines(p, plan.collectives)]
        if p.outside:
            lines.append(f"  a backward pass through the layers runs outside the pipeline: {p.outside}")
        if p.unrolled:
            lines.append(
                "  unrolled layers are stacked for it: what a layer has of its own moves to its stage, once a call"
            )
    if plan.cost.unpriced:
        lines.append(f"  with products repeated: {format_seconds(plan.cost.unpriced)} (replication_price=0)")
    lines += [f"  {line}" for line in left_whole_lines(plan)]
    return lines + ([f"  {lower_bound_text(plan)}"] if plan.physics.bytes else [])


def sections(plan: PlanRecord, max_rows: int = MAX_ROWS) -> list[Section]:
    """Arguments, results, operators, traffic; empty sections are left out."""
    containers, others = results_placed_like_arguments(plan)
    container_rows = [
        (f"{c.result}.*", f"{c.tensors} tensors as {c.argument}.*{f', but {c.differ} of them:' * (c.differ > 0)}", "", "")
        for c in containers
    ]  # fmt: skip
    every = [
        tensor_section("arguments", plan.inputs, plan, (), max_rows),
        tensor_section("results", others, plan, container_rows, max_rows),
        entry_section(plan, max_rows),
        operator_section(plan, max_rows),
        kernel_section(plan),
        traffic_section(plan),
        *pipeline_sections(plan, max_rows),
    ]
    return [s for s in every if s.rows]


def tensor_section(
    title: str,
    tensors: Sequence[TensorRow],
    plan: PlanRecord,
    first_rows: Sequence[tuple[str, ...]],
    max_rows: int,
) -> Section:
    """Arguments or results after `first_rows`: path, whether the user pinned it, type, pieces per dimension, layout."""
    rows = list(first_rows)
    for path, same in fold_tensors(tensors):
        t = same[0]
        times = f" x{len(same)}" if len(same) > 1 else ""
        name = f"{path} (pinned)" if t.pinned else path
        kind = f"{t.dtype}[{','.join(map(str, t.shape))}]{times}"
        rows.append((name, kind, format_tuple(t.layout.cuts(plan.mesh)), str(t.layout)))
    return Section(
        f"{title} (cut of each dimension, by mesh axes)",
        ("path", "type", "cut", "layout"),
        tuple(rows[:max_rows]),
        (42, 26, 14, 0),
        f"{len(rows) - max_rows} more lines; plan.ir() has all" if len(rows) > max_rows else "",
    )


def entry_section(plan: PlanRecord, max_rows: int = MAX_ROWS) -> Section:
    """Arguments that are placed elsewhere than planned, and the bytes received when they are moved."""
    entries = sorted(plan.entry, key=lambda e: -e.bytes)
    rows = [(e.path, e.lies, f"-> {e.planned}", f"{format_bytes(e.bytes)} received") for e in entries]
    omitted = ""
    if len(rows) > max_rows:
        received = format_bytes(sum(e.bytes for e in entries[max_rows:]))
        omitted = f"{len(rows) - max_rows} more, {received} received"
    total = format_bytes(sum(e.bytes for e in entries))
    title = f"moved before each such call, {total} a device (no part of the program and its cost)"
    columns = ("path", "lies", "planned", "bytes")
    return Section(title, columns, tuple(rows[:max_rows]), (30, 30, 20, 0), omitted)


def operator_section(plan: PlanRecord, max_rows: int = MAX_ROWS) -> Section:
    """Operators that communicate or take time, folded; if there are too many, those that take most."""
    step = plan.serial_seconds or 1.0
    least = MIN_COMPUTE_SHARE * plan.cost.compute
    listed = [g for g in operator_groups(plan) if g.collectives or g.compute > least]
    # Up to half of the lines are for operators that communicate, however little time they take.
    communicating = sorted(
        (g for g in listed if g.collectives), key=lambda g: -sum(m.seconds for m in g.collectives)
    )
    first = _that_fit(communicating, max_rows // 2)
    left = max_rows - sum(_num_lines(g) for g in communicating if id(g) in first)
    others = [g for g in sorted(listed, key=lambda g: -g.seconds) if id(g) not in first]
    shown = first | _that_fit(others, left)
    kept = [g for g in listed if id(g) in shown]
    hidden = format_percent(sum(g.seconds for g in listed if id(g) not in shown) / step)
    omitted = f"{len(listed) - len(kept)} more kinds, {hidden} of the time; plan.ir() has all"
    return Section(
        "operators that communicate or take time (cut of each operand -> layout of the result)",
        ("operator", "where", "share", "cut -> layout"),
        tuple(row for g in kept for row in _operator_rows(g, step)),
        (25, 25, -5, 0),
        omitted if len(kept) < len(listed) else "",
    )


def kernel_section(plan: PlanRecord) -> Section:
    """What computes the operators for which accelerators have kernels, and what keeps a kernel from some of them."""
    found = Counter((o.primitive, o.kernel) for o in plan.operators if o.kernel)
    rows = [(f"{name} x{n}" if n > 1 else name, kernel) for (name, kernel), n in found.items()]
    return Section("kernels of the accelerator", ("operator", "kernel, or why not"), tuple(rows), (32, 0))


def pipeline_sections(plan: PlanRecord, max_rows: int = MAX_ROWS) -> list[Section]:
    """The stages of the plan's pipeline, if it has one: layers, memory, ticks; and other schedules of it by formula."""
    p = plan.pipeline
    if p is None:
        return []
    held, peak = dict(plan.memory.stage), format_bytes(plan.cost.peak_bytes)
    arguments = format_bytes(sum(b for what, b in held.items() if what.startswith("argument")))
    of_layers = held.get(IN_FLIGHT, 0.0) + held.get(SUMS, 0.0)
    stages = [
        (str(s), layers_of(p, s), arguments, format_bytes(held.get(IN_FLIGHT, 0.0)),
         format_bytes(of_layers * unused_share(p, s)), peak, ticks_of(p, s))
        for s in range(min(p.stages, max_rows))
    ]  # fmt: skip
    shares = [
        (what, format_bytes(b), format_percent(b / plan.cost.peak_bytes)) for what, b in held.items() if b
    ]
    others = [
        (s.name, format_percent(s.idle), f"{s.in_flight:g} of {p.microbatches}", "this plan" if s.runs else "not run")
        for s in schedules(p)
    ]  # fmt: skip
    more = f"{p.stages - max_rows} more stages" if p.stages > max_rows else ""
    return [
        Section(
            "stages (layers; arguments, in flight, unused, all at the peak; microbatch in each forward tick)",
            ("stage", "layers", "arguments", "in flight", "unused", "peak", "ticks"),
            tuple(stages), (7, 18, 11, 11, 9, 11, 0), more,
        ),
        Section(
            "memory of a device of any stage at the peak (all stages run one program, so each holds as much)",
            ("what", "bytes", "share"), tuple(shares), (34, -10, -6),
        ),
        Section(
            "schedules of as many stages and microbatches (all but the plan's by formula, equal stages)",
            ("schedule", "idle", "held", "run"), tuple(others), (30, -6, -14, 0),
        ),
    ]  # fmt: skip


def _that_fit(candidates: Sequence[OperatorGroup], lines: int) -> set[int]:
    """The `id`s of the first groups that fit in so many lines."""
    shown = set[int]()
    for g in candidates:
        lines -= _num_lines(g)
        if lines < 0:
            break
        shown.add(id(g))
    return shown


def _num_lines(g: OperatorGroup) -> int:
    return 1 + len(g.collectives)


def _operator_rows(g: OperatorGroup, step: float) -> list[tuple[str, ...]]:
    """A line for the operators of a group and one for each kind of collective; `step` in seconds."""
    how, times = "", f" x{len(g.rows)}" if len(g.rows) > 1 else ""
    if g.rows:
        cuts = "".join(format_tuple(s) for s in g.rows[0].strategy if s) or "()"
        layouts = " ".join(dict.fromkeys(map(str, g.rows[0].results)))
        how = f"{cuts} -> {layouts}"
        # Without room for both, the cut of the operands is left out.
        how = how if len(how) <= LAST_CELL_WIDTH else f"-> {layouts}"
    rows = [(g.label + times, group_location(g) if g.rows else "", format_percent(g.seconds / step), how)]
    for c in g.collectives:
        block = f"{c.local}, {USER_OWN}" if c.own else c.local
        rows.append((f"  {c.name}", block, "", c.figures))
    return rows


def group_location(g: OperatorGroup) -> str:
    """Where the operators of a group are written: the end of their module path, and the line."""
    parts = [p for p in g.module.split("/") if p not in REMAT_SCOPES]
    remat = " remat" if len(parts) < len(g.module.split("/")) else ""
    module = "/".join(parts[-2:])
    line = short_source(g.rows[0].source) if g.rows else ""
    both = f"{module} {line}".strip() + remat
    return both if len(both) <= 25 else (module or line) + remat


def traffic_section(plan: PlanRecord) -> Section:
    """Bytes and seconds of collectives by kind and axes."""
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
    """Seconds, memory by class, operators replicated for want of a rule; lists are broken at `width` unless it is 0."""
    f = formatted_totals(plan)
    lines = [
        f"  {at_least_prefix(plan)}compute {f['compute']} (redundant {f['redundant']}), "
        f"communication {f['communication']}{hidden_text(plan)}, step {f['step']}"
    ]
    if text := crossing_text(plan):
        lines += _wrapped(f"  {text}", width)
    if at_least_prefix(plan):
        lines.append("  a loop whose turns are not known counts as one turn: totals are the least")
    if plan.chip != "cpu" and (utilization := mfu_text(plan)):
        lines.append(f"  {utilization}")
    budget = "" if plan.memory_budget is None else f" of {f['budget']} allowed"
    lines.append(f"  peak memory {f['peak']}{budget} a device, in program order")
    held = [f"{name} {format_bytes(b)}" for name, b in plan.memory.held]
    if len(held) > 1:
        more = f", {len(held) - 5} more" if len(held) > 6 else ""
        lines += _wrapped("    " + ", ".join(held[: 5 if more else 6]) + more, width)
    if plan.memory.tiled:
        lines += _wrapped(f"    {tiled_text(plan)}", width)
    if plan.unknown:
        lines += _wrapped(f"  replicated for want of a rule: {', '.join(plan.unknown)}", width)
    for step in plan.steps:
        if step.startswith("differentiated from outside"):
            lines += _wrapped(f"  {step}", width)
    if plan.verification is not None:
        lines.append(f"  compiled program: {plan.verification.summary}")
        if plan.verification.timeline is not None:
            lines += _wrapped(f"  {plan.verification.timeline.summary}", width)
    return lines


def _table(s: Section, width_of_text: int) -> list[str]:
    lines, s = [s.title], _fit_columns(s, width_of_text)
    for row in s.rows:
        line, end = "", 1
        for k, (cell, width) in enumerate(zip(row, s.widths, strict=True)):
            start, end = end + 1, end + 1 + abs(width)
            if width < 0:
                line = line.ljust(end - len(cell)) + cell
                continue
            # A cell without a right neighbour may extend over the free columns.
            room = width if width and any(row[k + 1 : k + 2]) else width_of_text
            line = line.ljust(start) + clip(cell, room)
        lines.append(line)
    return lines + ([f"  ... and {s.omitted}"] if s.omitted else [])


def _fit_columns(s: Section, width: int) -> Section:
    """The section with columns as wide as their cells, if the default widths would clip one.

    A table that is still too wide loses the column of cuts, which the layouts beside it repeat by mesh axes.
    """

    def natural(rows: Sequence[tuple[str, ...]]) -> list[int]:
        # Only full rows count: in the others, cells extend over the free columns to their right.
        whole = [r for r in rows if all(r)]
        return [max((len(r[k]) for r in whole), default=0) for k in range(len(rows[0]))] if rows else []

    usual = [abs(w) for w in s.widths]
    wide = natural(s.rows)
    usual[-1] = width - 1 - sum(w + 1 for w in usual[:-1])
    if "cut" not in s.columns:
        longest = min(max((len(r[0]) for r in s.rows), default=0), MAX_NAME_WIDTH)
        if longest <= usual[0] or len(usual) < 3:
            return s
        # The blocks of collectives extend over the column of shares, which is free in their lines.
        second = max(min(len(r[1]), usual[1]) if r[2] else len(r[1]) - usual[2] - 1 for r in s.rows)
        return dataclasses.replace(s, widths=(longest, second, *s.widths[2:]))
    if all(n <= u for n, u in zip(wide, usual, strict=True)):
        return s
    if 1 + sum(n + 1 for n in wide) > width:
        at = s.columns.index("cut")
        rows = tuple(r[:at] + r[at + 1 :] for r in s.rows)
        columns, wide = s.columns[:at] + s.columns[at + 1 :], wide[:at] + wide[at + 1 :]
        s = dataclasses.replace(s, columns=columns, rows=rows)
    wide[0] -= max(0, 1 + sum(n + 1 for n in wide) - width)
    return dataclasses.replace(s, widths=(*wide[:-1], 0))


def _wrapped(line: str, width: int) -> list[str]:
    """A long line, broken at commas, or between words where no comma is left in the width."""
    out, indent = [], " " * (len(line) - len(line.lstrip()) + 2)
    while width and len(line) > width:
        comma = line.rfind(", ", 0, width)
        at = comma + 1 if comma >= len(indent) else line.rfind(" ", 0, width + 1)
        if at < len(indent):
            break
        out.append(line[:at])
        line = indent + line[at + 1 :]
    return [*out, line]
