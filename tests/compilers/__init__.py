"""Plans on the real TPU and GPU compilers; run by `make test-compilers`, not by `make test`."""
