"""`op`: strategies of operators inside a function, like MindSpore's `Primitive.shard`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jshard._core.argument_checks import checked
from jshard._core.errors import StrategyError
from jshard._core.jax_types import Function, PyTree
from jshard._program.pin_primitives import pin_operand, pin_result
from jshard._rules.primitives.fused_operator import fused
from jshard._spec.entry import Pin, format_entry, looks_like_strategy, parse_entry
from jshard._spec.function_argument import check_function


@checked
def op(
    fn: Function,
    in_strategy: PyTree = None,
    out_strategy: PyTree = None,
    rule: str | None = None,
    *,
    reduction: tuple[str, ...] = (),
    sizes: dict[str, int] | None = None,
    work: float | None = None,
) -> Function:
    """Pin the operators that read the arguments of `fn`, for use inside a sharded function.

    >>> import jax.numpy as jnp, jshard
    >>> product = jshard.op(jnp.dot, in_strategy=((1, 1), None))
    >>> jshard.shard(lambda x, w: product(x, w) + 1)(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)

    Arguments:

    - `fn`: any function of arrays; outside a sharded function it runs unchanged.
    - `in_strategy`: one entry per argument: `None`, shards per dimension, or a `PartitionSpec`. It is the layout in which
        the operators that read the argument take it; the argument itself may have another layout.
    - `out_strategy`: one entry, or one per result: the layout in which the results are produced.
    - `rule`: makes `fn` one operator with these factors, `"b q h d, b k h d, b k h d -> b q h d"`. It runs on the local
        blocks, so it may contain a kernel. A factor that is in no result is not sharded, unless `reduction` names it:
        then the results of the blocks are summed. `sizes`: lengths of the factors in groups such as `(a b)`.
    - `work`: FLOPs of `fn` for each point of the product of all factors, for plans and for the FLOPs of the model. The
        attention above has two products, 4; a kernel that skips what causality masks, 2. Default: 2, or what `fn` traces
        to if that is more.

    Raises `StrategyError` when an entry does not fit its argument.
    """
    check_function(fn, "op")
    if isinstance(work, bool | str) or work is not None and not 0 <= work < math.inf:
        raise StrategyError(
            f"work is {work!r}",
            where="jshard.op",
            fix="FLOPs for each point of the factors, such as work=2.0",
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    if rule is not None:
        fn = functools.wraps(fn)(fused(fn, name, rule, reduction=tuple(reduction), sizes=sizes, work=work))

    @functools.wraps(fn)
    def pinned(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(name if name != "<lambda>" else "op"):
            out = fn(*_marked(args, in_strategy, f"in_strategy of op {name}", pin_operand), **kwargs)
            if out_strategy is None:
                return out
            if isinstance(out, tuple):
                return _marked(out, out_strategy, f"out_strategy of op {name}", pin_result)
            single = out_strategy[0] if _wrapped(out_strategy) else out_strategy
            return _marked((out,), (single,), f"out_strategy of op {name}", pin_result)[0]

    return pinned


def _wrapped(entries: object) -> bool:
    return isinstance(entries, tuple | list) and len(entries) == 1 and not isinstance(entries[0], int | None)


def _marked(values: tuple, entries: object, what: str, mark: Callable[[PyTree, Pin], jax.Array]) -> tuple:
    if entries is None:
        return values
    if looks_like_strategy(entries) or isinstance(entries, PartitionSpec):
        raise StrategyError(
            f"{what} is one entry, {format_entry(entries)}, not one entry per argument",
            where=what,
            fix=f"one entry per argument: ({', '.join([format_entry(entries), *['None'] * (len(values) - 1)])},)",
        )
    if not isinstance(entries, tuple | list) or len(entries) != len(values):
        count = len(entries) if isinstance(entries, tuple | list) else 1
        raise StrategyError(
            f"{what} has {count} entries for {len(values)} arguments",
            where=what,
            fix="one entry per argument, None for those to derive: " + repr((None,) * len(values)),
        )
    out = []
    for i, (x, entry) in enumerate(zip(values, entries, strict=True)):
        pin = None if entry is None else parse_entry(entry, jax.typeof(x).shape, f"{what}[{i}]")
        out.append(x if pin is None or pin.free else mark(x, pin))
    return tuple(out)
