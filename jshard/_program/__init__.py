"""A closed jaxpr -> the flat dataflow graph `Program`: operators and tensors, with their nesting beside."""
