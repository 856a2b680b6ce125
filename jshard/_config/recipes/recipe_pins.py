"""A recipe as pins on the tensors of one program, or why it does not apply."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jshard._config.config_record import Entry
from jshard._config.recipes.attention_operands import attention_operands
from jshard._config.recipes.column_row import max_weight_independent_set
from jshard._config.recipes.gradients import gradients_of
from jshard._config.recipes.products import is_forward
from jshard._config.recipes.recipe_names import Axes, axes_of, parse_recipe
from jshard._config.recipes.structure import Structure
from jshard._core.errors import ShardError
from jshard._core.messages import abbreviate, count_of
from jshard._program.graph import Program


Sizes = Mapping[str, int]


class RecipeError(ShardError):
    """A recipe that does not apply to a program; `reason`: what was looked for, and where it failed."""

    def __init__(self, part: str, reason: str, *, where: str, fix: str):
        super().__init__(f"the recipe {part!r} does not apply: {reason}", where=where, fix=fix)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class ValueEntry:
    """The entry of a value inside the program, named by the weight whose product or gradient it is.

    `place`: (operator, number of the result), or of the operand if that is the `side`.
    """

    name: str
    place: tuple[int, int]
    shape: tuple[int, ...]
    entry: Entry
    side: str = "result"


@dataclasses.dataclass(frozen=True)
class RecipePins:
    """What a recipe says about a program: entries of arguments by number, of outputs of products, of gradients."""

    recipe: str
    arguments: Mapping[int, Entry]
    products: tuple[ValueEntry, ...]
    gradients: tuple[ValueEntry, ...]
    notes: tuple[str, ...] = ()


def recipe_pins(recipe: str, program: Program | Structure, sizes: Sizes | None) -> RecipePins:
    """The pins of a recipe on a mesh with axes of these sizes. Raises `RecipeError` where it does not apply."""
    parts = parse_recipe(recipe)
    if not sizes:
        raise ShardError(
            "a recipe cuts over the axes of a mesh, and there is none",
            where=f"recipe {recipe!r}",
            fix='a mesh: {"mesh": {"data": 2, "model": 4}} beside the recipe, or mesh=',
        )
    structure = program if isinstance(program, Structure) else Structure(program)
    return _Resolver(recipe, frozenset(p.name for p in parts), structure, axes_of(parts, sizes), sizes).pins()


@dataclasses.dataclass(frozen=True, eq=False)
class _Resolver:
    """One recipe on one program."""

    recipe: str
    parts: frozenset[str]
    s: Structure
    axes: Axes
    sizes: Sizes

    def pins(self) -> RecipePins:
        self._check()
        arguments: dict[int, Entry] = {}
        for n in range(len(self.s.program.inputs)):
            shape = self.s.program.tensors[self.s.argument(n)].shape
            if shape and n in self.s.data:
                entry = self._data(n)
            elif shape and (n in self.s.weights or n in self.s.state):
                entry = self.weight(n, "fsdp" in self.parts or n in self.s.state)
            else:
                continue
            if any(d is not None for d in entry):
                arguments[n] = entry
        products: dict[tuple[int, int], ValueEntry] = {}
        inside = {p.op for p, _ in self.s.of_activations}
        for p in self.s.products:
            shape = self.s.program.tensors[p.result].shape
            entry = self.activation(p.result, p.op in inside, p.op in self._routers)
            products.setdefault(p.place, ValueEntry(p.name, p.place, shape, entry))
        values = (*products.values(), *self._in_attention)
        return RecipePins(self.recipe, arguments, values, self._gradients(), tuple(self._notes()))

    # -- roles ----------------------------------------------------------------------------------------------

    def pieces(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    @functools.cached_property
    def batch(self) -> tuple[str, ...]:
        """The axes of the batch, as far as they divide it."""
        place = self.s.batch_place
        if place is None:
            return ()
        size = self.s.program.tensors[self.s.argument(place[0])].shape[place[1]]
        axes = self.axes.batch
        while axes and size % self.pieces(axes):
            axes = axes[:-1]
        return axes

    @functools.cached_property
    def vocabulary(self) -> frozenset[int]:
        """Vocabulary classes that the tensor axes divide."""
        if not self.axes.tensor:
            return frozenset()
        return frozenset(self._divided(self.tensor, self.tensor.vocabulary))

    @functools.cached_property
    def tensor(self) -> Structure:
        """The structure for cuts over the tensor axes."""
        return self.s.cut(self.pieces(self.axes.tensor))

    @functools.cached_property
    def inner(self) -> frozenset[int]:
        """Inner classes that are cut by columns and rows."""
        if "megatron" not in self.parts:
            return frozenset()
        s = self.tensor
        normalised = s.reduced_by(("reduce_sum", "reduce_max"))
        groups = [set(s.classes.of(s.argument(n))) for n in sorted(s.weights)]
        candidates = [
            c for c in self._divided(s, s.inner) if not any({c} <= g and g & self.vocabulary for g in groups)
        ]
        return frozenset(
            max_weight_independent_set(
                groups, {c: s.covered(c) * (0.5 if c in normalised else 1.0) for c in candidates}
            )
        )

    @functools.cached_property
    def experts(self) -> frozenset[int]:
        if not self.axes.expert:
            return frozenset()
        s = self.s.cut(self.pieces(self.axes.expert))
        return frozenset(self._divided(s, s.experts))

    @functools.cached_property
    def _routers(self) -> frozenset[int]:
        """Operators of the products that make a dimension of experts."""
        s = self.s.cut(self.pieces(self.axes.expert))
        return frozenset(w.product.op for w in s.weight_dims if self.experts & {*w.out})

    @functools.cached_property
    def _of_experts(self) -> frozenset[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes and dimensions of the weights that have the experts in common with an activation."""
        s = self.s.cut(self.pieces(self.axes.expert))
        own = [w.product.weights for w in s.weight_dims if self.experts & {*w.shared}]
        return frozenset(self.s.kind(n) for weights in own for n in weights)

    def _sizes(self, classes: Iterable[int]) -> list[int]:
        """The distinct sizes of dimensions, ascending."""
        return sorted(set(self.s.sizes(classes).values()))

    def _divided(self, s: Structure, classes: Sequence[int]) -> list[int]:
        members = s.classes.members(classes)
        n = s.classes.pieces
        return [c for c in classes if all(s.program.tensors[t].shape[d] % n == 0 for t, d in members[c])]

    # -- entries --------------------------------------------------------------------------------------------

    def _assign(
        self, tensor: int, roles: Sequence[tuple[Structure, frozenset[int | None], tuple[str, ...]]]
    ) -> list[tuple[str, ...]]:
        """The axes of each dimension: every role cuts the first free dimension of its classes over axes still free."""
        dims: list[tuple[str, ...]] = [()] * self.s.program.tensors[tensor].ndim
        used: set[str] = set()
        for s, classes, axes in roles:
            left = tuple(a for a in axes if a not in used)
            for d, c in enumerate(s.classes.of(tensor)):
                if left and c in classes and not dims[d]:
                    dims[d] = left
                    used |= set(left)
                    break
        return dims

    def activation(self, tensor: int, inside: bool = False, scores: bool = False) -> Entry:
        """The entry of a value of the forward pass; `inside`: it is made of two activations, as in attention.

        `scores`: it is the output of a product that makes the experts' dimension (a router's), which is not cut there.
        """
        over_sequence = self.s.cut(self.pieces(self.axes.sequence))
        heads: frozenset[int | None] = frozenset()
        tokens: frozenset[int | None] = frozenset((over_sequence.sequence,))
        if inside and "ulysses" in self.parts:
            heads, tokens = frozenset(over_sequence.heads), frozenset()
        over_experts, over_batch = (
            self.s.cut(self.pieces(self.axes.expert)),
            self.s.cut(self.pieces(self.batch)),
        )
        roles = (
            (over_experts, frozenset() if scores else self.experts, self.axes.expert),
            (self.tensor, self.inner | self.vocabulary, self.axes.tensor),
            (over_batch, frozenset((over_batch.batch,)), self.batch),
            (over_sequence, heads | tokens, self.axes.sequence),
        )
        return tuple(self._assign(tensor, roles))

    def _data(self, number: int) -> Entry:
        s = self.s.cut(self.pieces(self.batch))
        dims = self._assign(self.s.argument(number), ((s, frozenset((s.batch,)), self.batch),))
        return tuple(d or None for d in dims)

    def weight(self, number: int, fully_sharded: bool) -> Entry:
        """The entry of a weight, its gradient or its moments; `fully_sharded`: also cut over the axes of ZeRO."""
        t = self.s.argument(number)
        experts = self.experts if self.s.kind(number) in self._of_experts else frozenset()
        dims = self._assign(
            t,
            (
                (self.s.cut(self.pieces(self.axes.expert)), experts, self.axes.expert),
                (self.tensor, self.inner | self.vocabulary, self.axes.tensor),
            ),
        )
        shape, stacked = self.s.program.tensors[t].shape, self.s.stacked
        free = tuple(a for a in self.axes.zero if not any(a in d for d in dims))
        own = self.s.classes.of(t)
        for d in sorted(range(len(dims)), key=lambda d: -shape[d]) if fully_sharded and free else ():
            if not dims[d] and own[d] not in stacked and shape[d] % self.pieces(free) == 0:
                dims[d] = free
                break
        return tuple(dims)

    @functools.cached_property
    def _in_attention(self) -> tuple[ValueEntry, ...]:
        """Queries and keys of attention operators: with `ring` cut by positions, if these are the sequence's; with
        `ulysses` by heads."""
        by_heads = "ulysses" in self.parts
        if not by_heads and "ring" not in self.parts:
            return ()
        out = []
        for a in attention_operands(self.s):
            if by_heads or a.positions == (self.s.sequence, self.s.sequence):
                shape = self.s.program.tensors[a.tensor].shape
                entry = self.activation(a.tensor, by_heads)
                out.append(ValueEntry(a.name, (a.op, a.operand), shape, entry, "operand"))
        return tuple(out)

    def _gradients(self) -> tuple[ValueEntry, ...]:
        if not self.parts & {"zero1", "zero2"}:
            return ()
        out = []
        for n, place in sorted(gradients_of(self.s).items()):
            shape = self.s.program.tensors[self.s.argument(n)].shape
            out.append(ValueEntry(self.s.name(n), place, shape, self.weight(n, "zero2" in self.parts)))
        return tuple(out)

    # -- whether it applies ---------------------------------------------------------------------------------

    def _refuse(self, part: str, reason: str, fix: str) -> None:
        axes = {
            "expert": self.axes.expert,
            "sequence": self.axes.sequence,
            "ulysses": self.axes.sequence,
            "ring": self.axes.sequence,
        }.get(part, self.axes.tensor if part in ("megatron", "vocab") else self.axes.zero or self.axes.batch)
        over = " x ".join(f"{a}={self.sizes[a]}" for a in axes)
        raise RecipeError(
            part,
            reason,
            where=f"recipe {self.recipe!r} for {self.s.program.name}, {part} over {over or 'no axis'}",
            fix=fix,
        )

    def _check(self) -> None:
        if not self.s.products:
            self._refuse(
                sorted(self.parts)[0],
                "no product of a weight with a value per example among "
                f"{count_of(len(self.s.program.operators), 'operator')}",
                "a function that calls the model on a batch",
            )
        for part, checks in _CHECKS.items():
            for check in checks if part in self.parts else ():
                check(self)

    def _check_batch(self) -> None:
        place = self.s.batch_place
        assert place is not None
        if self.axes.batch and not self.batch:
            name = self.s.name(place[0])
            size = self.s.program.tensors[self.s.argument(place[0])].shape[place[1]]
            pieces = self.pieces(self.axes.batch[:1])
            fix = f"a batch of {-(-size // pieces) * pieces}"
            inside = [
                p for p in ("megatron", "sequence", "vocab", "expert", "ulysses", "ring") if p in self.parts
            ]
            if inside:
                fix += f", or {'+'.join(inside)!r} alone"
            self._refuse(
                next(p for p in ("data", "zero1", "zero2", "fsdp") if p in self.parts),
                f"the batch, dimension {place[1]} of {name}, has size {size}, which {pieces} does not divide "
                "(recipes do not pad it)",
                f'{fix}, or in place of the recipe a cut of that argument with config={{"pad": True}}',
            )

    def _check_fully_sharded(self) -> None:
        part = next(p for p in ("fsdp", "zero1", "zero2") if p in self.parts)
        over = self.s.weights if part == "fsdp" else frozenset(self.s.state)
        if not over:
            reason = (
                "no argument has the shape and dimensions of a weight beside the weights themselves: there is no state "
                "of an optimizer"
            )
            fix = "data for a loss, or the whole training step with the optimizer's state as an argument"
            if part == "fsdp":
                reason = (
                    "no weight is known: no argument is the operand of a product beside values with the batch"
                )
                fix = "data, or cuts of single arguments: config={'parameters': ...}"
            self._refuse(part, reason, fix)
        if all(self.weight(n, True) == self.weight(n, False) for n in over):
            self._refuse(
                part,
                f"none of {count_of(len(over), 'tensor')} has a free dimension that {self.pieces(self.axes.zero)} divides",
                "fewer devices on that axis, or data",
            )

    def _check_megatron(self) -> None:
        if not self.inner and not self.vocabulary:
            self._refuse("megatron", self._inner_text(), "an axis of another size, or fsdp")

    def _inner_text(self) -> str:
        found, n = self.s.sizes(self.s.inner), self.pieces(self.axes.tensor)
        if not found:
            return (
                "no dimension is made by one product with a weight and summed over by another (looked at "
                f"{count_of(len(self.s.weight_dims), 'product')})"
            )
        texts = [f"{size} of {self._weights_of(c)}" for c, size in found.items()]
        return f"no dimension between two products is divided by {n}: {abbreviate(texts, 4)}"

    def _weights_of(self, c: int) -> str:
        names = [self.s.name(n) for n in sorted(self.s.weights) if c in self.s.classes.of(self.s.argument(n))]
        return abbreviate(names, 2)

    def _check_sequence(self) -> None:
        part = next(p for p in ("sequence", "ulysses", "ring") if p in self.parts)
        place = self.s.sequence_place
        if place is None:
            self._refuse(
                part, "the activations have no dimension beside batch and features", "data, fsdp or megatron"
            )
            return
        size, n = self.s.program.tensors[place[0]].shape[place[1]], self.pieces(self.axes.sequence)
        if size % n:
            self._refuse(
                part, f"the sequence has {size} positions, which {n} does not divide", "a padded sequence"
            )

    def _check_ulysses(self) -> None:
        n = self.pieces(self.axes.sequence)
        if not self.s.of_activations:
            self._refuse("ulysses", "there is no attention: no product of two activations", "sequence")
        if not self._divided(self.s.cut(n), self.s.cut(n).heads):
            self._refuse(
                "ulysses",
                f"{_texts(self._sizes(self.s.heads))} heads are not divided by {n}"
                if self.s.heads
                else "no dimension is one of heads: shared by two activations, and "
                "made and summed over by products with weights",
                "sequence, or an axis that divides the heads",
            )

    def _check_attention_operator(self) -> None:
        if not attention_operands(self.s):
            self._refuse(
                "ring",
                "keys and values are passed round by an attention operator, and this program has none",
                "jshard.ops.attention in place of the products of the attention; sequence and ulysses work on these",
            )

    def _check_ring(self) -> None:
        if any(v.entry[-3] != self.axes.sequence for v in self._in_attention):
            self._refuse(
                "ring",
                f"{' and '.join(sorted(self.parts - {'ring'}))} cuts attention over {', '.join(self.axes.sequence)}, on "
                "which positions would be cut",
                "an axis of its own: megatron(a)+ring(b)",
            )
        if not self._in_attention:
            found = attention_operands(self.s)
            lengths = [
                f"{self.s.program.tensors[q.tensor].shape[-3]} x {self.s.program.tensors[k.tensor].shape[-3]}"
                for q, k in zip(found[::2], found[1::2], strict=True)
                if is_forward(self.s.program.operators[q.op])
            ]
            self._refuse(
                "ring",
                f"no attention has the sequence of the activations as its queries and as its keys: of "
                f"{count_of(len(lengths), 'attention operator')} (queries x keys) {abbreviate(sorted(set(lengths)))}",
                "sequence, which cuts the queries and gathers the keys",
            )

    def _check_vocab(self) -> None:
        found = self.s.vocabulary
        if not found:
            self._refuse(
                "vocab",
                "no table is indexed by data, and no softmax goes over the output of a product with a weight",
                "megatron or fsdp",
            )
        if not self.vocabulary:
            n, sizes = self.pieces(self.axes.tensor), self._sizes(found)
            padded = [-(-size // n) * n for size in sizes]
            self._refuse(
                "vocab",
                f"a vocabulary of {_texts(sizes)} is not divided by {n}",
                f"a vocabulary padded to {_texts(padded)} (jshard.flax.pad_vocabulary)",
            )

    def _check_expert(self) -> None:
        found = self.s.experts
        if not found and any(op.primitive.startswith("ragged_dot") for op in self.s.program.operators):
            self._refuse(
                "expert",
                "experts of jax.lax.ragged_dot are groups of rows, which stay whole",
                "megatron or fsdp",
            )
        if not found:
            self._refuse(
                "expert",
                "there are no experts: no product whose weight and activation share a dimension that neither sums over "
                f"(looked at {count_of(len(self.s.weight_dims), 'product')})",
                "a recipe without expert",
            )
        if not self.experts:
            n = self.pieces(self.axes.expert)
            self._refuse(
                "expert",
                f"{_texts(self._sizes(found))} experts are not divided by {n}",
                "another axis",
            )

    def _notes(self) -> list[str]:
        out = []
        if self.batch != self.axes.batch:
            out.append(f"the batch is cut over {', '.join(self.batch) or 'no axis'} only, which divide it")
        if "megatron" in self.parts:
            n = self.pieces(self.axes.tensor)
            left = [size for size in self._sizes(self.s.heads) if size % n]
            if left:
                out.append(f"{_texts(left)} heads are not divided by {n}: left whole")
        if self.axes.tensor:
            n = self.pieces(self.axes.tensor)
            left = [size for size in self._sizes(self.s.vocabulary) if size % n]
            if left:
                out.append(f"a vocabulary of {_texts(left)} is left whole")
        return out


def _texts(sizes: Sequence[int]) -> str:
    return abbreviate(list(map(str, sizes)))


_CHECKS: Mapping[str, tuple[Callable[[_Resolver], None], ...]] = {
    "data": (_Resolver._check_batch,),
    "zero1": (_Resolver._check_batch, _Resolver._check_fully_sharded),
    "zero2": (_Resolver._check_batch, _Resolver._check_fully_sharded),
    "fsdp": (_Resolver._check_batch, _Resolver._check_fully_sharded),
    "megatron": (_Resolver._check_megatron,),
    "sequence": (_Resolver._check_sequence,),
    "ulysses": (_Resolver._check_sequence, _Resolver._check_ulysses),
    "ring": (_Resolver._check_attention_operator, _Resolver._check_sequence, _Resolver._check_ring),
    "vocab": (_Resolver._check_vocab,),
    "expert": (_Resolver._check_expert,),
}
"""What is checked for each recipe, in this order."""
