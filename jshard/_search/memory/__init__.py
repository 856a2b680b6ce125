"""The memory limit and the least peak: a cost network with live intervals in, an assignment and a bound out."""
