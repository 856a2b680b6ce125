"""Interface: `shard`, `op`, `Plan`, `sweep`, `pareto`. Input: a function, strategies and options. Output: a sharded
function, its plans and executables."""
