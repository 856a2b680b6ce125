"""Starts the processes of a program on this machine, and gives them jobs (`tests/hosts/jobs.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]


class Processes:
    """Processes that run `tests/hosts/worker.py`, with different hash seeds."""

    def __init__(self, count: int, devices: Sequence[int], heartbeat: int | None = None):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[queue.Queue[str | None]] = []
        self.logs: list[list[str]] = []
        self.threads: list[threading.Thread] = []
        for p in range(count):
            command = [sys.executable, "-m", "tests.hosts.worker", *map(str, (port, count, p, devices[p]))]
            environment = os.environ | {"PYTHONHASHSEED": str(p + 1), "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                command + ([str(heartbeat)] if heartbeat else []), cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            self.processes.append(process)
            self.lines.append(queue.Queue())
            self.logs.append([])
            for read in (self._read, self._read_log):
                self.threads.append(threading.Thread(target=read, args=(p,), daemon=True))
                self.threads[-1].start()

    def _read(self, p: int) -> None:
        out = self.processes[p].stdout
        assert out is not None
        for line in out:
            if line.startswith("RESULT "):
                self.lines[p].put(line.removeprefix("RESULT "))
        self.lines[p].put(None)

    def _read_log(self, p: int) -> None:
        err = self.processes[p].stderr
        assert err is not None
        self.logs[p].extend(err)

    def start(self, p: int, job: str, **arguments: Any) -> None:
        """Give one process a job."""
        stdin = self.processes[p].stdin
        assert stdin is not None
        stdin.write(json.dumps([job, arguments]) + "\n")
        stdin.flush()

    def result(self, p: int, seconds: float = 120.0) -> dict[str, Any]:
        """The result of one process: `value`, or `error`, or `ended` with its exit code."""
        line = self.lines[p].get(timeout=seconds)
        if line is None:
            return {"ended": self.processes[p].wait(10), "log": "".join(self.logs[p][-30:])}
        return json.loads(line)

    def results(
        self, job: str, *, only: Sequence[dict[str, Any]] = (), **arguments: Any
    ) -> list[dict[str, Any]]:
        """The results of a job in all processes; `only`: further arguments of each process."""
        for p in range(len(self.processes)):
            self.start(p, job, **arguments, **(only[p] if only else {}))
        return [self.result(p) for p in range(len(self.processes))]

    def values(self, job: str, **arguments: Any) -> list[Any]:
        """The values of a job in all processes, which must not raise."""
        found = self.results(job, **arguments)
        assert all("value" in f for f in found), found
        return [f["value"] for f in found]

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self.threads:
            thread.join()
        for process in self.processes:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            process.stderr.close()
