"""Every error of jshard: what is wrong, where, and what to write instead.

All errors derive from `ShardError`, itself a `ValueError`, so one `except` is enough. The three parts are attributes.

>>> raise ShardError("a cut of 3 does not divide 32", where="argument x, dimension 0", fix="cut by 2, 4 or 8")
Traceback (most recent call last):
...
jshard._core.errors.ShardError: a cut of 3 does not divide 32
  where: argument x, dimension 0
  write instead: cut by 2, 4 or 8
"""

from __future__ import annotations


class ShardError(ValueError):
    """A request that cannot be fulfilled: `what` is wrong, `where`, and the `fix`, what to write instead."""

    def __init__(self, what: str, *, where: str = "", fix: str = ""):
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if fix:
            lines.append(f"  write instead: {fix}")
        super().__init__("\n".join(lines))


class ArgumentError(ShardError, TypeError):
    """A wrong argument, or one that is not a pytree of arrays; also a `TypeError`, as `jax.jit` raises."""


class StrategyError(ShardError):
    """A strategy, spec or parameter plan that does not fit the arguments or the mesh.

    `padded`: the end of its advice, the option that would pad a dimension; `unpadded`: the advice without it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", padded: str = ""):
        super().__init__(what, where=where, fix=f"{fix}{padded}")
        self.unpadded, self.padded = fix, padded


class MeshError(ShardError):
    """A mesh, topology, device or chip that cannot be used."""


class RuleError(ShardError):
    """A malformed or duplicate rule of an operator."""


class SearchError(ShardError):
    """No plan satisfies the pins, or the network of costs has no feasible assignment."""


class MemoryBudgetError(SearchError):
    """No plan fits the memory budget; the text names the least that any plan needs.

    `refusal`: what is known of the memory (`_plan/memory_refusal.py`), None where it was not looked into. `remedies`: the
    rows of the table of what helps (`_report/refusal_text.py`). `least_found`: bytes of a device that the smallest plan
    found needs, 0 where none was looked for; `proved_least`: those that every plan needs, as far as that is proved.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        fix: str = "",
        refusal: object = None,
        remedies: tuple[object, ...] = (),
        least_found: float = 0.0,
        proved_least: float = 0.0,
    ):
        super().__init__(what, where=where, fix=fix)
        self.refusal, self.remedies = refusal, remedies
        self.least_found, self.proved_least = least_found, proved_least


class NestedShardError(ShardError):
    """A sharded function inside a sharded function, or under `vmap`."""


class ProcessError(ShardError):
    """Processes of one program that differ, or do not answer: in what they call, trace, plan or are given."""


class PlanMismatchError(ShardError):
    """A saved plan, or a compiled program, that belongs to another program, mesh or version."""
