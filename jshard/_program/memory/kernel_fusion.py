"""Kernels: how a compiler groups operators, and what each kernel moves and computes beside its products.

Problem.  A masked softmax is a dozen operators, and a compiled program passes three times over its array: what is
elementwise is computed inside the kernels that read it. Seconds charged an operator at a time would be those of a dozen
passes.

Idea.  Values that are not materialized (`liveness.py`) are computed in every kernel that reads them, so each operator
with a materialized result is the *root* of a kernel: it reads, once each, the materialized values from which its
operands are computed, and writes its results. Four refinements, read off the TPU compiler's fusions:

- What is computed from a product's result and needs nothing that is computed later runs in the product's kernel: an
  epilogue, the maxima of logits, an update of a weight; where a value on the way is resharded (a gradient that is summed
  over devices), it is a kernel of its own. The operands of a product are computed in its kernel too. Kernels of GPUs'
  libraries do neither, but for casts.
- Kernels over equally many elements that share an operand are one kernel with several results (the three results of an
  Adam update; the gradient's two sums of a layer norm), unless one needs what the other reduces.
- A view of a value (a reshape) is no kernel.
- A value is written once where the products that read it would read more bytes to compute it (`kernel_values.py`), or
  where several kernels would compute it from more than eight arrays (`fusion_limits.py`).

All is charged to the root, as bytes and elements that are divided as one of its operands or results is
(`_network/operator_cost.py`), epilogues to the way from product to root (`_network/epilogue_charges.py`): how a device
shares them depends on the candidate, which kernels there are does not.

Worked case.  `softmax(q @ k)`: the product writes the logits and their maxima, one kernel reads the logits and sums
exponentials, and the next product reads the logits once more and computes the probabilities as its operand.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda q, k, v: jax.nn.softmax((q @ k).astype("float32")).astype("bfloat16") @ v
>>> x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
>>> program = build(jax.make_jaxpr(f)(x, x, x), name="f", input_names=["q", "k", "v"])
>>> found = kernels(program)
>>> moved = [found.parts[op.id] + found.fused_parts(op.id) for op in program.operators]
>>> [(op.primitive, sum(p.nbytes for p in x) // 2**10) for op, x in zip(program.operators, moved) if x]
[('dot_general', 385.0), ('reduce_sum', 130.0), ('dot_general', 386.0)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping

import numpy as np

from jshard._program.graph import Literal, Operator, Program
from jshard._program.memory.fusion_limits import computed_from_many_arrays
from jshard._program.memory.fusion_traits import REDUCTION_PREFIXES
from jshard._program.memory.in_place import touched_operands
from jshard._program.memory.kernel_parts import Epilogue, KernelPart, Kernels, VectorWork
from jshard._program.memory.kernel_values import (
    VIEWS,
    stacked_values,
    stored_for_library,
    stored_for_products,
)
from jshard._program.memory.liveness import Liveness, liveness
from jshard._program.memory.unfusible import is_unfusible
from jshard._program.operators import PRODUCTS
from jshard._program.tail_primitives import MASK_TAIL, PAD_TAIL


_PARTIAL_READS = frozenset(("slice", "dynamic_slice", "gather", PAD_TAIL))  # of operand 0, what they return
# Computed by addresses alone.
_UNCOUNTED = VIEWS | frozenset(
    ("broadcast_in_dim", "transpose", "slice", "iota", "concatenate", "rev", MASK_TAIL)
)
_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p logistic tanh erf erfc erf_inv sqrt rsqrt cbrt div pow sin cos tan atan2 rem".split()
)
_FUSE_TRANSPOSE = frozenset(("dot_general", "conv_general_dilated"))  # can write their result transposed
_MOST_MEMBERS = 256  # beyond as many operators a value counts as read: no compiler makes larger kernels
_MOST_STEPS = 32  # from a product to an operator in its kernel
_LANES = 128


def kernels(program: Program, donated: Collection[int] = (), *, into_products: bool = True) -> Kernels:
    """The kernels of a program. Memoised.

    Arguments:

    - `donated`: flat indices of the donated arguments.
    - `into_products`: whether elementwise operators run in the kernels of products.
    """
    key = ("kernels", frozenset(donated), into_products)
    if key not in program.memo:
        live = liveness(program, donated)
        program.memo[key] = _Fusion(program, live, into_products).run()
    return program.memo[key]


@dataclasses.dataclass
class _Kernel:
    """A kernel without a product: its first root, the elements that it loops over, and what it reads and makes."""

    first: int
    size: int
    reads: set[int]
    makes: set[int]


class _LoopKernels:
    """The kernels without a product so far."""

    def __init__(self, fusion: _Fusion):
        self.fusion = fusion
        self.of_leaf: dict[int, _Kernel] = {}
        self.of_result: dict[int, _Kernel] = {}

    def enter(
        self, op: Operator, leaves: Mapping[int, float], size: int, reduces: bool
    ) -> tuple[_Kernel, dict[int, float], bool]:
        """Put a root into a kernel: that one, what is read in addition, and whether it is a new one."""
        joined = self.joined(op, leaves, size)
        known = joined.reads | joined.makes if joined else set()
        kernel = joined or _Kernel(op.id, size, set(), set())
        new = {t: part for t, part in leaves.items() if t not in known}
        kernel.reads |= set(leaves)
        if not reduces:
            kernel.makes |= set(op.results)
        self.of_leaf.update(dict.fromkeys(leaves, kernel))
        self.of_result.update(dict.fromkeys(op.results, kernel))
        return kernel, new, joined is None

    def joined(self, op: Operator, leaves: Mapping[int, float], size: int) -> _Kernel | None:
        """The kernel over as many elements that shares an operand and needs nothing that is computed after its start."""
        f = self.fusion
        for kernel in [self.of_result.get(t) or self.of_leaf.get(t) for t in leaves]:
            if kernel is None or kernel.size != size:
                continue
            same_loop = f.program.operators[kernel.first].repeat == op.repeat
            shared = {t for t in leaves if t in kernel.makes or t in kernel.reads}
            ready = all(f.def_op[t] < kernel.first or t in kernel.makes for t in leaves)
            if same_loop and ready and any(f.elements(t) >= size for t in shared):
                return kernel
        return None


class _Reads:
    """What the kernel of one root reads, by operand of the root: filled by `follow`."""

    def __init__(self, fusion: _Fusion, op: Operator):
        self.fusion, self.op = fusion, op
        self.through = fusion.live.traits.fuses_operands[op.id]
        self.leaves: dict[int, float] = {}  # tensor: part of it that is read
        self.product = -1  # whose result passes in registers, through operand `entered`
        self.entered = 0
        self.produced = -1  # that result
        # Of each tensor read: the operator that reads it, and that one's result on the way to the root (-1: it is the root).
        self.reader: dict[int, tuple[int, int]] = {}
        self.by_operand: dict[int, tuple[dict[int, float], VectorWork]] = {}
        self._seen: set[int] = set()

    def follow(self, operand: int) -> None:
        """Read an operand: itself if it is materialized, else all it is computed from."""
        f = self.fusion
        start = self.op.operands[operand]
        if isinstance(start, Literal):
            return
        leaves: dict[int, float] = {}
        self.reader.setdefault(start, (self.op.id, -1))
        simple, transcendental, stack = 0.0, 0.0, [(start, 1.0)]
        while stack:
            t, part = stack.pop()
            if t in self._seen:
                continue
            self._seen.add(t)
            maker = f.program.operators[f.def_op[t]]
            recomputed = self.through and f.live.duplicated_cast[t]
            if (f.stored[t] and not recomputed) or maker.kind != "eqn" or len(self._seen) > _MOST_MEMBERS:
                leaves[t] = part
            elif maker.primitive in PRODUCTS:
                self.product, self.entered, self.produced = maker.id, operand, t
            else:
                work, sources = f.whole(maker)
                simple += part * work.simple
                transcendental += part * work.transcendental
                for source, share in sources:
                    self.reader.setdefault(source, (maker.id, t))
                    stack.append((source, part * share))
        self.leaves.update(leaves)
        self.by_operand[operand] = (leaves, VectorWork(simple, transcendental))

    def way(self, tensor: int) -> list[tuple[int, int]]:
        """(tensor, reader) pairs from a tensor that is read to the root."""
        out = []
        while tensor >= 0:
            reader, after = self.reader[tensor]
            out.append((tensor, reader))
            tensor = after
        return out


class _Fusion:
    """Groups the operators of a program; used once."""

    def __init__(self, program: Program, live: Liveness, into_products: bool):
        self.program, self.live, self.into_products = program, live, into_products
        self.stored = list(live.materialized) if into_products else stored_for_library(program, live)
        self.stacked = stacked_values(program, live)
        for t in self.stacked:
            self.stored[t] = False
        for t in stored_for_products(program, self.stored) if into_products else ():
            self.stored[t] = True
        made = program.use_def.has_kind("eqn") & ~program.use_def.has_primitive(PRODUCTS)
        fused = made[program.use_def.def_op] & ~np.array(self.stored, dtype=bool)
        for t in computed_from_many_arrays(program, fused):
            self.stored[t] = True
        self.def_op = program.use_def.def_op.tolist()
        self.parts: list[list[KernelPart]] = [[] for _ in program.operators]
        self.written = [s or t in self.stacked for t, s in enumerate(self.stored)]
        self.launched = [False] * len(program.operators)
        self.epilogues: dict[int, list[Epilogue]] = {}
        self.read_beside: dict[int, set[int]] = {}  # a product: what its epilogues read
        self.product_of: dict[int, int] = {}  # tensor made in a product's kernel: the product
        self.path_to: dict[int, tuple[tuple[int, int], ...]] = {}  # such a tensor: the way from the product
        self.loops = _LoopKernels(self)
        self.updates = _LoopKernels(self)  # of stacks
        self.alone = _LoopKernels(self)  # of epilogues as kernels of their own
        self.padded: dict[tuple[int, ...], float] = {}
        self.wholes: dict[int, tuple[VectorWork, list[tuple[int, float]]]] = {}

    def run(self) -> Kernels:
        transposed = fused_transposes(self.program)
        for op in self.program.operators:
            if op.kind != "eqn" or op.id in transposed:
                continue
            if is_unfusible(op) or op.id in self.live.in_place:
                self.unfusible_root(op)
            elif any(self.written[r] for r in op.results):
                self.fusible_root(op)
        parts = [tuple(p) for p in self.parts]
        epilogues = {i: tuple(e) for i, e in self.epilogues.items()}
        ids: dict[Hashable, int] = {}
        key = [
            ids.setdefault((p, self.launched[i], tuple(e.fused for e in epilogues.get(i, ()))), len(ids))
            for i, p in enumerate(parts)
        ]
        return Kernels(parts, self.launched, epilogues, np.array(key, dtype=np.int64), transposed)

    def elements(self, tensor: int) -> float:
        """Elements of a tensor, its last dimension padded to whole vector registers."""
        shape = self.program.tensors[tensor].shape
        if shape not in self.padded:
            last = shape[-1] if shape else 1
            whole = -(-last // _LANES) * _LANES if last >= _LANES else last
            self.padded[shape] = float(math.prod(shape)) * whole / max(1, last)
        return self.padded[shape]

    def whole(self, op: Operator) -> tuple[VectorWork, list[tuple[int, float]]]:
        """The work of an operator's whole result, and its operands with the share of each that is read. Memoised."""
        known = self.wholes.get(op.id)
        if known is None:
            known = self.wholes[op.id] = self.work_of(op), self.sources(op)
        return known

    def work_of(self, op: Operator) -> VectorWork:
        """What an operator that is no reduction computes."""
        if op.primitive in _UNCOUNTED:
            return VectorWork()
        n = sum(self.elements(r) for r in op.results)
        return VectorWork(transcendental=n) if op.primitive in _TRANSCENDENTAL else VectorWork(simple=n)

    def sources(self, op: Operator) -> list[tuple[int, float]]:
        """The operands of an operator, and which share of each is read."""
        first = 1.0
        if op.primitive in _PARTIAL_READS and isinstance(op.operands[0], int):
            whole = self.program.tensors[op.operands[0]].size
            first = min(1.0, self.program.tensors[op.results[0]].size / whole) if whole else 1.0
        return [
            (a, first if k == 0 else 1.0) for k, a in enumerate(op.operands) if not isinstance(a, Literal)
        ]

    def nbytes(self, leaves: Mapping[int, float]) -> float:
        return sum(self.program.tensors[t].nbytes * part for t, part in leaves.items())

    def unfusible_root(self, op: Operator) -> None:
        """A product, a gather, an update: a kernel by itself, into which a product's operands fuse."""
        reads = _Reads(self, op)
        tensors = self.program.tensors
        self.launched[op.id] = True
        if op.id in self.live.in_place:
            stored = [k for k, a in enumerate(op.operands) if not isinstance(a, Literal)]
            for k in touched_operands(op, stored):
                if k in stored:  # a literal that is written is one number
                    self.add(op.id, False, k, self.nbytes({op.operands[k]: 1.0}))  # type: ignore[dict-item]
            return
        partial = op.primitive in _PARTIAL_READS
        for k in range(len(op.operands)):
            reads.follow(k)
        for k, (leaves, work) in reads.by_operand.items():
            if partial and k == 0 and tensors[op.results[0]].size < tensors[op.operands[0]].size:  # type: ignore[index]
                self.add(op.id, True, 0, tensors[op.results[0]].nbytes)
            else:
                self.add(op.id, False, k, self.nbytes(leaves), work)
        if op.primitive in PRODUCTS:
            self.product_of.update(dict.fromkeys(op.results, op.id))
        for k, r in enumerate(op.results):
            if self.stored[r]:
                self.add(op.id, True, k, tensors[r].nbytes, written=tensors[r].nbytes)

    def fusible_root(self, op: Operator) -> None:
        """The last operator of an elementwise chain, or a reduction."""
        reads = _Reads(self, op)
        for k in range(len(op.operands)):
            reads.follow(k)
        # Padding that is masked in memory is masked in the reader, which reads as many bytes.
        if op.primitive in VIEWS | {MASK_TAIL} and all(
            w == VectorWork() for _, w in reads.by_operand.values()
        ):
            return
        reduces = op.primitive.startswith(REDUCTION_PREFIXES)
        host = reads.product if reads.product >= 0 else self.product_before(op, reads)
        path = self.path_from(host, reads) if host >= 0 else ()
        if host >= 0 and len(path) <= _MOST_STEPS:
            self.into_product(op, host, path, reads, reduces)
        else:
            self.store_product(reads)
            self.loop_kernel(op, reads, reduces)

    def store_product(self, reads: _Reads) -> None:
        """Let a product whose result would pass in registers write it, and the root read it."""
        if reads.product < 0:
            return
        produced = self.program.operators[reads.product].results[0]
        if not self.written[produced]:
            self.written[produced] = True
            nbytes = self.program.tensors[produced].nbytes
            self.add(reads.product, True, 0, nbytes, written=nbytes)
        reads.by_operand[reads.entered][0][produced] = 1.0
        reads.leaves[produced] = 1.0

    def product_before(self, op: Operator, reads: _Reads) -> int:
        """The product in whose kernel a root runs, since all else that it needs is there before; -1 for none."""
        if not self.into_products:
            return -1
        last = max(
            [self.product_of[t] if t in self.product_of else self.def_op[t] for t in reads.leaves], default=-1
        )
        product = self.program.operators[last]
        return last if last >= 0 and product.primitive in PRODUCTS and product.repeat == op.repeat else -1

    def own_work(self, op: Operator, reads: _Reads, reduces: bool) -> tuple[VectorWork, float]:
        """What a root and the operators in its kernel compute, and the elements of its loop."""
        work = VectorWork()
        for _, w in reads.by_operand.values():
            work += w
        if not reduces:
            return work + self.work_of(op), max(self.elements(r) for r in op.results)
        over = [self.elements(a) for a in op.operands if not isinstance(a, Literal)]
        return work, max(over, default=1.0)

    def path_from(self, host: int, reads: _Reads) -> tuple[tuple[int, int], ...]:
        """The way from a product to a root that can run in its kernel."""
        if reads.product >= 0:
            return tuple(reads.way(reads.produced))
        made = [t for t in reads.leaves if self.product_of.get(t) == host]
        start = max(made, key=lambda t: self.program.tensors[t].size)
        return (*self.path_to.get(start, ()), *reads.way(start))

    def into_product(
        self, op: Operator, host: int, path: tuple[tuple[int, int], ...], reads: _Reads, reduces: bool
    ) -> None:
        """Make a root an epilogue of a product."""
        work, size = self.own_work(op, reads, reduces)
        read = self.read_beside.setdefault(host, set())
        others = self.nbytes(
            {t: p for t, p in reads.leaves.items() if self.product_of.get(t) != host and t not in read}
        )
        read |= set(reads.leaves)
        written = sum(self.program.tensors[r].nbytes for r in op.results if self.written[r])
        leaves = dict(reads.leaves)
        if reads.product >= 0:
            leaves[reads.produced] = 1.0
        _, new, launched = self.alone.enter(op, leaves, int(size), reduces)
        moved = self.nbytes(new) + written
        if reads.product >= 0 and reads.produced in new and not self.stored[reads.produced]:
            moved += self.program.tensors[reads.produced].nbytes  # the product writes it
        arrays = sum(self.elements(t) * part for t, part in new.items())
        arrays += sum(self.elements(r) for r in op.results if self.written[r])
        loop = VectorWork(arrays=arrays, loop=size if launched else 0.0)
        fused = KernelPart(
            True, 0, float(others + written), work + _reduction_work(op, size) if reduces else work
        )
        alone = KernelPart(True, 0, float(moved), work + loop)
        self.epilogues.setdefault(host, []).append(Epilogue(host, op.id, fused, alone, launched, path))
        if not reduces:
            self.product_of.update(dict.fromkeys(op.results, host))
            self.path_to.update(dict.fromkeys(op.results, path))

    def loop_kernel(self, op: Operator, reads: _Reads, reduces: bool) -> None:
        """Charge a root that is in no product's kernel: what it adds to a kernel that it joins, or all of its own."""
        _, size = self.own_work(op, reads, reduces)
        loops = self.loops if self.stacked.isdisjoint(op.results) else self.updates
        _, new, launched = loops.enter(op, reads.leaves, int(size), reduces)
        tensors = self.program.tensors
        for k, (leaves, work) in reads.by_operand.items():
            of_operand = {t: part for t, part in leaves.items() if t in new}
            arrays = sum(self.elements(t) * part for t, part in of_operand.items())
            self.add(op.id, False, k, self.nbytes(of_operand), work + VectorWork(arrays=arrays))
        main = next((k for k in reads.by_operand), 0)
        loop = VectorWork(loop=size if launched else 0.0)
        if reduces:
            self.add(op.id, False, main, 0.0, loop)
        else:
            self.add(op.id, True, 0, 0.0, loop + self.work_of(op))
        for k, r in enumerate(op.results):
            if self.written[r]:
                nbytes = tensors[r].nbytes
                self.add(op.id, True, k, nbytes, VectorWork(arrays=self.elements(r)), written=nbytes)
        self.launched[op.id] = launched

    def add(
        self,
        op: int,
        is_result: bool,
        index: int,
        nbytes: float,
        work: VectorWork | None = None,
        written: float = 0.0,
    ) -> None:
        """Charge bytes and elements to an operator."""
        work = work or VectorWork()
        if nbytes or work != VectorWork():
            self.parts[op].append(KernelPart(is_result, index, float(nbytes), work, float(written)))


def _reduction_work(op: Operator, size: float) -> VectorWork:
    """What a reduction of so many elements adds to a product's kernel.

    Registers are combined elementwise, but for the last dimension, whose elements are in one register.
    """
    last = len(op.equation.invars[0].aval.shape) - 1
    return VectorWork(reduced=size) if last in op.equation.params.get("axes", ()) else VectorWork(simple=size)


def fused_transposes(program: Program) -> frozenset[int]:
    """Operators: transpositions of a product's result that nothing else reads; the product writes them itself."""
    a = program.use_def
    num_uses = np.diff(a.uses_by_tensor[1])
    products = np.flatnonzero(a.has_primitive(_FUSE_TRANSPOSE))
    written = a.result[a.result_begin[products]]
    written = written[num_uses[written] == 1]
    order, begin = a.uses_by_tensor
    user = a.use_op[order[begin[written]]] if len(written) else written
    is_transpose = a.has_primitive(frozenset(("transpose",)))[user] & (
        a.repeat[user] == a.repeat[a.def_op[written]]
    )
    return frozenset(user[is_transpose].tolist())
