"""A jaxpr -> a flat dataflow graph of operators and tensors."""
