"""A loop over layers as a loop over ticks, in which every stage runs its layers on one microbatch and passes it on.

Method.  The values that pass from stage to stage have the stages as dimension 0; a tick is the stage's layers under `vmap`
over it, then one `stage_shift`. Cut over a mesh axis, each device has one stage, and the shift is one permute (GSPMD: Xu et
al. 2021, section 3.3). Sums over examples are added up over the ticks, and stay partial sums over the mesh until the loop
ends. What a stage computes in an idle tick is selected away; it computes on real microbatches, so that nothing overflows.

Results per example of a forward loop that only its backward loop reads stay as the ticks wrote them (`Ticks`): the backward
loop goes through the ticks in reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.batch_class import SHARED, SUM, BatchClass
from jshard._batch.body_classes import Analysis
from jshard._batch.loop_parts import LoopParts
from jshard._batch.pieces import Pieces, Values, assembled
from jshard._batch.pipeline_shape import PipelineShape
from jshard._core.jax_types import JaxprAtom
from jshard._program.stage_shift import add_to_round, rounded_sum, stage_shift, sum_dtype, zero_unless


Arrays = tuple[jax.Array, ...]
CutStages = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Ticks:
    """A result per example as ticks wrote it, (ticks, layers of a stage, stages, piece); `kind` is that of a layer's."""

    array: jax.Array
    shape: PipelineShape
    layers: int
    kind: BatchClass

    def fits(self, shape: PipelineShape, layers: int, kind: BatchClass) -> bool:
        """Whether another loop's ticks read it as it is."""
        return (self.shape, self.layers, self.kind) == (shape, layers, kind)

    def whole(self) -> jax.Array:
        """The result of all layers on the whole batch."""
        s, r, m = self.shape.stages, self.shape.rounds, self.shape.microbatches
        own = _own_ticks(self.array, 2, self.shape)  # (stages, ticks, layers, piece)
        split = own.reshape((s, r, m, *own.shape[2:]))
        by_piece = jnp.transpose(
            split, (2, 1, 0, *range(3, split.ndim))
        )  # (pieces, rounds, stages, layers, piece)
        stack = by_piece.reshape((m, -1, *by_piece.shape[4:]))
        return assembled(stack, self.kind.moved(1))[: self.layers]


@dataclasses.dataclass(frozen=True, eq=False)
class TickLoop:
    """A loop over layers in parts, with the shape of its pipeline; `cut_stages` constrains dimension 0 of a value."""

    parts: LoopParts
    shape: PipelineShape
    analysis: Analysis
    cut_stages: CutStages

    @property
    def layers_each(self) -> int:
        """Layers of a stage in one round."""
        return self.shape.layers_each(self.parts.layers)

    @property
    def entry(self) -> int:
        """The stage at which microbatches enter."""
        return self.shape.stages - 1 if self.parts.reverse else 0

    def run(
        self, shared: Mapping[JaxprAtom, jax.Array], stacks: Mapping[JaxprAtom, jax.Array],
        ticks: Mapping[JaxprAtom, jax.Array], moving: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[Ticks], list[jax.Array]]:  # fmt: skip
        """The carries that move, results per example and sums of `parts`, all for the whole batch.

        Arguments, by the body's variables: `shared` is read by every layer, `stacks` has an element for each layer,
        `ticks` one for each tick, layer of a stage and stage; `moving` are the initial values of the carries.
        """
        shape, parts = self.shape, self.parts
        staged = {v: self._by_stage(x) for v, x in stacks.items()}
        kinds = [parts.classes[parts.carries[j]] for j in parts.moving]
        zero = jnp.zeros((), jnp.int32)
        first = [self._piece(x, c, zero) for x, c in zip(moving, kinds, strict=True)]
        none = [self.cut_stages(jnp.zeros((shape.stages, *x.shape), x.dtype)) for x in first]
        unread = parts.added
        added = [j in unread for j in parts.moving]
        sent = [(x, c) for x, c, is_added in zip(moving, kinds, added, strict=True) if not is_added]
        start = tuple(
            self.cut_stages(jnp.broadcast_to(x, (shape.stages, *x.shape))) for x in _others(first, added)
        )
        waiting = tuple(self._waiting(x, c) for x, c in sent) if shape.rounds > 1 else ()
        totals = tuple(self._total(v) for v in parts.sums)

        def tick(
            carry: tuple[Arrays, Arrays, Arrays], xs: tuple[jax.Array, Arrays]
        ) -> tuple[tuple[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
            state, waiting, totals = carry
            t, pieces = xs
            entering, waiting = self._entering(t, state, waiting, sent)
            each = iter(entering)
            entering = tuple(z if is_added else next(each) for z, is_added in zip(none, added, strict=True))
            moved, examples, addends = self._stages(
                t, entering, shared, staged, dict(zip(ticks, pieces, strict=True))
            )
            totals = tuple(self._added(total, x, t) for total, x in zip(totals, addends, strict=True))
            return (_others(moved, added), waiting, totals), (moved, examples)

        every = jnp.arange(shape.ticks, dtype=jnp.int32)
        (_, _, totals), (states, examples) = lax.scan(
            tick, (start, waiting, totals), (every, tuple(ticks.values())), reverse=parts.reverse
        )
        return (
            [
                initial + self._collected(x, c) if is_added else self._left(x, c)
                for initial, x, c, is_added in zip(moving, states, kinds, added, strict=True)
            ],
            [Ticks(x, shape, parts.layers, parts.classes[v]) for v, x in zip(parts.examples, examples, strict=True)],
            [self._finished(x, v) for v, x in zip(parts.sums, totals, strict=True)],
        )  # fmt: skip

    # -- layers and stages -------------------------------------------------------------------------------------------

    def _by_stage(self, x: jax.Array) -> jax.Array:
        """A stack over layers as (rounds, layers of a stage, stages, ...); with one round, without that dimension."""
        shape, k = self.shape, self.layers_each
        more = shape.padded(self.parts.layers) - x.shape[0]
        if more:
            x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (more, *x.shape[1:]))])
        split = x.reshape((shape.rounds, shape.stages, k, *x.shape[1:]))
        out = jnp.swapaxes(split, 1, 2)
        return out[0] if shape.rounds == 1 else out

    def _stages(
        self, t: jax.Array, state: Arrays, shared: Mapping[JaxprAtom, jax.Array], staged: Mapping[JaxprAtom, jax.Array],
        pieces: Mapping[JaxprAtom, jax.Array],
    ) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
        """All stages of a tick: what moves on, results per example and addends, (layers of a stage, stages, ...)."""
        shape = self.shape
        names, own_names = tuple(staged), tuple(pieces)

        def stage(
            number: jax.Array, state: Arrays, stacks: Arrays, own: Arrays
        ) -> tuple[Arrays, Arrays, Arrays]:
            position, _ = self._position(t, number)
            first = (
                lax.div(position, jnp.int32(shape.microbatches)) * shape.stages + number
            ) * self.layers_each
            piece = lax.rem(position, jnp.int32(shape.microbatches))
            return self._layers(
                piece, first, state, shared, dict(zip(names, stacks, strict=True)),
                dict(zip(own_names, own, strict=True)),
            )  # fmt: skip

        numbers, stacks = jnp.arange(shape.stages, dtype=jnp.int32), tuple(staged.values())
        if shape.rounds > 1:
            rounds = lax.div(self._position(t, numbers)[0], jnp.int32(shape.microbatches))
            stacks = tuple(_of_rounds(x, rounds) for x in stacks)
        return jax.vmap(stage, in_axes=(0, 0, 1, 1), out_axes=(0, 1, 1))(
            numbers, state, stacks, tuple(pieces.values())
        )

    def _position(self, t: jax.Array, stage: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """What a stage works on at a tick, in range; and whether it does."""
        p = t - stage
        return jnp.clip(p, 0, self.shape.positions - 1), (p >= 0) & (p < self.shape.positions)

    def _layers(
        self, piece: jax.Array, first: jax.Array, state: Arrays, shared: Mapping[JaxprAtom, jax.Array],
        stacks: Mapping[JaxprAtom, jax.Array], own: Mapping[JaxprAtom, jax.Array],
    ) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
        """The layers of a stage, from number `first` on, on a piece of the batch."""
        k, parts = self.layers_each, self.parts
        names, own_names = tuple(stacks), tuple(own)

        def layer(
            state: Arrays, xs: tuple[jax.Array, Arrays, Arrays]
        ) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            number, slices, pieces = xs
            moved, examples, sums = self._layer(
                piece, state, {**shared, **dict(zip(names, slices, strict=True))}, dict(zip(own_names, pieces, strict=True))
            )  # fmt: skip
            if self.shape.padded(parts.layers) != parts.layers:
                is_layer = first + number < parts.layers
                moved = tuple(jnp.where(is_layer, a, b) for a, b in zip(moved, state, strict=True))
            return moved, (examples, sums)

        numbers = jnp.arange(k, dtype=jnp.int32)
        xs = numbers, tuple(stacks.values()), tuple(own.values())
        if k == 1:
            state, ys = layer(state, jax.tree.map(lambda x: x[0], xs))
            examples, sums = jax.tree.map(lambda x: x[None], ys)
        else:
            state, (examples, sums) = lax.scan(layer, state, xs, reverse=parts.reverse)
        return state, examples, sums

    def _layer(
        self, piece: jax.Array, state: Arrays, whole: Mapping[JaxprAtom, jax.Array], own: Mapping[JaxprAtom, jax.Array]
    ) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
        """One layer on a piece of the batch."""
        parts = self.parts
        values: Values = {(v, SHARED): x for v, x in whole.items()}
        values.update(((v, parts.classes[v]), x) for v, x in own.items())
        carries = [parts.carries[j] for j in parts.moving]
        values.update(((v, parts.classes[v]), x) for v, x in zip(carries, state, strict=True))
        pieces = Pieces(self.analysis, self.shape.microbatches, piece)
        read = pieces.run(parts.steps, parts.classes, values)
        moved = tuple(read(parts.carried[j], parts.classes[parts.carries[j]]) for j in parts.moving)
        examples = tuple(read(v, parts.classes[v]) for v in parts.examples)
        return moved, examples, tuple(read(v, SUM) for v in parts.sums)

    # -- what enters and leaves --------------------------------------------------------------------------------------

    def _piece(self, x: jax.Array, c: BatchClass, index: jax.Array) -> jax.Array:
        return Pieces(self.analysis, self.shape.microbatches, index).converted(x, c)

    def _waiting(self, x: jax.Array, c: BatchClass) -> jax.Array:
        """(microbatches, stages, piece): what enters the first stage in the next round; at first, all pieces."""
        shape = self.shape
        pieces = jnp.stack([self._piece(x, c, jnp.int32(m)) for m in range(shape.microbatches)])
        return jnp.broadcast_to(pieces[:, None], (shape.microbatches, shape.stages, *pieces.shape[1:]))

    def _entering(
        self, t: jax.Array, state: Arrays, waiting: Arrays, sent: Sequence[tuple[jax.Array, BatchClass]]
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        """What every stage works on: what the stage before has passed on, and new microbatches at the entry."""
        shape, back = self.shape, self.parts.reverse
        shifted = [stage_shift(self.cut_stages(x), -1 if back else 1, wrap=shape.rounds > 1) for x in state]
        position, _ = self._position(t, self.entry)
        piece = lax.rem(position, jnp.int32(shape.microbatches))
        if shape.rounds == 1:
            new = [self._piece(x, c, piece)[None] for x, c in sent]
        else:
            arrived = t + 1 if back else t - shape.stages  # its position, one round before
            slot = lax.rem(jnp.clip(arrived, 0, shape.positions - 1), jnp.int32(shape.microbatches))
            has_arrived = (arrived >= 0) & (arrived < shape.positions)
            waiting = tuple(
                lax.dynamic_update_index_in_dim(
                    w,
                    jnp.where(has_arrived, x, lax.dynamic_index_in_dim(w, slot, 0, keepdims=False)),
                    slot,
                    0,
                )
                for w, x in zip(waiting, shifted, strict=True)
            )
            new = [lax.dynamic_index_in_dim(w, piece, 0, keepdims=False) for w in waiting]
        enters = jnp.arange(shape.stages) == self.entry
        out = tuple(
            self.cut_stages(jnp.where(enters.reshape(-1, *(1,) * (x.ndim - 1)), n, x))
            for n, x in zip(new, shifted, strict=True)
        )
        return out, waiting

    def _left(self, states: jax.Array, c: BatchClass) -> jax.Array:
        """The values of the last stage after its last round, of the whole batch; `states` has every tick's."""
        shape = self.shape
        begin = 0 if self.parts.reverse else shape.positions - shape.microbatches + shape.stages - 1
        last = states[begin : begin + shape.microbatches]
        mine = jnp.arange(shape.stages) == shape.stages - 1 - self.entry
        mine = mine.reshape(1, -1, *(1,) * (last.ndim - 2))
        if last.dtype == bool:
            return assembled(jnp.any(last & mine, 1), c)
        return assembled(jnp.sum(jnp.where(mine, last, jnp.zeros_like(last)), 1, dtype=last.dtype), c)

    def _collected(self, states: jax.Array, c: BatchClass) -> jax.Array:
        """What the stages add in all rounds to a value per example that none of them reads; `states` has every tick's."""
        shape = self.shape
        own = _own_ticks(states, 1, shape)
        by_round = own.reshape((shape.stages, shape.rounds, shape.microbatches, *own.shape[2:]))
        return assembled(jnp.sum(by_round, (0, 1), dtype=states.dtype), c)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _total(self, v: JaxprAtom) -> jax.Array:
        shape = self.shape
        rounds = (shape.rounds,) if shape.rounds > 1 else ()
        return jnp.zeros((*rounds, self.layers_each, shape.stages, *v.aval.shape), sum_dtype(v.aval.dtype))

    def _added(self, total: jax.Array, addend: jax.Array, t: jax.Array) -> jax.Array:
        """A total with the addends of a tick: those of stages that work, in their round, whose part is updated in place."""
        shape, addend = self.shape, addend.astype(total.dtype)
        stages = jnp.arange(shape.stages, dtype=jnp.int32)
        position, works = self._position(t, stages)
        if shape.rounds == 1:
            return total + zero_unless(addend, jnp.broadcast_to(works, addend.shape[:2]))
        none = jnp.int32(shape.rounds)  # out of range: dropped
        at = jnp.where(works, lax.div(position, jnp.int32(shape.microbatches)), none)
        return add_to_round(total, addend, at)

    def _finished(self, total: jax.Array, v: JaxprAtom) -> jax.Array:
        """The sum of every layer, in its own dtype before it moves: over the mesh, and between the stages."""
        sums = rounded_sum(total, v.aval.dtype)
        split = sums[None] if self.shape.rounds == 1 else sums
        by_layer = jnp.swapaxes(split, 1, 2)  # (rounds, stages, layers of a stage, ...)
        return by_layer.reshape((-1, *by_layer.shape[3:]))[: self.parts.layers]


def _others(xs: Sequence[jax.Array], left_out: Sequence[bool]) -> Arrays:
    return tuple(x for x, out in zip(xs, left_out, strict=True) if not out)


def _own_ticks(x: jax.Array, dim: int, shape: PipelineShape) -> jax.Array:
    """(stages, positions, ...): the ticks, dimension 0 of `x`, in which each stage works; `dim`: the stages."""
    return jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, shape.positions, 0))(
        jnp.moveaxis(x, dim, 0), jnp.arange(shape.stages, dtype=jnp.int32)
    )


def _of_rounds(x: jax.Array, rounds: jax.Array) -> jax.Array:
    """(layers, stages, ...) of `x` (rounds, layers, stages, ...): each stage's in its round, (stages,).

    >>> _of_rounds(jnp.arange(8).reshape(2, 2, 2), jnp.array([1, 0])).tolist()
    [[4, 1], [6, 3]]
    """
    layers, rest = x.shape[1], x.shape[3:]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0, *range(2, x.ndim - 1)), collapsed_slice_dims=(0,), start_index_map=(0,),
        operand_batching_dims=(2,), start_indices_batching_dims=(0,),
    )  # fmt: skip
    return lax.gather(x, rounds[:, None], numbers, (1, layers, 1, *rest), mode="clip")
