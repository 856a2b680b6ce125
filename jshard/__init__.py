"""jshard: plan how a JAX function is cut over many devices, prove how good the plan is, and run exactly that."""

from jshard._api import ops as ops
from jshard._api.audit import audit as audit
from jshard._api.calibrate import calibrate as calibrate
from jshard._api.config import Config as Config
from jshard._api.op import op as op
from jshard._api.pareto import pareto as pareto
from jshard._api.plan import Plan as Plan
from jshard._api.policy import Policy as Policy
from jshard._api.recipes import recipes as recipes
from jshard._api.shard import Sharded as Sharded, shard as shard
from jshard._api.sweep import sweep as sweep
from jshard._core import hardware as hardware  # noqa: F401  the public name of the chip table
from jshard._core.errors import ShardError as ShardError
from jshard._core.named_topology import topology as topology
from jshard._core.padded_array import PaddedArray as PaddedArray
from jshard._core.version import VERSION
from jshard._rules.rule_text import register_rule as register_rule


__version__ = VERSION
