"""What is installed and what it can do: versions, devices, ahead-of-time compilers, optional libraries."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform

import jax

from jshard._core import aot_devices
from jshard._core.text_width import wrapped


_LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "libtpu")
SUPPORTED_JAX = ((0, 10), (0, 13))
"""The first minor version of JAX that jshard supports, and the first one after them; as pyproject.toml has it."""
_OPTIONAL = {
    "flax": "flax", "libtpu": "tpu", "matplotlib": "report", "pandas": "report", "rich": "report", "yaml": "report",
}  # fmt: skip
"""Module -> the extra of jshard that installs it."""


@dataclasses.dataclass(frozen=True)
class Installation:
    """What was found.

    - `versions`: distribution -> version, None where it is not installed.
    - `devices`: platform -> devices that JAX has here.
    - `compilers`: machine kind -> whether plans for it compile here, with or without its devices.
    - `missing`: optional module -> what to install.
    - `problems`: what will not work, each with what to do.
    """

    python: str
    versions: tuple[tuple[str, str | None], ...]
    devices: tuple[tuple[str, int], ...]
    compilers: tuple[tuple[str, bool], ...]
    missing: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The same as nested dicts and lists, for JSON."""
        return {
            "python": self.python,
            "versions": dict(self.versions),
            "devices": dict(self.devices),
            "compilers": dict(self.compilers),
            "missing": dict(self.missing),
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        devices = ", ".join(f"{n} x {kind}" for kind, n in self.devices) or "none"
        lines = [
            f"Python {self.python}, " + ", ".join(f"{k} {v}" for k, v in self.versions if v),
            f"devices: {devices}",
            "compilers: " + ", ".join(f"{k} {'found' if ok else 'not found'}" for k, ok in self.compilers),
        ]
        lines += [f"not installed: {name} ({fix})" for name, fix in self.missing]
        lines += [f"problem: {p}" for p in self.problems] or ["no problem found"]
        return wrapped(lines)


def inspect_installation() -> Installation:
    """Look at what is installed; starts JAX's backend, changes nothing."""
    devices, problems = _devices()
    if not SUPPORTED_JAX[0] <= jax.__version_info__[:2] < SUPPORTED_JAX[1]:
        problems.append(
            f"JAX {jax.__version__} is not one that jshard was tried with: pip install '{jax_requirement()}'"
        )
    cuda = aot_devices.cuda_plugin_installed()
    compilers = (("cpu", True), ("tpu", aot_devices.installed("libtpu")), ("gpu", cuda))
    missing = [(m, extra) for m, extra in _OPTIONAL.items() if not aot_devices.installed(m)]
    if not cuda:
        missing.append(("jax-cuda12-plugin", "gpu"))
    return Installation(
        python=platform.python_version(),
        versions=tuple((name, _version(name)) for name in _LIBRARIES),
        devices=devices,
        compilers=compilers,
        missing=tuple((m, f"pip install 'jshard[{extra}]'") for m, extra in missing),
        problems=tuple(problems),
    )


def jax_requirement() -> str:
    """The versions of JAX that jshard supports, as pip writes them.

    >>> jax_requirement()
    'jax>=0.10,<0.13'
    """
    first, after = (".".join(map(str, v)) for v in SUPPORTED_JAX)
    return f"jax>={first},<{after}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[tuple[tuple[str, int], ...], list[str]]:
    """Devices by platform, and what keeps JAX from having any."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        return (), [f"JAX has no devices: {str(error).splitlines()[0]}"]
    kinds = dict.fromkeys(d.platform for d in found)
    counts = tuple((k, sum(d.platform == k for d in found)) for k in kinds)
    problems = []
    if counts == (("cpu", 1),):
        problems.append(
            "one CPU device: a plan can be made for any machine, but runs on one device; "
            'jax.config.update("jax_num_cpu_devices", 8) before the first use gives eight'
        )
    return counts, problems
