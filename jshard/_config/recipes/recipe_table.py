"""Recipes beside the plan of the search: what each costs, and why others do not apply; as data, text and HTML.

>>> search = Figures(1e-3, 6e-4, 4e-4, 2**20, 1e6)
>>> rows = (RecipeRow("data", Figures(2e-3, 6e-4, 1.4e-3, 2**21, 3e6), 0.0), RecipeRow("ring", None, reason="no attention"))
>>> print(RecipeTable("step", "data=2", search, 0.0, "optimal", rows))
recipes for step on data=2, beside the plan of the search with nothing pinned
  recipe                           step  slower     received  peak memory    gap
  the search                       1 ms    1.00      977 KiB        1 MiB      0
  data                             2 ms    2.00     2.86 MiB        2 MiB      0
  do not apply
    ring: no attention
  the search: optimal
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape

from jshard._config.audit_report import Figures
from jshard._core.errors import ShardError
from jshard._core.messages import suggest
from jshard._core.text_width import wrapped
from jshard._report.format_units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True)
class RecipeRow:
    """One recipe: its plan in figures, or the reason why there is none."""

    recipe: str
    figures: Figures | None
    gap: float = 0.0
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Whether the recipe applies."""
        return self.figures is not None


@dataclasses.dataclass(frozen=True)
class RecipeTable:
    """The answer of `recipes`: every recipe, cheapest first, and those that do not apply; `table["fsdp"]` is a row."""

    name: str
    mesh: str
    search: Figures
    gap: float
    proof: str
    rows: tuple[RecipeRow, ...]

    @property
    def applying(self) -> tuple[RecipeRow, ...]:
        """The rows of recipes that apply, cheapest first."""
        found = [(r.figures.step, r) for r in self.rows if r.figures is not None]
        return tuple(r for _, r in sorted(found, key=lambda f: f[0]))

    def __getitem__(self, recipe: str) -> RecipeRow:
        for row in self.rows:
            if row.recipe == recipe:
                return row
        names = tuple(r.recipe for r in self.rows)
        raise ShardError(f"there is no row {recipe!r}", where="recipes", fix=suggest(recipe, names))

    def __iter__(self) -> Iterator[RecipeRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [self._title(), "  " + _line(HEAD)]
        lines += ["  " + _line(cells) for cells in self._cells()]
        refused = [r for r in self.rows if not r.applies]
        lines += ["  do not apply"] * bool(refused) + [f"    {r.recipe}: {r.reason}" for r in refused]
        return wrapped([*lines, f"  the search: {self.proof}"])

    def _title(self) -> str:
        return f"recipes for {self.name} on {self.mesh}, beside the plan of the search with nothing pinned"

    def _cells(self) -> list[tuple[str, ...]]:
        base = self.search.step
        found = [("the search", self.search, self.gap)]
        found += [(r.recipe, r.figures, r.gap) for r in self.applying if r.figures is not None]
        return [
            (
                name, format_seconds(f.step), f"{f.step / base if base else 1.0:.2f}", format_bytes(f.received),
                format_bytes(f.peak_bytes), "0" if gap <= 1e-9 else f"{100 * gap:.2g}%",
            )
            for name, f, gap in found
        ]  # fmt: skip

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(h)}</th>" for h in HEAD)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in self._cells())
        refused = "".join(
            f"<li><b>{escape(r.recipe)}</b> does not apply: {escape(r.reason)}</li>"
            for r in self.rows
            if not r.applies
        )
        return (
            f"<div class='jshard'><p>{escape(self._title())}</p><table><tr>{head}</tr>{rows}</table>"
            f"<ul>{refused}</ul><p>the search: {escape(self.proof)}</p></div>"
        )


HEAD = ("recipe", "step", "slower", "received", "peak memory", "gap")
_WIDTHS = (26, 10, 7, 12, 12, 6)


def _line(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    shown = (c.rjust(w) for c, w in zip(rest, _WIDTHS[1:], strict=True))
    return " ".join([first.ljust(_WIDTHS[0]), *shown])
