"""The rules of the primitives, a file a family."""
