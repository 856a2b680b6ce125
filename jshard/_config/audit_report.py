"""What a file's layout costs beside the search's: as data, text and HTML.

>>> low = Figures(1e-3, 6e-4, 4e-4, 2**20, 1e6, 0.4)
>>> report = AuditReport("f.yaml", "step", "data=2", Figures(2e-3, 6e-4, 1.4e-3, 2**21, 3e6, 0.2), low, (), (), ())
>>> report.slower, str(report).splitlines()[0]
(2.0, 'audit of f.yaml for step on data=2: 2.00 times the step of the search, 2.00 times its memory')
"""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

from jshard._config.fitting import Problem
from jshard._core.text_width import wrapped
from jshard._report.format_units import format_bytes, format_percent, format_seconds


@dataclasses.dataclass(frozen=True)
class Figures:
    """A plan in figures: seconds of a step, of compute and communication in it; peak and received bytes a device.

    `mfu`: the share of the step that an even share of the products takes at the chip's peak; None where unknown.
    """

    step: float
    compute: float
    communication: float
    peak_bytes: float
    received: float
    mfu: float | None = None


@dataclasses.dataclass(frozen=True)
class WholeTensor:
    """A tensor that every device holds whole under the file, with what the search does.

    `bytes`: of all tensors of this class together, `count` of them. `searched`: the entry in the search's plan.
    """

    path: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    searched: str


@dataclasses.dataclass(frozen=True)
class RuleCost:
    """What freeing one rule of the file saves: seconds of a step, and bytes of the peak."""

    rule: str
    where: str
    seconds: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The answer of `audit`: the file's plan and the search's in figures, what is whole, what looks like a slip."""

    source: str
    name: str
    mesh: str
    file: Figures
    search: Figures
    whole: tuple[WholeTensor, ...]
    problems: tuple[Problem, ...]
    rules: tuple[RuleCost, ...]
    proof: str = ""

    @property
    def slower(self) -> float:
        """The file's step over that of the search."""
        return self.file.step / self.search.step if self.search.step else 1.0

    @property
    def whole_bytes(self) -> int:
        """Bytes that every device holds in whole tensors."""
        return sum(w.bytes for w in self.whole)

    def __str__(self) -> str:
        return wrapped([self._headline(), *(line for _, rows in self._tables() for line in rows)])

    def _headline(self) -> str:
        memory = self.file.peak_bytes / self.search.peak_bytes if self.search.peak_bytes else 1.0
        return (
            f"audit of {self.source} for {self.name} on {self.mesh}: {self.slower:.2f} times the step of the search, "
            f"{memory:.2f} times its memory"
        )

    def _tables(self) -> list[tuple[str, list[str]]]:
        """The sections as (title, lines), the title being the first line."""
        out = [("figures", ["figures (the file, the search)"])]
        for label, a, b in self._figures():
            out[0][1].append(f"  {label:24} {a:>12} {b:>12}")
        if self.proof:
            out[0][1].append(f"  the search: {self.proof}")
        if self.rules:
            lines = ["rules by what freeing each saves"]
            for r in self.rules:
                seconds = format_seconds(max(r.seconds, 0.0))
                lines.append(f"  {r.rule:44} {seconds:>10} {_signed(r.bytes):>12}  {r.where}")
            out.append(("rules", lines))
        if self.whole:
            lines = [f"whole on every device: {format_bytes(self.whole_bytes)}"]
            for w in self.whole:
                more = f" and {w.count - 1} alike" if w.count > 1 else ""
                lines.append(f"  {w.path + more:60} {format_bytes(w.bytes):>10}  searched {w.searched}")
            out.append(("whole", lines))
        if self.problems:
            lines = ["what looks like a slip"]
            lines += [f"  {p.kind}: {p.what} ({p.where})" for p in self.problems]
            out.append(("problems", lines))
        return out

    def _figures(self) -> list[tuple[str, str, str]]:
        a, b = self.file, self.search
        rows = [
            ("step", format_seconds(a.step), format_seconds(b.step)),
            ("compute", format_seconds(a.compute), format_seconds(b.compute)),
            ("communication", format_seconds(a.communication), format_seconds(b.communication)),
            ("received by a device", format_bytes(a.received), format_bytes(b.received)),
            ("peak memory", format_bytes(a.peak_bytes), format_bytes(b.peak_bytes)),
        ]
        if a.mfu is not None and b.mfu is not None:
            rows.append(("MFU of the products", format_percent(a.mfu), format_percent(b.mfu)))
        return rows

    def _repr_html_(self) -> str:
        figures = "".join(
            f"<tr><td>{escape(n)}</td><td>{escape(a)}</td><td>{escape(b)}</td></tr>"
            for n, a, b in self._figures()
        )
        rest = "".join(
            f"<h2>{escape(rows[0])}</h2><ul>{''.join(f'<li>{escape(r.strip())}</li>' for r in rows[1:])}</ul>"
            for title, rows in self._tables()
            if title != "figures"
        )
        return (
            f"<div class='jshard'><p>{escape(self._headline())}</p><table><tr><th></th><th>the file</th>"
            f"<th>the search</th></tr>{figures}</table><p>{escape(self.proof)}</p>{rest}</div>"
        )

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page."""
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f"<title>audit of {escape(self.source)}</title></head><body>{self._repr_html_()}</body></html>\n"
        )
        Path(path).write_text(page, encoding="utf-8")


def _signed(b: float) -> str:
    return f"-{format_bytes(b)}" if b > 0 else "0 B" if not b else f"+{format_bytes(-b)}"
