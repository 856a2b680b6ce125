"""Tensors with their entries: the outcome of resolving a configuration against one call.

>>> Row(TensorName("x", (4,), "float32"), (("data",),), "rule", "inputs", Rule("x", (("data",),), "f.yaml:3")).where
"f.yaml:3: inputs 'x' (argument x)"
"""

from __future__ import annotations

import dataclasses

from jshard._config.config_record import Entry, Rule
from jshard._config.fitting import Problem
from jshard._config.tensors import TensorName


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor with its entry: from a `rule`, from that of the parameter it mirrors (`of`), or without one.

    `status`: "rule", "mirrors", "derived" or "replicated". `entry`: None where nothing is said.
    """

    tensor: TensorName
    entry: Entry | None
    status: str
    section: str = ""
    rule: Rule | None = None
    of: str = ""

    @property
    def where(self) -> str:
        """What the user wrote, for messages of the planner."""
        name = self.tensor.path or "the model"
        if self.rule is None:
            return f"unlisted: replicated ({self.tensor.kind} {name})"
        return f"{self.rule.where}: {self.section} {self.rule.key!r} ({self.tensor.kind} {name})"


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a configuration says about one call: rows for arguments, inner values and results, and problems."""

    rows: tuple[Row, ...]
    inner: tuple[Row, ...] = ()
    results: tuple[Row, ...] = ()
    problems: tuple[Problem, ...] = ()

    def entries(self) -> dict[str, Entry]:
        """The entry of each tensor that has one, by path."""
        return {r.tensor.key: r.entry for r in (*self.rows, *self.inner) if r.entry is not None}
