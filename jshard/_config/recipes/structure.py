"""What the dimensions of a traced model are: batch, sequence, inner features of layers, heads, vocabulary, experts.

All from the program: no name of a parameter or class is looked at.

- batch: the dimension that most products of the forward pass carry without summing over it, of those under a derivative
  if any is: an optimizer's products keep dimensions of weights;
- data: the arguments that have it; weights: those that are operands beside values that have it; state: others of the
  shape and dimensions of a weight (moments of optimizers);
- sequence: the dimension of most products with weights that is neither the batch's nor a weight's;
- inner: made by one product with a weight and summed over by another (hidden features, heads), so that a cut needs one
  sum at the end; not the residual stream (`lax.scan` carries, embeddings, arguments);
- vocabulary: what look-ups by data index, or what a softmax over the output of a product goes over;
- experts: a dimension that weights and activations share in a product.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from jshard._config.recipes.dimension_classes import DimensionClasses, ProgramRules
from jshard._config.recipes.products import (
    ATTENTION,
    CONTRACTIONS,
    LOOKUP,
    Origins,
    Product,
    is_differentiated,
    is_forward,
    origins,
    products_of,
)
from jshard._program.graph import Literal, Operator, Program


_SOFTMAX = frozenset(("reduce_max", "argmax"))
_REDUCERS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "cumsum", "sort", "top_k")
)
_CARRIES = frozenset(("scan_carry", "while_carry"))
_STATED = frozenset(("jshard_fused",))  # operators whose cuts the user states, `jshard.op(rule=...)`


@dataclasses.dataclass(frozen=True)
class WeightDims:
    """The dimensions of a product with a weight: `out` its result has from the weight alone, `into` it sums over,
    `shared` weight, activation and result have, `rows` the result has from the activation alone."""

    product: Product
    out: tuple[int, ...]
    into: tuple[int, ...]
    shared: tuple[int, ...]
    rows: tuple[int, ...]


class Structure:
    """The roles of a program's dimensions for cuts into `pieces`; with 1 those of the model, divisible or not."""

    def __init__(self, program: Program, pieces: int = 1, whole: Structure | None = None):
        """`whole`: the structure for 1, of which the batch, data and products are taken."""
        self.program = program
        self.rules = ProgramRules(program) if whole is None else whole.rules
        self.classes = DimensionClasses(program, pieces, self.rules)
        self.whole = self if whole is None else whole

    def cut(self, pieces: int) -> Structure:
        """The same model's structure for cuts into `pieces`."""
        whole = self.whole
        if pieces == 1:
            return whole
        if pieces not in whole._cuts:
            whole._cuts[pieces] = Structure(self.program, pieces, whole)
        return whole._cuts[pieces]

    @functools.cached_property
    def _cuts(self) -> dict[int, Structure]:
        return {}

    def argument(self, number: int) -> int:
        """The tensor of an argument."""
        return self.program.operators[self.program.inputs[number]].results[0]

    @functools.cached_property
    def batch_place(self) -> tuple[int, int] | None:
        """(argument, dimension) of the batch; None where no product has a dimension that it keeps."""
        if self.whole is not self:
            return self.whole.batch_place
        free: collections.Counter[int] = collections.Counter()
        for op in self._model_products():
            summed = {c for d in self._factors(op)[1] for c in d}
            kept = {c for t in op.results for c in self.classes.of(t)}
            free.update({c: 1 for c in kept - summed})
        best: tuple[bool, int, int, int] | None = None
        place = None
        for number in range(len(self.program.inputs)):
            for d, c in enumerate(self.classes.of(self.argument(number))):
                rank = (number not in self._replaced, free[c], -d, number)
                if free[c] and (best is None or rank > best):
                    best, place = rank, (number, d)
        return place

    @functools.cached_property
    def _replaced(self) -> frozenset[int]:
        """Numbers of the arguments that a result replaces or is the gradient of, by name and shape: weights and state.

        They have the batch only where no other argument has a dimension that could be it.
        """

        def key(op: Operator, tensor: int) -> tuple[str, tuple[int, ...]]:
            return op.name.partition(".")[2], self.program.tensors[tensor].shape

        made = [self.program.operators[o] for o in self.program.outputs]
        given = [self.program.operators[i] for i in self.program.inputs]
        results = {key(op, t) for op in made for t in op.operands if not isinstance(t, Literal)}
        arguments = [key(op, op.results[0]) for op in given]
        return frozenset(n for n, (name, shape) in enumerate(arguments) if name and (name, shape) in results)

    def _model_products(self) -> list[Operator]:
        """The products of the forward pass; where a model has none, the operators whose cuts the user states.

        Of a step that differentiates those of its model: an optimizer's products keep dimensions of weights.
        """
        forward = [op for op in self.program.operators if is_forward(op)]
        products, stated = ([op for op in forward if op.primitive in s] for s in (CONTRACTIONS, _STATED))
        of_model = ([op for op in found if is_differentiated(op)] for found in (products, stated))
        return next((found for found in (*of_model, products) if found), stated)

    @functools.cached_property
    def batch(self) -> int | None:
        """The class of the batch."""
        place = self.batch_place
        return None if place is None else self.classes.of(self.argument(place[0]))[place[1]]

    def has_batch(self, tensor: int) -> bool:
        """Whether a tensor has a value per example."""
        return self.whole.batch in self.whole.classes.of(tensor)

    @functools.cached_property
    def data(self) -> frozenset[int]:
        """Numbers of the arguments with the batch."""
        if self.batch_place is None:
            return frozenset()
        return frozenset(n for n in range(len(self.program.inputs)) if self.has_batch(self.argument(n)))

    @functools.cached_property
    def origins(self) -> Origins:
        """The arguments behind each tensor that no data argument is behind."""
        return origins(self.program, self.data) if self.whole is self else self.whole.origins

    @functools.cached_property
    def products(self) -> list[Product]:
        """The products and look-ups of the forward pass."""
        return products_of(self.program, self.origins) if self.whole is self else self.whole.products

    @functools.cached_property
    def weights(self) -> frozenset[int]:
        """Numbers of the arguments that the forward pass combines with data: with values that have the batch.

        In what is differentiated, with any value that is computed from data: what experts read has lost the batch.
        """
        if self.whole is not self:
            return self.whole.weights
        behind, found = self.origins.of, set[int]()
        nothing_is_differentiated = not any(map(is_differentiated, self.program.operators))
        for op in self.program.operators:
            tensors = [a for a in op.operands if not isinstance(a, Literal)]
            if op.kind == "output" or not is_forward(op):
                continue
            in_model = nothing_is_differentiated or is_differentiated(op)
            reads_data = in_model and any(behind[t] is None for t in tensors)
            if reads_data or any(map(self.has_batch, (*tensors, *op.results))):
                found |= {n for t in tensors for n in behind[t] or ()}
        return frozenset(n for n in found if self._is_float(n))

    def _is_float(self, number: int) -> bool:
        dtype = self.program.tensors[self.argument(number)].dtype
        if not isinstance(dtype, np.dtype):
            return False  # keys of random bits
        return dtype.kind in "fcV" or dtype == np.int8 or "float" in dtype.name

    @functools.cached_property
    def state(self) -> Mapping[int, int]:
        """By number of an argument that is neither: a weight of the same shape and dimensions."""
        if self.whole is not self:
            return self.whole.state
        kinds = {self.kind(n): n for n in sorted(self.weights, reverse=True)}
        others = [n for n in range(len(self.program.inputs)) if n not in self.weights | self.data]
        return {n: kinds[self.kind(n)] for n in others if self.kind(n)[0] and self.kind(n) in kinds}

    def kind(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and classes of the dimensions of an argument."""
        t = self.argument(number)
        return self.program.tensors[t].shape, self.classes.of(t)

    def _factors(self, op: Operator) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """For each operand of a product the classes of the dimensions that it keeps, and that it sums over."""
        rule = self.rules.of(op)
        kept, summed = [], []
        in_result = {f for r in (rule.results if rule else ()) for d in r for f in d}
        for atom, dims in zip(op.operands, rule.operands if rule else (), strict=False):
            own = () if isinstance(atom, Literal) else self.classes.of(atom)
            pairs = [(c, f[0]) for c, f in zip(own, dims, strict=True) if f]
            kept.append(tuple(c for c, f in pairs if f in in_result))
            summed.append(tuple(c for c, f in pairs if f not in in_result))
        return tuple(kept), tuple(summed)

    @functools.cached_property
    def weight_dims(self) -> list[WeightDims]:
        """The dimensions of every product with a weight, look-ups aside."""
        out = []
        for p in self.products:
            op = self.program.operators[p.op]
            if p.side is None or op.primitive == LOOKUP:
                continue
            kept, summed = self._factors(op)
            own, other = set(kept[p.side]), set(kept[1 - p.side])
            out.append(
                WeightDims(
                    p, tuple(c for c in kept[p.side] if c not in other), summed[p.side],
                    tuple(own & other), tuple(c for c in kept[1 - p.side] if c not in own),
                )
            )  # fmt: skip
        return out

    @functools.cached_property
    def of_activations(self) -> list[tuple[Product, tuple[int, ...]]]:
        """Products of activations (attention), with the dimensions that they share and the result keeps."""
        out = []
        for p in self.products:
            op = self.program.operators[p.op]
            if p.side is None and op.primitive in CONTRACTIONS:
                if op.primitive == ATTENTION:  # not positions, which queries and keys may have in common
                    own = self.classes.of(op.results[0])
                    shared = {*own[:-3], own[-2]}
                else:
                    kept, _ = self._factors(op)
                    shared = set(kept[0]) & set(kept[1])
                out.append((p, tuple(c for c in shared if c != self.batch)))
        return out

    @functools.cached_property
    def sequence_place(self) -> tuple[int, int] | None:
        """(tensor, dimension) of a value that has the sequence; None where the activations have the batch only."""
        if self.whole is not self:
            return self.whole.sequence_place
        rows: collections.Counter[int] = collections.Counter()
        for w in self.weight_dims:
            if self.program.operators[w.product.op].primitive == "dot_general":
                for c in set(w.rows) - {self.batch} - set(self.experts):
                    rows[c] += self.program.tensors[w.product.result].size
        if not rows:
            return None
        given = {c for n in self.data for c in self.classes.of(self.argument(n))} & set(rows)
        if given:  # tokens of an argument, before what a model makes of them (slots of experts)
            rows = collections.Counter({c: rows[c] for c in given})
        best = max(rows, key=lambda c: (rows[c], -c))
        return self.classes.members([best])[best][0]

    @functools.cached_property
    def sequence(self) -> int | None:
        """The class of the sequence."""
        place = self.sequence_place
        return None if place is None else self.classes.of(place[0])[place[1]]

    @functools.cached_property
    def experts(self) -> tuple[int, ...]:
        """Classes of experts."""
        found = {c for w in self.weight_dims for c in w.shared}
        return tuple(sorted(found - {self.batch}))

    @functools.cached_property
    def looked_up(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Classes of the dimensions of tables that data index, and of the tables' other dimensions."""
        index, features = set[int](), set[int]()
        for p in self.products:
            op = self.program.operators[p.op]
            if op.primitive == LOOKUP and not isinstance(op.operands[0], Literal):
                at = set(op.equation.params["dimension_numbers"].start_index_map)
                for d, c in enumerate(self.classes.of(op.operands[0])):
                    (index if d in at else features).add(c)
        return tuple(sorted(index)), tuple(sorted(features))

    @functools.cached_property
    def vocabulary(self) -> tuple[int, ...]:
        """Classes of vocabularies."""
        index, _ = self.looked_up
        made = {c for w in self.weight_dims for c in w.out}
        summed = {c for w in self.weight_dims for c in w.into}
        scored = self.reduced_by(_SOFTMAX) & made - summed - set(self.experts)
        table_sizes = set(self.sizes(index).values())
        returned = {
            c for i in self.program.outputs for a in self.program.operators[i].operands
            if not isinstance(a, Literal) and self.has_batch(a) for c in self.classes.of(a)
        }  # fmt: skip
        same_size = {c for c, size in self.sizes(returned & made - summed).items() if size in table_sizes}
        return tuple(sorted((set(index) | scored | same_size) - {self.batch}))

    def reduced_by(self, primitives: Iterable[str]) -> set[int]:
        """Classes over which some operators of the forward pass, other than products, go."""
        wanted, out = frozenset(primitives), set[int]()
        for op in self.program.operators:
            if op.primitive in wanted and is_forward(op):
                axes = op.equation.params.get(
                    "axes", op.equation.params.get("axis", op.equation.params.get("dimension"))
                )
                for a in op.operands[:1]:
                    if not isinstance(a, Literal) and axes is not None and self.has_batch(a):
                        own = self.classes.of(a)
                        out |= {own[d] for d in (axes if isinstance(axes, tuple) else (axes,))}
        return out

    @functools.cached_property
    def residual_stream(self) -> set[int]:
        """Classes of the residual stream: features of tables and data arguments, and carries of loops."""
        out = set(self.looked_up[1])
        for n in self.data:
            out |= set(self.classes.of(self.argument(n)))
        for op in self.program.operators:
            if op.kind in _CARRIES and is_forward(op):
                out |= {c for t in op.results if self.has_batch(t) for c in self.classes.of(t)}
        return out

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """Classes that one product with a weight makes and another sums over, in program order."""
        made = {c for w in self.weight_dims for c in w.out}
        summed = {c for w in self.weight_dims for c in w.into}
        others = {self.batch, self.sequence, *self.experts, *self.vocabulary} | self.residual_stream
        return tuple(sorted((made & summed) - others))

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """Inner classes that products of two activations share."""
        shared = {c for _, s in self.of_activations for c in s}
        return tuple(c for c in self.inner if c in shared)

    @functools.cached_property
    def stacked(self) -> set[int]:
        """Classes of dimensions over which loops take slices: stacked layers."""
        return {
            self.classes.of(op.operands[0])[0]
            for op in self.program.operators
            if op.kind == "scan_xs" and not isinstance(op.operands[0], Literal)
        }

    def sizes(self, classes: Iterable[int]) -> dict[int, int]:
        """The smallest size of a dimension of each class: the pieces into which it can be cut at most."""
        members = self.classes.members(tuple(classes))
        return {c: min(self.program.tensors[t].shape[d] for t, d in m) for c, m in members.items()}

    def covered(self, c: int) -> int:
        """Elements of the weights with a class."""
        return sum(math.prod(self.program.tensors[self.argument(n)].shape)
                   for n in self.weights if c in self.classes.of(self.argument(n)))  # fmt: skip

    def name(self, number: int) -> str:
        """The path of an argument."""
        return self.program.operators[self.program.inputs[number]].name
