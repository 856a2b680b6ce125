"""What the processes of the tests run: every function is called in all of them, with the same arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec as P

import jshard
from jshard._api import plan_together
from jshard._core.errors import ProcessError


def digest(x: Any) -> str:
    """A hash of an array of all processes."""
    return hashlib.sha256(np.ascontiguousarray(gathered(x)).tobytes()).hexdigest()[:12]


def two_layers(p: Any, x: Any) -> Any:
    """A small network."""
    return jax.nn.relu(x @ p["in"]) @ p["out"]


def parameters(n: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"in": rng.normal(size=(n, 4 * n)).astype("f"), "out": rng.normal(size=(4 * n, n)).astype("f")}


def batch(rows: int = 32, n: int = 16, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, n)).astype("f")


def same_plan_and_results(level: int) -> Any:
    """Plan, run twice and verify: (plan, values, whether emitted as planned, exchanges)."""
    f = jshard.shard(two_layers, in_strategy=(None, (8, 1)), level=level)
    p, x = parameters(), batch()
    before = exchanges()
    y = f(p, x)
    again, after = f(p, x), exchanges()
    f(p, x)
    plan = f.plan(p, x, verify=True)
    same = digest(y) == digest(again)
    ok = plan.verification is not None and plan.verification.ok
    return [text_digest(plan.to_json()), digest(y), close(y, two_layers(p, x)), same, ok, after - before,
            exchanges() - after]  # fmt: skip


def exchanges() -> int:
    """How many exchanges this process has begun."""
    from jshard._core import jaxcompat as compat

    client: Any = compat.coordination_client()
    group = "-".join(map(str, range(jax.process_count())))
    return int(client.key_value_increment(f"jshard/{group}/count/{jax.process_index()}", 0))


def die(where: str, process: int = 1) -> Any:
    """One process ends by `os._exit` while it plans, or between two steps; the others go on."""
    dies = jax.process_index() == process

    def step(x: Any) -> Any:
        if dies and where == "planning":
            os._exit(3)
        return jnp.sin(x) @ x

    f = jshard.shard(step, in_strategy=((8 if jax.device_count() == 8 else jax.device_count(), 1),))
    x = batch(16)
    y = f(x)
    jax.block_until_ready(y)
    if dies:
        os._exit(3)
    return digest(f(x))


FAULTS = (
    "none", "shapes", "dtype", "name", "trace", "literal", "option", "host values", "raises in trace", "raises in search",
    "wrong call", "other version", "calls late",
)  # fmt: skip


def fault(kind: str, process: int = 1) -> Any:
    """A call in which one process differs; the seconds until this process has its error are in it."""
    differs = jax.process_index() == process
    x: Any = batch(24 if differs and kind == "shapes" else 16)
    if differs and kind == "dtype":
        x = x.astype(np.int32)
    if differs and kind == "host values":
        x = batch(16, seed=2)
    if differs and kind == "wrong call":
        x = "text"
    axis = 1 if differs and kind == "trace" else 0
    scale = float(differs) + 1.0 if kind == "literal" else 1.0

    def step(x: Any) -> Any:
        if differs and kind == "raises in trace":
            raise OSError("no file here")
        return jnp.cumsum(x @ x.T, axis=axis) * scale

    if differs and kind == "name":
        step.__name__ = "evaluate"
    config = {"process_seconds": 1.0} if kind == "calls late" else {}
    level = 2 if differs and kind == "option" else 0
    f = jshard.shard(step, in_strategy=((8, 1),), level=level, config=config)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        if differs and kind == "raises in search":
            stack.enter_context(replaced(plan_together, "plan_traced", fail))
        if differs and kind == "other version":
            stack.enter_context(replaced(plan_together, "VERSION", "0.0.9"))
        if differs and kind == "calls late":
            time.sleep(2.0)
        try:
            return [digest(f(x)), "", time.monotonic() - begun]
        except Exception as error:
            return [type(error).__name__, str(error), time.monotonic() - begun]


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the search met a bug")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value for a while, in this process."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def other_plan(seconds: float = 0.0) -> Any:
    """Process 1 is slow and finds another plan; both must run that of process 0."""
    original = plan_together.plan_traced

    def slow_and_different(traced: Any) -> Any:
        if jax.process_index() == 0 or traced.found is not None:
            return original(traced)
        time.sleep(seconds)
        request = dataclasses.replace(
            traced.request, options=dataclasses.replace(traced.request.options, search="propagation")
        )
        planned = original(dataclasses.replace(traced, request=request))
        return planned

    f = jshard.shard(two_layers, in_strategy=(None, (None, 2)), level=2)
    p, x = parameters(), batch()
    with replaced(plan_together, "plan_traced", slow_and_different):
        y = f(p, x)
    plan = f.plan(p, x)
    alternatives = len(plan.why(plan.inputs[0].path).alternatives)
    return [text_digest(plan.to_json()), digest(y), close(y, two_layers(p, x)), plan.search, alternatives > 0,
            plan.steps[-1]]  # fmt: skip


def searched_by_one(level: int, budget: int | None, mesh: str | None = None, chip: str | None = None) -> Any:
    """A search with memory: process 1 must not search at all."""
    original = plan_together.plan_traced

    def plan(traced: Any) -> Any:
        assert jax.process_index() == 0 or traced.found is not None, "process 1 searches"
        return original(traced)

    f = jshard.shard(two_layers, level=level, memory_budget=budget, mesh=mesh, hardware=chip)
    p, x = parameters(), batch()
    with replaced(plan_together, "plan_traced", plan):
        y = f(p, x)
    before = exchanges()
    f(p, x)
    found = f.plan(p, x)
    return [text_digest(found.to_json()), digest(y), close(y, two_layers(p, x)), exchanges() - before]


def planned_first(process: int) -> Any:
    """One process plans alone before all call: nothing waits, and the plan is one."""
    f = jshard.shard(two_layers, in_strategy=(None, (4, 2)))
    p, x = parameters(), batch()
    if jax.process_index() == process:
        f.plan(p, x)
    y = f(p, x)
    return [text_digest(f.plan(p, x).to_json()), digest(y)]


def under_transformations() -> Any:
    """Inlined into `jit`, differentiated and scanned."""
    f = jshard.shard(two_layers, in_strategy=(None, (8, 1)))
    p, x = parameters(), batch()

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(f(p, x) ** 2)

    def plain(p: Any, x: Any) -> Any:
        return jnp.mean(two_layers(p, x) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(loss))(p, x)
    wanted = jax.grad(plain)(p, x)
    ok = all(close(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True))
    return [digest(value), ok]


def containers() -> Any:
    """Arguments and results of every kind of container, donated and static ones."""

    @functools.partial(
        jshard.shard,
        in_strategy={"state": {"w": (2, 4)}},
        static_argnames=("kind",),
        donate_argnames=("state",),
    )
    def step(state: Any, pair: Any, *, scale: Any, kind: str) -> Any:
        new = {"w": state["w"] * scale + pair[0] @ pair[1], "n": state["n"] + 1}
        return new, (pair[1].sum(), [jnp.ones(3) if kind == "ones" else jnp.zeros(3)], None)

    state = {"w": jnp.ones((8, 8)), "n": jnp.int32(0)}
    for _ in range(3):
        state, rest = step(state, (batch(8, 4), batch(4, 8)), scale=np.float32(0.5), kind="ones")
    wanted = np.ones((8, 8), "f")
    for _ in range(3):
        wanted = wanted * 0.5 + batch(8, 4) @ batch(4, 8)
    return [
        digest(state["w"]),
        close(state["w"], wanted),
        int(state["n"]),
        digest(rest[1][0]),
        rest[2] is None,
    ]


def meshes() -> Any:
    """Two meshes in one program, one of them over the devices of process 0 alone."""
    devices = np.array(jax.devices())
    whole = jax.make_mesh((4, 2), ("a", "b"))
    mine = Mesh(devices[: jax.local_device_count()], ("x",))
    p, x = parameters(), batch()
    f = jshard.shard(two_layers, mesh=whole, in_strategy=(None, P("a")))
    g = jshard.shard(two_layers, mesh=mine, in_strategy=(None, P("x")))
    h = jshard.shard(
        two_layers, mesh=Mesh(devices[::-1][:8].reshape(2, 4), ("u", "v")), in_strategy=(None, P("v"))
    )
    out = [digest(f(p, x)), digest(h(p, x))]
    try:
        found = close(g(p, x), two_layers(p, x))
    except jshard.ShardError as error:
        found = str(error)
    return [out, found, close(f(p, x), two_layers(p, x)), len(f.plan(p, x).mesh.names)]


def close(x: Any, wanted: Any) -> bool:
    """Whether an array of all processes has these values."""
    return bool(np.allclose(gathered(x), np.asarray(wanted), rtol=1e-4, atol=1e-4))


def gathered(x: Any) -> np.ndarray:
    """The whole array, on this host."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows_here(whole: np.ndarray) -> np.ndarray:
    """This process's rows of a batch."""
    parts, me = jax.process_count(), jax.process_index()
    rows = len(whole) // parts
    return whole[me * rows : (me + 1) * rows]


def batch_network(p: Any, batch: Any) -> Any:
    return two_layers(p, batch["x"]) + batch["offset"]


def local_batches(cut: tuple[int, int]) -> Any:
    """Local rows in, the same results as of the whole batch."""
    f = jshard.shard(
        batch_network,
        in_strategy={"batch": {"x": tuple(cut), "offset": None}},
        config={"local_batch": ["batch"]},
    )
    p, x = parameters(), batch()
    given = {"x": rows_here(x), "offset": np.float32(2.0)}
    right = close(f(p, given), two_layers(p, x) + 2.0)
    after = exchanges()
    other = {"x": jnp.asarray(rows_here(batch(seed=5))), "offset": np.float32(1.0)}
    right_again = close(f(p, other), two_layers(p, batch(seed=5)) + 1.0)
    shapes = {r.path: list(r.shape) for r in f.plan(p, given).inputs}
    return [right, right_again, exchanges() - after, shapes["batch.x"]]


def wrong_local_batches() -> Any:
    """Batches of different sizes, and a name that no argument has."""
    rows = 16 if jax.process_index() == 0 else 12
    f = jshard.shard(batch_network, config={"local_batch": "batch"})
    found = []
    for function, x in (
        (f, batch(rows)),
        (jshard.shard(batch_network, config={"local_batch": ["btch"]}), batch()),
    ):
        try:
            found.append(digest(function(parameters(), {"x": x, "offset": np.float32(0)})))
        except jshard.ShardError as error:
            found.append(str(error))
    return found


def unequal_devices() -> Any:
    """Six devices, 4 + 2: (plan, whether all levels and meshes are right, local batches, a gradient from outside)."""
    p, x, size = parameters(24), batch(36, 24), jax.device_count()
    devices = np.array(jax.devices())
    wanted = two_layers(p, x)
    functions = [jshard.shard(two_layers, in_strategy=(None, (size, 1)), level=level) for level in (0, 1, 2)]
    functions.append(jshard.shard(two_layers, mesh="auto", memory_budget=10**9))
    for mesh in (jax.make_mesh((2, 3), ("a", "b")), Mesh(devices[[0, 1, 4, 5]].reshape(2, 2), ("a", "b"))):
        functions.append(jshard.shard(two_layers, mesh=mesh, in_strategy=(None, P("a"))))
    right = [close(f(p, x), wanted) for f in functions]
    plans = text_digest("".join(f.plan(p, x).to_json() for f in functions))
    f = jshard.shard(
        batch_network,
        in_strategy={"batch": {"x": (size, 1), "offset": None}},
        config={"local_batch": ["batch"]},
    )
    local = close(f(p, {"x": rows_here(x), "offset": np.float32(2.0)}), wanted + 2.0)
    me = jax.process_index()
    try:  # rows by devices: parts of different sizes
        refused = digest(f(p, {"x": np.split(x, [24])[me], "offset": np.float32(2.0)}))
    except jshard.ShardError as error:
        refused = str(error)
    loss = functools.partial(lambda f, p: jnp.mean(f(p, x) ** 2), functions[0])
    plain = functools.partial(lambda f, p: jnp.mean(f(p, x) ** 2), two_layers)
    pairs = zip(jax.tree.leaves(jax.grad(loss)(p)), jax.tree.leaves(jax.grad(plain)(p)), strict=True)
    return [plans, right, local, refused, all(close(a, b) for a, b in pairs)]


def arrays_of_all_processes() -> Any:
    """Arguments from `make_array_from_process_local_data`, in the planned sharding and in another."""
    x, p = batch(), parameters()
    mesh = jax.make_mesh((8,), ("d",))
    f = jshard.shard(two_layers, mesh=mesh, in_strategy=(None, P("d")))
    out = []
    for spec in (P("d"), P()):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        given = jax.make_array_from_process_local_data(sharding, rows_here(x) if spec else x, x.shape)
        out.append(close(f(p, given), two_layers(p, x)))
    y = f(p, given)
    return [*out, [len(y.addressable_shards), y.is_fully_addressable]]


def unchecked_host_arrays() -> Any:
    """The check of values on the host is switched off: what differs is the user's to know."""
    f = jshard.shard(two_layers, in_strategy=(None, (8, 1)), config={"check_host_arrays": False})
    y = f(parameters(), batch(seed=jax.process_index()))
    whole = np.concatenate([two_layers(parameters(), batch(seed=p))[16 * p : 16 * p + 16] for p in (0, 1)])
    return close(y, whole)


def train(**arguments: Any) -> Any:
    """Training of an nnx model; see `tests/hosts/training.py`."""
    from tests.hosts import training

    return training.train(**arguments)


def demo(steps: int, **config: Any) -> Any:
    """The example of several processes, on a small model: its losses."""
    from demo import chargpt
    from examples import several_processes

    return several_processes.train(chargpt.Config(**config), steps)


def gradient(what: str, **arguments: Any) -> Any:
    """A function that is differentiated from outside; see `tests/hosts/gradients.py`."""
    from tests.hosts import gradients

    return getattr(gradients, what)(**arguments)


def cached_program(folder: str) -> Any:
    """JAX's persistent cache of compiled programs: two results, and whether a second compilation added nothing."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    out, files = [], []
    for _ in range(2):
        f = jshard.shard(two_layers, in_strategy=(None, (2, 4)))
        out.append(close(f(parameters(), batch()), two_layers(parameters(), batch())))
        multihost_utils.sync_global_devices("compiled")
        files.append(len([name for name in os.listdir(folder) if "two_layers" in name]))
    jax.config.update("jax_compilation_cache_dir", None)
    return [*out, files[0] == files[1] > 0]


def fuzzed(seed: int, numbers: list[int], high: int = 40) -> Any:
    """Random programs, planned and run in all processes: number -> (plan, results); process 1 is slowed."""
    from tests.laws.fuzz_programs import axis_names, numbered_program

    found: dict[str, Any] = {}
    original = plan_together.plan_traced

    def slowed(traced: Any) -> Any:
        time.sleep(0.05 * jax.process_index())
        return original(traced)

    with replaced(plan_together, "plan_traced", slowed):
        for n in numbers:
            program = numbered_program(seed, n, high)
            size = int(np.prod(program.mesh))
            if size == 1:
                continue
            # Over some of the devices of every process.
            devices = np.array(jax.devices())[:: jax.device_count() // size][:size]
            mesh = Mesh(devices.reshape(program.mesh), axis_names(program.mesh))
            with jax.enable_x64(program.x64):
                try:
                    f = jshard.shard(
                        program.function(plain=False, mesh=mesh), program.in_strategy, program.out_strategy,
                        parameter_plan=program.parameter_plan or None, mesh=mesh, level=program.level,
                        search=program.search,
                    )  # fmt: skip
                    out = f(*program.arguments())
                    plan = f.plan(*program.arguments())
                    found[str(n)] = [text_digest(plan.to_json()), [digest(y) for y in jax.tree.leaves(out)]]
                except Exception as error:
                    # Where one process searches for all, the others quote its error.
                    text = f"{type(error).__name__}: {error}"
                    quoted = re.search(r"process 0: (.*)", text) if isinstance(error, ProcessError) else None
                    found[str(n)] = ["refused", (quoted[1] if quoted else text).splitlines()[0]]
    return found
