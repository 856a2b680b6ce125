"""Constants of loops that are made again in every iteration: cheap work on small values, moved into the loop's body.

Problem.  A mask or a fill value of full size is the same in all iterations, so JAX makes it once, before the loop: the
`-inf` of a masked softmax is then a tensor of batch x heads x length x length, alive from the first forward layer to the
last backward one. Written inside a body it fuses into its reader and takes no memory.

Idea.  From each constant of a scan the equations that make it are followed back, the largest operand first, as long as
that leaves less to keep. Where what is left is much smaller, the equations are written again in the body, which reads
what is left instead. Bodies of loops inside follow, so a value sinks through several loops.

>>> import jax, jax.numpy as jnp
>>> def f(x):
...     fill = jnp.full((64, 64), -1e30)
...     return jax.lax.scan(lambda c, _: (jnp.where(c > 0, c, fill), None), x, None, length=3)[0]
>>> closed = jax.make_jaxpr(f)(jnp.ones((64, 64)))
>>> [e.primitive.name for e in closed.jaxpr.eqns]
['broadcast_in_dim', 'scan']
>>> [e.primitive.name for e in with_constants_sunk(closed.jaxpr, lambda eqn: True).eqns]
['scan']

The same decision in XLA: `WhileLoopConstantSinking`, which moves constants and their broadcasts into loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import fresh, substituted, with_calls_inlined
from jshard._program.residuals import may_run_again, nbytes, variables
from jshard._program.traced_scan import is_plain_scan, traced_scan


_SMALLER = 8  # times at least, that what is read instead of a constant has fewer bytes
_MAX_EQUATIONS = 32  # that make one constant


def with_constants_sunk(jaxpr: Jaxpr, is_cheap: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """An open jaxpr whose scans make large constants themselves; the same where none does.

    `is_cheap`: whether an equation costs next to nothing where it is fused into its readers.
    """
    flat = with_calls_inlined(jaxpr)
    maker = {
        v: eqn
        for eqn in flat.eqns
        if is_cheap(eqn) and may_run_again(eqn) and len(eqn.outvars) == 1
        for v in eqn.outvars
    }
    eqns: list[JaxprEqn] = []
    changed = False
    for eqn in flat.eqns:
        new = _sunk(eqn, maker) if is_plain_scan(eqn) else [eqn]
        new = [with_bodies(e, lambda _, body: with_constants_sunk(body, is_cheap)) for e in new]
        changed = changed or new != [eqn]
        eqns += new
    return compat.without_dead_code(flat.replace(eqns=eqns)) if changed else jaxpr


def _sunk(scan: JaxprEqn, maker: Mapping[JaxprAtom, JaxprEqn]) -> list[JaxprEqn]:
    """Equations in place of a scan that make its constants in its body."""
    num_consts, num_carry = compat.scan_split(scan.params)
    body, _ = compat.open_jaxpr(scan.params["jaxpr"])
    found = {
        k: made for k, v in enumerate(scan.invars[:num_consts])
        if not compat.is_literal(v) and (made := _equations_of(v, maker)) is not None
    }  # fmt: skip
    if not found:
        return [scan]
    again = list({id(eqn): eqn for eqns in found.values() for eqn in eqns}.values())
    made = {v for eqn in again for v in eqn.outvars}
    entering = [v for v in dict.fromkeys(v for eqn in again for v in variables(eqn.invars)) if v not in made]
    inner = dict(zip(entering, fresh(entering), strict=True))
    written = []
    for eqn in again:
        operands, results = substituted(eqn.invars, inner), fresh(eqn.outvars)
        inner.update(zip(eqn.outvars, results, strict=True))
        written.append(eqn.replace(invars=operands, outvars=results))
    in_body = {body.invars[k]: inner[scan.invars[k]] for k in found}
    kept = [k for k in range(num_consts) if k not in found]
    new_body = body.replace(
        invars=[*(body.invars[k] for k in kept), *(inner[v] for v in entering), *body.invars[num_consts:]],
        outvars=substituted(body.outvars, in_body),
        eqns=[*written, *(e.replace(invars=substituted(e.invars, in_body)) for e in body.eqns)],
    )
    operands = [*(scan.invars[k] for k in kept), *entering, *scan.invars[num_consts:]]
    eqns, results = traced_scan(scan, new_body, len(kept) + len(entering), num_carry, operands)
    renamed = dict(zip(results, scan.outvars, strict=True))
    return [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in eqns]


def _equations_of(value: JaxprAtom, maker: Mapping[JaxprAtom, JaxprEqn]) -> Sequence[JaxprEqn] | None:
    """The equations that make a value of much smaller ones, in the order in which they run; None where none do."""
    taken: list[JaxprEqn] = []
    leaves: dict[JaxprAtom, None] = {value: None}
    best: int | None = None
    smallest = nbytes(value) / _SMALLER
    while len(taken) < _MAX_EQUATIONS:
        made = [v for v in leaves if v in maker]
        if not made:
            break
        v = max(made, key=nbytes)
        taken.append(maker[v])
        del leaves[v]
        leaves.update(dict.fromkeys(variables(maker[v].invars)))
        size = sum(map(nbytes, leaves))
        if size <= smallest:
            best, smallest = len(taken), size
    if best is None:
        return None
    return _in_order(taken[:best], value)


def _in_order(eqns: Sequence[JaxprEqn], value: JaxprAtom) -> list[JaxprEqn]:
    """Some equations in an order in which they can run, those that `value` needs."""
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    order: dict[int, JaxprEqn] = {}
    stack = [(value, False)]
    while stack:
        v, is_ready = stack.pop()
        if v not in maker or id(maker[v]) in order:
            continue
        if is_ready:
            order[id(maker[v])] = maker[v]
        else:
            stack.append((v, True))
            stack += [(u, False) for u in reversed(variables(maker[v].invars))]
    return list(order.values())
