"""Dimensions of a program that a cut into `pieces` goes through without communication, as classes.

Problem.  A recipe cuts "the heads" or "the hidden features": one index of the model, which many weights and activations
carry under other names and positions.

Idea.  The rule of an operator says which dimensions of its operands and results carry one factor. Dimensions that carry
it as their major factor are cut together, so they are joined by union-find over all operators; a factor that `pieces`
does not divide joins nothing. A cut of several factors by one axis (`JointCut`) that sends and sums nothing, such as that
of query heads with the heads of their keys, joins those. With `pieces=1` the classes are those of the model's
structure, divisible or not.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda x, v, w: jax.nn.relu(x @ v).reshape(8, 2, 3) @ w
>>> traced = jax.jit(f).trace(jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones((3, 5)))
>>> program = build(traced.jaxpr, name="f", input_names=["x", "v", "w"])
>>> two, three = (DimensionClasses(program, n) for n in (2, 3))
>>> x, v, out = 0, 1, program.operators[program.outputs[0]].operands[0]
>>> two.of(x)[0] == two.of(out)[0], two.of(v)[1] == two.of(out)[1], three.of(v)[1] == three.of(out)[1]
(True, True, False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jshard._core.layout import MeshAxes
from jshard._network.candidates import CandidateCache
from jshard._program.graph import Literal, Operator, Program
from jshard._rules.rule import PARTIAL, Rule, joint_code


_ENDPOINTS = frozenset(("input", "const", "output"))


class ProgramRules:
    """The rules of a program's operators, looked up once for equal operators."""

    def __init__(self, program: Program):
        self.program = program
        self._cache = CandidateCache(program, MeshAxes((), ()))

    def of(self, op: Operator) -> Rule | None:
        """The rule of an operator; None for arguments and results of the program, which have none."""
        return None if op.kind in _ENDPOINTS else self._cache.rule_of(op)[1]


def operand_and_result_dims(op: Operator, rule: Rule) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(tensor, dimension, its factors) for the operands and results that are tensors."""
    for atoms, dims in ((op.operands, rule.operands), (op.results, rule.results)):
        for atom, factors in zip(atoms, dims, strict=True):
            if not isinstance(atom, Literal):
                yield from ((atom, d, f) for d, f in enumerate(factors))


def _joint_without_communication(rule: Rule) -> Iterator[frozenset[int]]:
    """The factors of each joint cut along which every tensor is cut or whole, and nothing is sent."""
    sent = {c.over for c in rule.internal}
    for k, cut in enumerate(rule.joint):
        if joint_code(rule, k) not in sent and PARTIAL not in cut.results:
            yield frozenset(cut.factors)


class DimensionClasses:
    """Classes of dimensions that are cut together into `pieces`."""

    def __init__(self, program: Program, pieces: int, rules: ProgramRules | None = None):
        self.program, self.pieces = program, pieces
        self._first = [0]
        for t in program.tensors:
            self._first.append(self._first[-1] + t.ndim)
        self._parent = list(range(self._first[-1]))
        rules = rules or ProgramRules(program)
        for op in program.operators:
            rule = rules.of(op)
            if rule is not None and not rule.opaque:
                self._join(op, rule)

    def _join(self, op: Operator, rule: Rule) -> None:
        node_of: dict[int, int] = {}
        for tensor, dim, factors in operand_and_result_dims(op, rule):
            if not factors or factors[0] in rule.blocked or rule.sizes[factors[0]] % self.pieces:
                continue
            node = self._first[tensor] + dim
            self._union(node, node_of.setdefault(factors[0], node))
        for own in _joint_without_communication(rule):
            if any(rule.sizes[f] % self.pieces for f in own):
                continue
            nodes = [
                self._first[tensor] + dim
                for tensor, dim, factors in operand_and_result_dims(op, rule)
                if factors and factors[0] in own
            ]
            for node in nodes:
                self._union(node, nodes[0])

    def _union(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        # The earliest dimension stands for its class, so that classes are in program order.
        self._parent[max(a, b)] = min(a, b)

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def of(self, tensor: int) -> tuple[int, ...]:
        """The class of each dimension of a tensor."""
        return tuple(self._find(i) for i in range(self._first[tensor], self._first[tensor + 1]))

    def members(self, wanted: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """The (tensor, dimension) pairs of some classes."""
        out: dict[int, list[tuple[int, int]]] = {c: [] for c in wanted}
        for t in range(len(self.program.tensors)):
            for d, c in enumerate(self.of(t)):
                if c in out:
                    out[c].append((t, d))
        return out
