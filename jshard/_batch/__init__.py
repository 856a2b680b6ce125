"""The batch factor of a traced program: what is per example, shared or a sum, and loops over pieces of the batch."""
