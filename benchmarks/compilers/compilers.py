"""Run `tests/compilers` on the real TPU and GPU compilers, in an environment made for them.

`python benchmarks/compilers/compilers.py [tests ...]` makes `.venv-compilers` with JAX, libtpu and JAX's CUDA plugin
(200 MB of wheels, no driver and no device needed), pinned to the pair of versions that was tried with the
Python it runs on, and starts pytest there with what the compilers want in the environment.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys


ROOT = pathlib.Path(__file__).parents[2]

# Python -> JAX, Flax, libtpu, CUDA plugin: pairs that compile, tried as jax_facts.md section 6 says.
PINS = {
    (3, 11): ("jax==0.10.2", "flax==0.12.8", "libtpu==0.0.42.1", "jax-cuda12-{}==0.10.2"),
    (3, 12): ("jax==0.12.0.1", "flax==0.12.12", "libtpu==0.0.51", "jax-cuda13-{}==0.12.0.1"),
}
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "optax", "scipy")

# Set before Python starts, since the compilers read it when they load; see jshard/_core/named_topology.py.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}


def environment(where: pathlib.Path) -> pathlib.Path:
    """The Python of the environment at `where`, made when it is missing or pinned otherwise."""
    python, stamp = where / "bin" / "python", where / "pins"
    version = sys.version_info[:2]
    if version not in PINS:
        known = ", ".join(".".join(map(str, v)) for v in PINS)
        raise SystemExit(f"no compilers are pinned for Python {version[0]}.{version[1]}, only for {known}")
    jax, flax, libtpu, cuda = PINS[version]
    wanted = "\n".join((jax, flax, libtpu, cuda, *TOOLS))
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"== setting up {where}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(where)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, jax, flax, libtpu, *TOOLS], check=True)
    # Without the NVIDIA wheels: the compiler alone needs none of them.
    subprocess.run([*pip, "--no-deps", cuda.format("plugin"), cuda.format("pjrt")], check=True)
    stamp.write_text(wanted)
    return python


def main(arguments: list[str]) -> int:
    """Set up, and run the tests named or all of them."""
    version = ".".join(map(str, sys.version_info[:2]))
    where = pathlib.Path(os.environ.get("COMPILERS_VENV", ROOT / f".venv-compilers-{version}"))
    python = environment(where)
    print("== test-compilers: pytest tests/compilers", flush=True)
    command = [str(python), "-m", "pytest", "-q", *(arguments or ["tests/compilers"])]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
