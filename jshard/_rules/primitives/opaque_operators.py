"""Primitives that run replicated on purpose, each with the reason that reports print.

>>> print(OPAQUE["pure_callback"])
a Python callback sees whole arrays
"""

from __future__ import annotations

from jshard._rules.registry import OpView, family, opaque_rule
from jshard._rules.rule import Rule


rule = family("other")

OPAQUE: dict[str, str] = {
    "pure_callback": "a Python callback sees whole arrays",
    "io_callback": "a Python callback sees whole arrays, once",
    "debug_callback": "a Python callback sees whole arrays, once",
    "debug_print": "prints whole arrays, once",
    "inspect_sharding": "a callback that asks for the compiler's sharding",
    "ffi_call": "foreign code: nothing is known about it; give it a rule by jshard.op(rule=...)",
    "pallas_call": "a kernel: nothing is known about it; give it a rule by jshard.op(rule=...)",
    "custom_partitioning": "partitioned by a callback of the user's",
    "call_hi_primitive": "JAX hides what is inside",
    "call_exported": "an exported program: its shapes are fixed",
    "custom_linear_solve": "a solver between user functions, on whole systems",
    "linear_call": "a linear function and its transpose, by the user",
    "cudnn_fusion": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_bwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fp8_fwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fp8_bwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "scaled_matmul_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "maybe_set": "equinox: writes to a buffer by a predicate",
    "vprim": "equinox: a wrapper around another primitive",
}

_RULES_ELSEWHERE = ("debug_callback", "debug_print", "io_callback", "custom_linear_solve")
"""Opaque primitives with local implementations: `callbacks.py`, `linear_solve.py`."""


@rule(*(name for name in OPAQUE if name not in _RULES_ELSEWHERE))
def opaque_operator(op: OpView) -> Rule:
    """All operands and results replicated."""
    return opaque_rule(op, OPAQUE[op.primitive])
