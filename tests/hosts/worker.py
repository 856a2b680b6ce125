"""One process of a program of several: joins the others, then runs the jobs that it reads, a line of JSON each.

    python -m tests.hosts.worker PORT PROCESSES PROCESS DEVICES [HEARTBEAT SECONDS]

A job is the name of a function of `tests/hosts/jobs.py`, with arguments as JSON; its result, or the error that it
raised, goes to the standard output as one line after `RESULT`.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    port, processes, process, devices, *heartbeat = map(int, sys.argv[1:])
    # As in `conftest.py`: what counts is the time to compile.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, process,
        **({"heartbeat_timeout_seconds": heartbeat[0], "shutdown_timeout_seconds": heartbeat[0]} if heartbeat else {}),
    )  # fmt: skip
    from tests.hosts import jobs

    print("RESULT", json.dumps({"value": [jax.device_count(), jax.process_index()]}), flush=True)
    for line in sys.stdin:
        job, arguments = json.loads(line)
        try:
            out = {"value": getattr(jobs, job)(**arguments)}
        except Exception as error:
            out = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT", json.dumps(out), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
