"""The proof: what the compiler really emitted, against what the plan predicted.

`read` turns a compiled program into collectives with bytes, `compare` holds them against a prediction, and
`verify_program` does both after checking that the program is the plan's own; `verify_plan` takes a `Plan`.
"""

from jshard._verify.compare import Verification, compare, hlo_shape, verify_program
from jshard._verify.emitted import KINDS, Emitted, EmittedProgram, wire_bytes
from jshard._verify.match import MatchedRow, Predicted
from jshard._verify.read_collectives import read_program
from jshard._verify.verify_plan import verify_plan


__all__ = [
    "KINDS",
    "Emitted",
    "EmittedProgram",
    "Predicted",
    "MatchedRow",
    "Verification",
    "compare",
    "hlo_shape",
    "read_program",
    "verify_plan",
    "verify_program",
    "wire_bytes",
]
