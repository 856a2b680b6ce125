"""`python -m benchmarks.correctness.config_training`: every file of `examples/configs` trained 20 steps.

Each on a small model of its family in nnx, and a Llama in linen, unrolled and scanned: losses beside plain training, the
shardings of parameters and optimizer state as the file says; values and gradients beside plain ones, unrolled and
scanned, and the emitted collectives beside the planned ones. A sample is in `tests/config/test_example_configs.py`, whose
assertions this runs. Needs eight CPU devices: `XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

from __future__ import annotations

import time

from tests.config import test_example_configs as examples


def main() -> None:
    """Train by every file; an assertion fails where a file is not followed."""
    for name in examples.FAMILIES:
        begin = time.process_time()
        examples.test_training_by_a_file_is_plain_training(name)
        for scanned in (False, True):
            examples.test_values_and_gradients_by_a_file_are_the_plain_ones(name, scanned)
        seconds = time.process_time() - begin
        print(f"{name}: 20 losses, values, gradients equal; verified; {seconds:.0f} CPU seconds", flush=True)
    for scanned in (False, True):
        examples.test_a_linen_model_by_a_file(scanned)
        print(f"linen, {'scanned' if scanned else 'unrolled'}: equal to plain training", flush=True)


if __name__ == "__main__":
    main()
