"""One file per family of JAX primitives; importing a file registers its rules."""
