r"""Search: a pairwise cost network in, an assignment with its cost and a proved lower bound out; numpy alone.

Objective
    One state x_v for every variable v, of least

        E(x) = sum_v c_v(x_v) + sum_vw c_vw(x_v, x_w),      c in R and inf (forbidden),

    optionally with bytes b_h(x_v) over the live interval of each h: max_t sum of b_h(x_v) over h live at t <= limit.
    Pairwise cost networks are also called weighted constraint networks, factor graphs or MRFs.

Exact reductions (`exact/`)
    E is invariant under reparametrisation c_vw(a, b) - m(a), c_v(a) + m(a); this makes minima zero.
    A state b is removed if c_v(b) >= c_v(a) + sum_w max_s (c_vw(a, s) - c_vw(b, s)) for some a: dead-end elimination
    (Desmet et al. 1992, Goldstein 1994). A variable of degree at most two, and components of small joint tables, are
    eliminated: m(s, t) = min_a (c_vw(a, s) + c_v(a) + c_vu(a, t)), bucket elimination (Dechter 1999).

Dual bound (`dual/`)
    The linear relaxation over the local polytope (pairwise marginals y >= 0 that sum up to node marginals x,
    Schlesinger 1976, Werner 2007) has the dual

        max_m  sum_v min_a c_v^m(a) + sum_vw min_ab c_vw^m(a, b),
        c_v^m(a) = c_v(a) + sum_w m_wv(a),      c_vw^m(a, b) = c_vw(a, b) - m_wv(a) - m_vw(b).

    TRW-S (Kolmogorov 2006) ascends it one variable at a time. Min-marginals give reduced costs r_v(a): any x with
    x_v = a costs at least bound + r_v(a), so a is removed when that exceeds a known answer (reduced-cost fixing).
    Repeated layers are found by colour refinement (1-WL, Weisfeiler and Leman 1968) and solved as a short core first.

Answers (`primal/`)
    Rounding, iterated conditional modes (Besag 1986), exact moves on random induced forests (Hamze and de Freitas
    2004), and branch and bound (Land and Doig 1960) where a gap is left.

Memory (`memory/`)
    The limit is relaxed with a price l_t >= 0 per byte at each key time t (Held and Karp 1971, Polyak 1969):

        min E(x) within the limit  >=  max_l min_x [E(x) + sum_t l_t (bytes_t(x) - limit)].

    The least peak is a matrix game over the assignments of finite cost,

        min_x max_t bytes_t(x)  >=  max_w min_x sum_t w_t bytes_t(x),      w >= 0, sum_t w_t = 1,

    solved by cutting planes (Kelley 1960). Small cores become integer programs (HiGHS, Huangfu and Hall 2018), of
    larger ones the states of least reduced cost (kernel search, Angelelli et al. 2010).
"""

from jshard._search.cost_network import (
    LARGE_NETWORK,
    CostNetwork,
    Memory,
    Prices,
    Solution,
    build,
    evaluate,
    peak,
)
from jshard._search.cost_network_io import load, save
from jshard._search.effort import Effort
from jshard._search.exact.working_network import Contradiction
from jshard._search.search_state import Wanted
from jshard._search.solve import solve


__all__ = [
    "LARGE_NETWORK",
    "Contradiction",
    "CostNetwork",
    "Effort",
    "Memory",
    "Prices",
    "Solution",
    "Wanted",
    "build",
    "evaluate",
    "load",
    "peak",
    "save",
    "solve",
]
