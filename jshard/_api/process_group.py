"""Exchanges between the processes of one program, through the coordination service of `jax.distributed`.

The service is a key-value store in process 0. An exchange is one round trip: every process gives a text, the first
process of the group decides on all of them, and its verdict is what every process gets. Texts may have any length, no
device takes part, and a process that fails says so instead of leaving the others in a collective. Exchanges have
numbers, counted by the service, so the first of one process meets the first of every other.

>>> class OneProcess(dict):
...     def key_value_increment(self, key, by):
...         self[key] = self.get(key, 0) + by
...         return self[key]
...     def key_value_set_bytes(self, key, value):
...         self[key] = value
...     def key_value_delete(self, key):
...         self.pop(key, None)
>>> exchange = ProcessGroup(OneProcess(), (0,), 0, seconds=1.0).next_exchange("f")
>>> exchange.number, exchange.collect("plan", "a", lambda texts: f"all sent {texts}")
(1, "all sent {0: 'a'}")
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import jax

from jshard._core import jaxcompat as compat
from jshard._core.errors import MeshError, ProcessError
from jshard._core.jax_types import Device
from jshard._core.messages import count_of


DEFAULT_SECONDS = 300.0
"""How long a process waits for the others to make the same call: as long as `jax.distributed.initialize` does."""

_POLL_SECONDS = 5.0
_LOG_AFTER = 4.0
_log = logging.getLogger("jshard")


class CoordinationClient(Protocol):
    """What is used of JAX's client of the coordination service."""

    def key_value_increment(self, key: str, by: int, /) -> int:
        """Add to the integer of a key, 0 at first; returns the sum."""
        ...

    def key_value_set_bytes(self, key: str, value: bytes, /) -> None:
        """Set the value of a new key."""
        ...

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int, /) -> bytes:
        """The value of a key, as soon as it is set; `jax.errors.JaxRuntimeError` after the time."""
        ...

    def key_value_delete(self, key: str, /) -> None:
        """Remove a key, and those below it where it is a folder."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessGroup:
    """The processes that own the devices of a mesh.

    - `processes`: their indices, ascending; the first decides. `me`: that of this process.
    - `seconds`: how long to wait for a process to make the same call.
    """

    client: CoordinationClient
    processes: tuple[int, ...]
    me: int
    seconds: float = DEFAULT_SECONDS

    @property
    def leader(self) -> int:
        """The process that decides."""
        return self.processes[0]

    @property
    def is_leader(self) -> bool:
        """Whether this process decides."""
        return self.me == self.leader

    @property
    def others(self) -> tuple[int, ...]:
        """The processes but the leader."""
        return self.processes[1:]

    def next_exchange(self, about: str) -> Exchange:
        """The next exchange of this group; `about`: the function that is planned, for messages."""
        folder = "jshard/" + "-".join(map(str, self.processes))
        number = int(self.client.key_value_increment(f"{folder}/count/{self.me}", 1))
        return Exchange(self, folder, number, about)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """One numbered exchange of a group; its keys are in a folder with its number, below that of the group."""

    group: ProcessGroup
    folder: str
    number: int
    about: str

    def collect(
        self,
        topic: str,
        mine: str,
        decide: Callable[[Mapping[int, str]], str],
        *,
        seconds: float | None = None,
    ) -> str:
        """The verdict of the leader on the texts of all processes, by process; the same in every process.

        `decide` runs in the leader only. `seconds`: how long to wait for another process; None: as long as it takes. A
        process that is gone, or late, is a `ProcessError`.
        """
        group = self.group
        if not group.is_leader:
            self._set(f"{topic}/{group.me}", mine)
            return self._get(f"{topic}/verdict", group.leader, seconds)
        texts = {group.leader: mine}
        texts |= {p: self._get(f"{topic}/{p}", p, seconds) for p in group.others}
        for number in range(max(1, self.number - 2), self.number):  # all processes are at this one
            group.client.key_value_delete(f"{self.folder}/{number}")
        verdict = decide(texts)
        if group.others:
            self._set(f"{topic}/verdict", verdict)
        return verdict

    def report(self, topic: str, text: str) -> None:
        """Give this process's text of a topic, again if need be, and do not wait; the verdict where it decides."""
        key = f"{topic}/{'verdict' if self.group.is_leader else self.group.me}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.group.client.key_value_delete(self._path(key))
        self._set(key, text)

    def _path(self, key: str) -> str:
        return f"{self.folder}/{self.number}/{key}"

    def _set(self, key: str, text: str) -> None:
        try:
            self.group.client.key_value_set_bytes(self._path(key), zlib.compress(text.encode(), 1))
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(self.group.leader, str(error)) from None

    def _get(self, key: str, process: int, seconds: float | None) -> str:
        begun, logged = time.monotonic(), False
        while True:
            waited = time.monotonic() - begun
            if seconds is not None and waited >= seconds:
                raise self._late(process, seconds)
            left = _POLL_SECONDS if seconds is None else min(_POLL_SECONDS, seconds - waited)
            try:
                client, milliseconds = self.group.client, max(1, int(1000 * left))
                value = client.blocking_key_value_get_bytes(self._path(key), milliseconds)
                return zlib.decompress(value).decode()
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._gone(process, str(error)) from None
            if not logged and time.monotonic() - begun > _LOG_AFTER:
                logged = True
                _log.warning(
                    "process %d waits for process %d to plan %s (plan %d of both) since %.0f s",
                    self.group.me, process, self.about, self.number, time.monotonic() - begun,
                )  # fmt: skip

    def _late(self, process: int, seconds: float) -> ProcessError:
        return ProcessError(
            f"process {process} did not call {self.about} within {seconds:g} s of process {self.group.me}",
            where=f"call of {self.about}, plan {self.number} of the processes {_list(self.group.processes)}",
            fix=f"the same calls in the same order in every process; the log of process {process} says where it is; "
            'config={"process_seconds": ...} for longer',
        )

    def _gone(self, process: int, reason: str) -> ProcessError:
        return ProcessError(
            f"process {process} cannot be reached: {reason.strip().splitlines()[0]}",
            where=f"call of {self.about}, plan {self.number} of the processes {_list(self.group.processes)}",
            fix=f"the log of process {process}, which ended or lost its network",
        )


def process_group(devices: Sequence[Device], about: str, seconds: float | None) -> ProcessGroup | None:
    """The processes of some devices, None where it is this process alone.

    Raises `MeshError` if this process has none of the devices: what it called cannot run here.
    """
    client = compat.coordination_client()
    if client is None or not devices:
        return None
    processes, me = tuple(sorted({d.process_index for d in devices})), jax.process_index()
    if me not in processes:
        raise MeshError(
            f"process {me} has none of the {count_of(len(devices), 'device')} that {about} is planned for: they "
            f"belong to {'process' if len(processes) == 1 else 'processes'} {_list(processes)}",
            where=f"call of {about}",
            fix="a mesh with devices of every process, or the call only where they are: "
            f"if jax.process_index() in {processes}",
        )
    if len(processes) == 1:
        return None
    chosen = DEFAULT_SECONDS if seconds is None else seconds
    return ProcessGroup(cast(CoordinationClient, client), processes, me, chosen)


_INITIALIZE = "jax.distributed.initialize()"
_INITIALIZE_BY_MPI = 'jax.distributed.initialize(cluster_detection_method="mpi4py")'
_COUNTS = {
    "SLURM_STEP_NUM_TASKS": _INITIALIZE,
    "OMPI_COMM_WORLD_SIZE": _INITIALIZE,
    "PMI_SIZE": _INITIALIZE_BY_MPI,
    "MEGASCALE_NUM_SLICES": _INITIALIZE,
}
"""Environment variables with the number of processes, or of slices: of Slurm's srun, Open MPI, MPICH, multislice TPUs; with
the call that joins these processes."""
_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
"""Environment variables with the hosts of a slice, in GKE."""


def cluster_of(environment: Mapping[str, str]) -> tuple[str, str]:
    """The variable that tells of several processes, as `NAME=value`, and the call that joins them; "" for none.

    What JAX reads is in `jax/_src/clusters`. Open MPI 5 has no `OMPI_MCA_orte_hnp_uri`, by which JAX knows Open MPI; of the
    pods of an indexed Kubernetes job, the first cannot tell from its environment that there are others.

    >>> cluster_of({"SLURM_STEP_NUM_TASKS": "8"})
    ('SLURM_STEP_NUM_TASKS=8', 'jax.distributed.initialize()')
    >>> cluster_of({"OMPI_COMM_WORLD_SIZE": "2"})[1]
    'jax.distributed.initialize(cluster_detection_method="mpi4py")'
    >>> cluster_of({"TPU_WORKER_HOSTNAMES": "a,b"})[0], cluster_of({"SLURM_STEP_NUM_TASKS": "1"})
    ('TPU_WORKER_HOSTNAMES=a,b', ('', ''))
    """
    for name, call in _COUNTS.items():
        if _number(environment.get(name)) > 1:
            is_open_mpi_5 = name.startswith("OMPI") and "OMPI_MCA_orte_hnp_uri" not in environment
            return f"{name}={environment[name]}", _INITIALIZE_BY_MPI if is_open_mpi_5 else call
    for name in _LISTS:
        if "," in environment.get(name, ""):
            return f"{name}={environment[name]}", _INITIALIZE
    index = environment.get("JOB_COMPLETION_INDEX")
    if "KUBERNETES_SERVICE_HOST" in environment and _number(index) > 0:
        return f"JOB_COMPLETION_INDEX={index}", _INITIALIZE
    return "", ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def warn_if_not_initialized(about: str, environment: Mapping[str, str]) -> None:
    """Warn where a cluster started several processes and JAX knows this one only."""
    cluster, call = cluster_of(environment)
    if cluster and compat.coordination_client() is None and jax.process_count() == 1:
        warnings.warn(
            f"{about} is planned for the devices of this process alone, and {cluster} says that there are more "
            f"processes: {call} before anything else that uses JAX joins them",
            stacklevel=2,
        )


def _list(numbers: Sequence[int]) -> str:
    if len(numbers) > 4 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
