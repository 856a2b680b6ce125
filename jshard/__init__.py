"""jshard: plan how a JAX function is cut over many devices, prove how good the plan is, and run exactly that."""

from jshard import _hardware as hardware  # noqa: F401  the public name of the chip table
from jshard._doors import topology as topology
from jshard._errors import ShardError as ShardError
from jshard._op import op as op
from jshard._pareto import pareto as pareto
from jshard._plan.plan import Plan as Plan
from jshard._rules.einsum import register_rule as register_rule
from jshard._shard import Sharded as Sharded, shard as shard
from jshard._sweep import sweep as sweep


__version__ = "0.1.0"
