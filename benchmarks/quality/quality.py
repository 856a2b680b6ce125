"""Estimated step time of jshard's plans, hand annotations and XLA's propagation, all compiled by one compiler.

`python benchmarks/quality/quality.py [--only WORKLOAD ...] [--on v5e:2x4 ...] [--contenders NAME ...]` compiles every
contender for real TPU topologies without a device, reads the compiled program, appends a line of JSON to
`benchmarks/quality/quality.jsonl` and writes `benchmarks/quality/quality.md` anew. `--budget CONTENDER` adds jshard
under a `memory_budget` of that contender's compiled peak, as `jshard<=CONTENDER`.

Contenders:

- `jshard`: the batch is cut, all else is derived (level 2);
- `xla-batch`: the same and no more, by XLA's own propagation;
- `xla-plan`: the plan's input and output shardings, by XLA's propagation;
- hand annotations, with constraints on the activations: `data`, `fsdp`, `megatron` (data x tensor),
  `megatron-all` (tensor parallel on all devices), `fsdp-megatron`, `sequence` (megatron with the tokens cut
  between products), `vocab` (FSDP with vocabulary cut), `experts` (FSDP with experts cut).

All get the batch cut over all devices, as the batch strategy says: a plan that wants another layout reshards it itself.

Estimated time of a step, the same for all, without overlap, by two formulas:

    by bytes: max(FLOPs / peak, cycles / clock) + wire bytes / bandwidth
    by links: max(FLOPs / peak, cycles / clock) + seconds of each collective on the links that it can use

FLOPs, cycles (the TPU compiler's own estimates, collectives left out by it) and wire bytes received per device
are read from the compiled program; peak and link bandwidth are of the hardware table. By bytes, bandwidth is
that of one link for each dimension of the torus, since slices of 2x4 and 4x8 have no wrap links: as if every byte
could use all of them. By links (`benchmarks/quality/wires.py`) a collective uses those of the torus axes that its group
extends along, as jax-ml/scaling-book `sharding.md` has it, and an all-to-all is bound by the middle of its axis.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar


ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from benchmarks.compilers import fidelity, kept_rows  # noqa: E402


RESULTS, TABLE = HERE / "quality.jsonl", HERE / "quality.md"
MACHINES = ("v5e:2x4", "v5e:4x8")
T = TypeVar("T")
CLOCK = {
    "tpu-v5e": 1.5e9
}  # bf16 peak / (4 matrix units x 128 x 128 x 2 operations), docs.cloud.google.com/tpu/docs/v5e

HAND: dict[str, tuple[str, ...]] = {
    "mlp-512": ("data", "fsdp", "megatron", "megatron-all", "fsdp-megatron"),
    "mlp-64k": ("data", "fsdp", "megatron", "megatron-all", "fsdp-megatron"),
    "moe": ("data", "fsdp", "experts", "experts-all", "fsdp-megatron"),
    "lm-head": ("data", "fsdp", "vocab", "megatron"),
    "conv": ("data", "fsdp"),
    "lora": ("data", "fsdp", "megatron", "fsdp-megatron", "sequence"),
    "llama": ("data", "fsdp", "megatron", "fsdp-megatron", "sequence"),
    "gpt-scan": ("data", "fsdp", "megatron", "fsdp-megatron", "sequence", "vocab"),
    "vit": ("data", "fsdp", "megatron", "fsdp-megatron"),
    "gpt": ("data", "fsdp", "megatron", "fsdp-megatron", "sequence", "vocab"),
}
COLUMN = ("wq", "wk", "wv", "up", "gate", "w1", "b1", "head")
ROW = ("wo", "down", "w2", "a2")
# The router of experts, a `gate` of another kind than that of a gated MLP: whole on tensor-parallel devices, as in
# Megatron-LM (moe/router.py: a plain parameter), torchtitan ("moe.router.gate": NoParallel()) and MaxText (("embed", None)).
ROUTER = {"moe": "gate"}


class Hand:
    """A hand annotation on mesh axes `x` (data) and `y` (model): where parameters and activations lie."""

    def __init__(self, name: str, mesh: Any, workload: str):
        self.mesh, self.workload = mesh, workload
        every = ("x", "y")
        self.tensor = {"megatron": "y", "fsdp-megatron": "y", "sequence": "y", "megatron-all": every}.get(
            name
        )
        self.vocab = ("y",) if name == "vocab" else self.tensor
        self.experts = {"experts": ("y",), "experts-all": every}.get(name)
        self.fsdp = {"fsdp": every, "vocab": every, "experts": every, "fsdp-megatron": ("x",)}.get(name)
        if name == "experts-all":
            self.fsdp = every
        self.sequence = ("y",) if name == "sequence" else None
        self.batch = () if name == "megatron-all" else ("x",) if self.tensor else every

    def size(self, axes: Any) -> int:
        """Devices along axes."""
        return math.prod(self.mesh.shape[a] for a in ([axes] if isinstance(axes, str) else axes or ()))

    def parameter(self, path: Any, leaf: Any) -> Any:
        """The sharding of a parameter, or of its moments, by its name and shape."""
        import jax

        name = str(getattr(path[-1], "key", path[-1]))
        dims: list[Any] = [None] * len(leaf.shape)
        expert = self.workload == "moe" and name in ("up", "down")
        if expert and self.experts and leaf.shape[0] % self.size(self.experts) == 0:
            dims[0] = self.experts
        elif expert and self.experts:
            dims[0] = "y"
        elif len(dims) > 1 and name in ("embed", "head"):
            dims[0 if name == "embed" else -1] = self.vocab
        elif len(dims) > 1 and self.tensor and name in COLUMN + ROW and name != ROUTER.get(self.workload):
            dims[-1 if name in COLUMN else -2] = self.tensor
        used = {a for d in dims if d for a in ([d] if isinstance(d, str) else d)}
        free = tuple(a for a in self.fsdp or () if a not in used)
        best = sorted(range(len(dims)), key=lambda d: -leaf.shape[d])
        for d in best if free else ():
            if dims[d] is None and leaf.shape[d] % self.size(free) == 0:
                dims[d] = free
                break
        return jax.NamedSharding(self.mesh, jax.P(*dims))

    def mark(self, x: Any, kind: str) -> Any:
        """The constraint of an activation."""
        import jax

        dims: list[Any] = [None] * x.ndim
        dims[0] = self.batch or None
        if kind == "hidden":
            dims[1] = self.sequence
        elif kind == "heads" and self.tensor and x.shape[2] % self.size(self.tensor) == 0:
            dims[2] = self.tensor
        elif kind == "wide":
            dims[-1] = self.tensor
        elif kind == "logits" and self.vocab:
            dims[0], dims[-1] = ("x",), self.vocab
        elif kind == "experts":
            experts = self.experts
            if experts and x.shape[0] % self.size(experts):
                experts = ("y",)
            rest = tuple(a for a in self.batch if a not in (experts or ()))
            dims[0], dims[1] = experts, rest or None
            if not experts and self.tensor and x.shape[-1] > 1024:
                dims[-1] = self.tensor
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, jax.P(*dims)))


def seconds_of(run: Callable[[], T]) -> tuple[T, float, float]:
    """What a call returns, its wall seconds and its CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    value = run()
    return value, time.perf_counter() - start, time.process_time() - cpu


def run_one(
    name: str, machine: str, contender: str, budget: str = "", known: Sequence[float] = ()
) -> dict[str, Any]:
    """Compile one contender and measure its program, unless its plan is the stored one, of `known` bytes and peak."""
    import jax

    import jshard
    from benchmarks import workloads

    mesh = jshard.topology(machine, fidelity.MACHINES[machine], compiles=True)
    w = workloads.get(name, devices=mesh.devices)
    plan, extra = None, {}
    if contender.startswith("jshard") or contender == "xla-plan":
        sharded = jshard.shard(
            w.step,
            in_strategy=w.in_strategy(mesh.devices),
            level=2,
            mesh=mesh,
            donate_argnums=(0,),
            memory_budget=int(float(budget)) if budget else None,
        )
        plan, plan_s, _ = seconds_of(lambda: sharded.plan(*w.args))
        if known and fidelity.same_plan(plan, *known):
            return {"unchanged": True}
        extra = {
            "plan_s": plan_s,
            "gap": plan.cost.gap,
            "predicted": plan.cost.compute + plan.cost.communication,
        }
        shardings: Any = dict(in_shardings=plan.in_shardings[0], out_shardings=plan.out_shardings)
        by_xla = jax.jit(w.step, donate_argnums=(0,), **shardings)
        step, args = by_xla if contender == "xla-plan" else sharded, w.args
    else:
        step, args = annotated(name, mesh, contender)
    lowered, lower_s, lower_cpu_s = seconds_of(lambda: step.lower(*args))
    compiled, compile_s, compile_cpu_s = seconds_of(lowered.compile)
    if plan is not None and contender != "xla-plan":
        v = plan.verify(compiled)
        extra |= {"error": v.error, "planned_bytes": v.predicted, "planned_peak": plan.cost.peak_bytes}
    return {
        "workload": name,
        "machine": machine,
        "contender": contender,
        "jax": jax.__version__,
        **measures(compiled, mesh, w.flops),
        "lower_s": lower_s,
        "compile_s": compile_s,
        "cpu_s": lower_cpu_s + compile_cpu_s,
        **extra,
    }


def annotated(name: str, mesh: Any, contender: str) -> tuple[Any, Sequence[Any]]:
    """The jitted step of a workload with the contender's own annotations, and its arguments."""
    import jax

    from benchmarks import workloads

    w = workloads.get(name, devices=mesh.devices)
    batch = tuple(jax.NamedSharding(mesh.jax_mesh, jax.P(("x", "y"))) for _ in w.batch)
    if contender == "xla-batch":
        # The state is left open: shardings of abstract arguments say nothing about it.
        args = [w.state] + [
            jax.ShapeDtypeStruct(b.shape, b.dtype, sharding=s) for b, s in zip(w.batch, batch, strict=True)
        ]
        return jax.jit(w.step, donate_argnums=(0,)), args
    hand = Hand(contender, mesh.jax_mesh, name)
    w = workloads.get(name, devices=mesh.devices, mark=hand.mark)
    state = jax.tree_util.tree_map_with_path(hand.parameter, w.state)
    loss = jax.NamedSharding(mesh.jax_mesh, jax.P())
    shardings: Any = dict(in_shardings=(state, *batch), out_shardings=(state, loss))
    return jax.jit(w.step, donate_argnums=(0,), **shardings), w.args


def measures(compiled: Any, mesh: Any, workload_flops: float) -> dict[str, Any]:
    """Bytes, peak memory, FLOPs and estimated seconds of a compiled program, per device and step."""
    from benchmarks.compilers.live_bytes import allocated_bytes
    from benchmarks.quality import wires
    from jshard._verify import read_program

    program, chip = read_program(compiled), mesh.hardware
    bandwidth = chip.link_bandwidth * len(mesh.physical)
    flops = program.flops or 0.0
    compute = max(flops / chip.bf16_flops, (program.estimated_cycles or 0) / CLOCK[chip.name])
    return {
        "bytes": program.total,
        "by_kind": program.by_kind,
        "complete": program.complete,
        "peak": program.peak_bytes,
        "off_chip": allocated_bytes(compiled),
        "flops_ratio": flops / (workload_flops / mesh.devices),
        "cycles": program.estimated_cycles,
        "compute": compute,
        "seconds": compute + program.total / bandwidth,
        "by_links": compute + wires.of_program(program, mesh.jax_mesh.devices, chip.link_bandwidth),
    }


Key = tuple[str, str, str]


def stored() -> dict[Key, dict[str, Any]]:
    """The last result of each run."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(r["machine"], r["workload"], r["contender"]): r for r in map(json.loads, lines)}


FORMULAS = {"seconds": "bytes", "by_links": "links"}  # a column of the results, and what the table calls it


def write_table(results: dict[Key, dict[str, Any]]) -> str:
    """All contenders in Markdown, workload by workload, best first; and jshard against the best of the others."""
    lines = [
        "# Plans of jshard against hand annotations and XLA's propagation",
        "",
        "Written by `make bench-quality`; what the columns mean and the two formulas of the estimated time are",
        "in its docstring. One compiler (libtpu), no device. Bytes are received per device and step; `FLOPs` is over the",
        "program's FLOPs / devices; `ratio` is the estimated time (by bytes) over jshard's.",
    ]
    for machine in sorted({m for m, _, _ in results}):
        rows = []
        for name in fidelity.WORKLOADS:
            mine = {c: r for (m, w, c), r in results.items() if (m, w) == (machine, name)}
            if "failed" in mine.get("jshard", {"failed": ""}):
                continue
            base = mine["jshard"]["seconds"]
            for c in sorted(mine, key=lambda c: mine[c].get("seconds", math.inf)):
                r = mine[c]
                if "failed" in r:
                    rows.append(f"| {name} | {c} | {r['failed'][:80]} | | | | | | | |")
                    continue
                links = f"{r['by_links'] * 1e3:.3f}" if "by_links" in r else ""
                rows.append(
                    f"| {name} | {'**jshard**' if c == 'jshard' else c} | {r['seconds'] * 1e3:.3f} "
                    f"| {r['seconds'] / base:.2f} | {links} | {r['compute'] * 1e3:.3f} | {r['bytes'] / 1e6:,.1f} "
                    f"| {r['peak'] / 1e6:,.0f} | {r['flops_ratio']:.3f} | {r['lower_s'] + r['compile_s']:.0f} |"
                )
        lines += ["", f"## {machine}", ""]
        for formula, words in FORMULAS.items():
            known = {k: r for k, r in results.items() if k[0] == machine and (formula in r or "failed" in r)}
            if known:
                lines += [
                    f"Time by {words}:",
                    "",
                    *means(known, formula),
                    *dominance(machine, known, formula),
                    "",
                ]
        lines += compile_ratios(machine, results)
        lines += [
            "",
            "| workload | contender | ms by bytes | ratio | ms by links | compute ms | MB moved | peak MB | FLOPs "
            "| lower + compile s |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def means(results: dict[Key, dict[str, Any]], formula: str) -> list[str]:
    """Geometric means of jshard's time over that of the best hand plan and of propagation, for one machine."""
    hand, batch = {}, {}
    for (_, name, contender), mine in results.items():
        if contender != "jshard" or formula not in mine:
            continue
        others = {c: r[formula] for (_, w, c), r in results.items() if w == name and formula in r}
        if all(c in others for c in HAND[name]):
            hand[name] = mine[formula] / min(others[c] for c in HAND[name])
        if "xla-batch" in others:
            batch[name] = mine[formula] / others["xla-batch"]
    out = []
    for words, values in (("the best hand plan", hand), ("XLA's propagation from the batch", batch)):
        if values:
            mean = math.exp(sum(map(math.log, values.values())) / len(values))
            single = ", ".join(f"{n} {v:.3f}" for n, v in values.items())
            out.append(f"- Geometric mean of jshard's time over that of {words}: {mean:.3f} ({single}).")
    return out


def dominance(machine: str, results: dict[Key, dict[str, Any]], formula: str) -> list[str]:
    """jshard against every hand plan, within the memory that this hand plan needs.

    Where the plan without a budget is predicted to fit, it is the plan of the budget too, and is not compiled again.
    Where it only compiles to no more, in the peak or off the chip, it is said which: the compiled peak has what lies
    on the chip in it for some programs (mlp-512, moe) and not for others (lora).
    """
    beaten, lost, missing = 0, [], []
    only: dict[str, list[str]] = {"peak": [], "off_chip": []}
    for (_, name, c), r in results.items():
        free = results.get((machine, name, "jshard"), {})
        if c not in HAND[name] or formula not in r or formula not in free:
            continue
        mine = results.get((machine, name, f"jshard<={c}"))
        if free["planned_peak"] <= r["peak"]:
            mine = free
        elif compiles := [k for k in only if k in free and k in r and free[k] <= r[k]]:
            mine = free
            only[compiles[0]].append(f"{name} {c}")
        if mine is None or formula not in mine:
            missing.append(f"{name} {c}" + (f" ({mine['failed'].split(': ')[-1]})" if mine else ""))
        elif mine[formula] <= r[formula]:
            beaten += 1
        else:
            lost.append(f"{name} {c} ({mine[formula] / r[formula]:.3f})")
    out = [
        f"- At the memory of each hand plan: {beaten} of {beaten + len(lost) + len(missing)} are not faster than "
        "jshard's free plan where it needs no more memory, than its plan under that budget elsewhere."
    ]
    for measure, words in (("peak", "not by the predicted peak"), ("off_chip", "only off the chip")):
        if only[measure]:
            out.append(f"It needs no more by what it compiles to, {words}: {', '.join(only[measure])}.")
    out += [f"Faster than jshard there: {', '.join(lost)}."] if lost else []
    out += [f"Not measured there: {', '.join(missing)}."] if missing else []
    return [" ".join(out)]


def compile_ratios(machine: str, results: dict[Key, dict[str, Any]]) -> list[str]:
    """Lowering and compiling over the same for the best hand plan, in seconds of the processor."""
    said = []
    for name in fidelity.WORKLOADS:
        mine = {c: r for (m, w, c), r in results.items() if (m, w) == (machine, name) and "failed" not in r}
        hand = [mine[c] for c in HAND[name] if c in mine]
        if "jshard" in mine and len(hand) == len(HAND[name]):
            best = min(hand, key=lambda r: r["seconds"])
            if "cpu_s" in mine["jshard"] and "cpu_s" in best:
                said.append(f"{name} {mine['jshard']['cpu_s'] / best['cpu_s']:.2f}")
    return [f"Lowering and compiling over that of the best hand plan: {', '.join(said)}."] if said else []


def main() -> int:
    """All contenders of all workloads, cheap compiles first."""
    parser = kept_rows.arguments(
        __doc__, fidelity.WORKLOADS, MACHINES, nargs="+", metavar="WORKLOAD MACHINE CONTENDER [BYTES]"
    )
    parser.add_argument("--contenders", nargs="*", default=None)
    parser.add_argument(
        "--budget", nargs="*", default=(), help="contenders whose compiled peak bounds jshard"
    )
    a = parser.parse_args()
    if a.one:
        print(json.dumps(run_one(*a.one, known=a.known)))
        return 0
    python = kept_rows.compilers_python()
    for machine in a.on:
        for name in a.only:
            runs = [(c, "") for c in (a.contenders or ("jshard", *HAND[name], "xla-batch", "xla-plan"))]
            peaks = {c: stored().get((machine, name, c), {}).get("peak") for c in a.budget}
            runs += [(f"jshard<={c}", str(p)) for c, p in peaks.items() if p]
            for contender, budget in runs:
                key = (machine, name, contender)
                last = stored().get(key)
                known = fidelity.known_plan(last, "planned_bytes", "planned_peak") if a.changed else []
                if fidelity.measured(last) and not a.again and not known:
                    continue
                given = ["--one", name, machine, contender, *([budget] if budget else []), *known]
                r = kept_rows.in_process(python, __file__, given, a.seconds)
                if r.get("unchanged"):
                    print(machine, name, contender, "the stored plan", flush=True)
                    continue
                r = {"workload": name, "machine": machine, "contender": contender, **r}
                with RESULTS.open("a") as f:
                    f.write(json.dumps(r) + "\n")
                TABLE.write_text(write_table(stored()))
                said = r.get("failed") or f"{r['seconds'] * 1e3:.3f} ms, {r['bytes'] / 1e6:,.1f} MB"
                print(machine, name, contender, said, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
