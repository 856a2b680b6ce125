"""Without Flax, matplotlib, IPython, rich or pandas all else works, and errors name what to install.

Tested in a fresh interpreter in which importing them fails.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap


ROOT = pathlib.Path(__file__).parents[2]
OPTIONAL = ("flax", "matplotlib", "IPython", "rich", "pandas", "optax", "treescope", "yaml", "pydot")

WITHOUT = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import jax, jax.numpy as jnp, jshard
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8])
f = jshard.shard(lambda x, w: jax.nn.relu(x @ w), ((4, 2), None), mesh=mesh)
args = f32(32, 128), f32(128, 16)
"""


def without(code: str) -> str:
    """What code prints in an interpreter that has none of the optional libraries."""
    script = WITHOUT + textwrap.dedent(code)
    env = {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT), "PATH": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_everything_else_works_without_them(tmp_path):
    said = without(f"""
        assert float(f(jnp.ones((32, 128)), jnp.ones((128, 16))).sum()) == 32 * 128 * 16
        p = f.plan(*args, verify=True)
        assert p.verification.ok
        for form in (str(p), p.ir(), p.ir(local=True), p._repr_html_(), p.to_markdown(), p.to_dot(), p.to_json()):
            assert form
        p.to_html({str(tmp_path / "plan.html")!r}); p.to_trace({str(tmp_path / "trace.json")!r})
        p.save({str(tmp_path / "plan.json")!r}); assert jshard.Plan.load({str(tmp_path / "plan.json")!r}) == p
        print(p.why("w")); print(p.what_if(w=(2, 1))[1])
        found = jshard.sweep(f, *args, level=[0, 1, 2])
        curve = jshard.pareto(f, *args, points=3)
        assert str(found) and found._repr_html_() and str(curve) and curve._repr_html_()
        print("done", *sorted(m for m in sys.modules if m.split(".")[0] in {OPTIONAL!r}))
    """)
    assert said.endswith("done\n")


MISSING = [
    ("jshard.sweep(f, *args).plot()", "Sweep.plot", "matplotlib", "report"),
    ("jshard.sweep(f, *args).to_pandas()", "Sweep.to_pandas", "pandas", "report"),
    ("jshard.pareto(f, *args, points=2).plot()", "Frontier.plot", "matplotlib", "report"),
    ("f.plan(*args).__rich__()", "coloured output", "rich", "report"),
    ("__import__('jshard.flax')", "jshard.flax", "flax", "flax"),
]


def test_what_is_missing_is_named_with_its_extra():
    """Each call in turn, all in one interpreter: none is given what another one imported."""
    said = without(f"""
        for call in {[call for call, *_ in MISSING]!r}:
            try:
                eval(call)
            except (jshard.ShardError, ImportError) as error:
                print(error)
            print("=" * 30)
    """)
    texts = [text.strip() for text in said.split("=" * 30)]
    assert len(texts) == len(MISSING) + 1 and not texts[-1]
    for (_, who, library, extra), text in zip(MISSING, texts, strict=False):
        assert text.startswith(f"{who} needs {library}, which is not installed"), text
        assert f"pip install 'jshard[{extra}]'" in text
