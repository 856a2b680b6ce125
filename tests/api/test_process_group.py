"""`jax.distributed.initialize` forgotten: a warning where the environment tells of several processes, with the call."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest

import jshard


INITIALIZE = "jax.distributed.initialize()"
BY_MPI = 'jax.distributed.initialize(cluster_detection_method="mpi4py")'

CLUSTERS = {
    "Slurm": ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8", INITIALIZE),
    "Slurm over PMI": ({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}, "SLURM_STEP_NUM_TASKS=4", INITIALIZE),
    "Open MPI 4": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"},
        "OMPI_COMM_WORLD_SIZE=2", INITIALIZE,
    ),
    "Open MPI 5": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2", BY_MPI),
    "MPICH": ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "PMI_SIZE=3", BY_MPI),
    "slices": ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2", INITIALIZE),
    "GKE": ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, "TPU_WORKER_HOSTNAMES=a,b", INITIALIZE),
    "GKE by addresses": ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "TPU_PROCESS_ADDRESSES=a:1,b:1", INITIALIZE),
    "Kubernetes": (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3", INITIALIZE
    ),
}  # fmt: skip

ALONE = {
    "one task of Slurm": {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"},
    "tasks asked for, none started": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
    "one host of a TPU": {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"},
    "a pod of no indexed job": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    "an index elsewhere": {"JOB_COMPLETION_INDEX": "3"},
    "no number": {"PMI_SIZE": "two"},
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what the machine that runs the tests says of itself."""
    for _, (variables, _, _) in CLUSTERS.items():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("kind", CLUSTERS)
def test_the_warning_names_the_variable_and_the_call(environment: pytest.MonkeyPatch, kind: str) -> None:
    variables, named, call = CLUSTERS[kind]
    for name, value in variables.items():
        environment.setenv(name, value)

    def step(x: jnp.ndarray) -> jnp.ndarray:
        return x + 1

    with pytest.warns(UserWarning) as caught:
        assert float(jshard.shard(step)(jnp.zeros(8)).sum()) == 8
    assert [str(w.message) for w in caught] == [
        f"step is planned for the devices of this process alone, and {named} says that there are more processes: "
        f"{call} before anything else that uses JAX joins them"
    ]


@pytest.mark.parametrize("kind", ALONE)
def test_one_process_is_not_warned(environment: pytest.MonkeyPatch, kind: str) -> None:
    for name, value in ALONE[kind].items():
        environment.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(jshard.shard(lambda x: x + 1)(jnp.zeros(8)).sum()) == 8
