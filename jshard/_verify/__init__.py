"""Verification: a compiled program and a plan in, the emitted collectives compared with the predicted ones out.

`read_program` reads the collectives of a compiled program, `compare` compares them with predictions, `verify_program`
does both after checking that the program belongs to the plan, and `verify_plan` takes the plan itself.
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
