"""`Config`: shardings as a file, read, changed, checked against a model, and written."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jshard._config.config_record import ConfigRecord, ConfigSource
from jshard._core.argument_checks import checked
from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, JaxMesh, PyTree, PyTreeDef
from jshard._core.messages import describe_value, type_with_article
from jshard._core.named_topology import MeshRequest
from jshard._core.text_files import path_of, write_file


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jshard._config.match_report import MatchReport
    from jshard._plan.record import PlanRecord


@dataclasses.dataclass(frozen=True)
class Config(ConfigRecord):
    """The shardings of a model as rules from names to mesh axes; `shard(config=...)` takes it.

    >>> import jax, jshard
    >>> config = jshard.Config.of({"mesh": {"data": 2, "tensor": 2}, "inputs": {"x": ["data", None]}})
    >>> config = config.override("parameters.fc.kernel=[null, tensor]")
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> call = lambda params, x: x @ params["fc"]["kernel"]
    >>> plan = jshard.shard(call, config=config).plan({"fc": {"kernel": f32(8, 4)}}, f32(16, 8))
    >>> [str(row.layout) for row in plan.inputs]
    ['(-, tensor)', '(data, -)']

    Made by `Config.of`, `Config.load`, the importers `from_...`, and `Plan.to_config`.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, tuple):
            raise ShardError(
                f"Config is called with {type_with_article(self.parameters)}",
                where="Config",
                fix='Config.of(...) of a dict or YAML text, or Config.load("rules.yaml")',
            )

    @staticmethod
    @checked
    def of(value: ConfigSource) -> Config:
        """A configuration from a dict, YAML text, or the path of a file.

        >>> Config.of("lm_head.kernel: [null, tensor]").torch[0].text
        '[null, tensor]'
        """
        from jshard._config.source import read_config

        return as_config(read_config(value))

    @staticmethod
    @checked
    def load(path: str | os.PathLike[str]) -> Config:
        """Read a YAML file."""
        from jshard._config.sections import read_file

        return as_config(read_file(path_of(path, "Config.load")))

    @checked
    def override(self, *texts: str) -> Config:
        """The configuration with parts replaced, as on a command line: `override("level=2", "mesh.fsdp=8")`."""
        from jshard._config.source import override

        return as_config(override(self, *texts))

    def check(self, model: PyTree, *args: PyTree, **kwargs: PyTree) -> MatchReport:
        """What of this configuration does not match a function or model, and the other way round; nothing is planned.

        >>> import jax, jshard
        >>> x = {"w": jax.ShapeDtypeStruct((4, 4), "float32")}
        >>> report = Config.of({"mesh": {"x": 2}, "parameters": {"v": ["x", None]}}).check(lambda p: p["w"] * 2, x)
        >>> report.ok, [p.kind for p in report.problems]
        (False, ['unmatched'])

        `model`: a function, with the arguments of its call; an nnx module, with those of its `__call__` or none; a linen
        module, with its variables and those of its `__call__`; or a pytree of parameters. Arrays may be shapes.
        """
        # By name: checking traces functions, which is further on in the order of imports than this class.
        return importlib.import_module("jshard._api.config_check").check(self, model, args, kwargs)

    @staticmethod
    def from_recipe(
        recipe: str,
        fn: Function,
        *args: PyTree,
        mesh: MeshRequest | Mapping[str, int] | None = None,
        **kwargs: PyTree,
    ) -> Config:
        """The layouts of a recipe for one function and call, as rules to read, edit and save.

        >>> import jax, jshard
        >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
        >>> params = {"up": f32(64, 256), "down": f32(256, 64)}
        >>> mesh = jshard.topology("v5e:2x2", {"data": 2, "model": 2}, compiles=False)
        >>> f = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
        >>> print(jshard.Config.from_recipe("megatron", f, params, f32(128, 64), mesh=mesh))
        mesh: {data: 2, model: 2}
        parameters:
          down: [model, null]
          up: [null, model]
        inputs:
          x: [data, '?']
        products:
          up: [data, model]
          down: [data, null]
        <BLANKLINE>

        `recipe`: a name or sum of `jshard.recipes`; `mesh`: as for `shard`, or the sizes of its axes, `{"data": 2}`;
        default: that of a sharded function. `products` are the complete outputs of the products with a parameter
        (`wk @ wq`: of the outputs of two), `gradients` those of its gradient. Raises `RecipeError` where it does not apply.
        """
        # By name, as in `check`.
        module = importlib.import_module("jshard._api.recipes")
        return as_config(module.config_of_recipe(recipe, fn, args, kwargs, mesh))

    @staticmethod
    @checked
    def from_regexes(
        rules: Iterable[Sequence[object]], mesh: MeshRequest | Mapping[str, int] | None = None
    ) -> Config:
        """Pairs of a regular expression on paths with `/` and a spec, the first that matches (EasyLM, scalax)."""
        from jshard._config.foreign_rules import from_regexes

        return as_config(from_regexes(rules, axis_sizes(mesh)))

    @staticmethod
    @checked
    def from_layout_map(
        layout_map: Mapping[str, object],
        mesh: MeshRequest | Mapping[str, int] | None = None,
        full: bool = True,
    ) -> Config:
        """Keras' `LayoutMap`, or a dict of its regular expressions, of which only one may match.

        `full`: whether an expression must match the whole path, as from Keras 3.14 on; before, it was searched in it.
        """
        from jshard._config.foreign_rules import from_layout_map

        return as_config(from_layout_map(layout_map, axis_sizes(mesh), full))

    @staticmethod
    @checked
    def from_logical_rules(
        rules: str | Mapping[str, object] | Iterable[object],
        names: PyTree,
        mesh: MeshRequest | Mapping[str, int] | None = None,
        reading: str = "linen",
    ) -> Config:
        """Logical axis rules (MaxText, Flax) for tensors with these logical axes.

        >>> rules = [("embed", "fsdp"), ("mlp", "tensor")]
        >>> [r.text for r in Config.from_logical_rules(rules, {"up.kernel": ("embed", "mlp")}).parameters]
        ['[fsdp, tensor]']

        - `rules`: pairs of a logical axis and mesh axes, or the text or dict of a MaxText configuration.
        - `names`: logical axes by path, or variables with Flax' metadata. `mesh`: sizes of the axes; others are dropped.
        - `reading`: "linen" (the first pair whose axes are free; MaxText) or "nnx" (the last pair). `notes` of the result
            say where the two differ, which rules have no effect and which names no rule.
        """
        from jshard._config.import_logical import config_of_logical_rules

        return as_config(config_of_logical_rules(rules, names, axis_sizes(mesh), reading))

    @staticmethod
    @checked
    def from_axis_mapping(
        mapping: Mapping[str, str | Sequence[str] | None],
        names: PyTree,
        mesh: MeshRequest | Mapping[str, int] | None = None,
    ) -> Config:
        """levanter's and haliax' mapping of logical axes to mesh axes, for tensors with these logical axes."""
        from jshard._config.foreign_rules import from_axis_mapping, logical_names

        return as_config(from_axis_mapping(mapping, logical_names(names), axis_sizes(mesh)))

    @staticmethod
    @checked
    def from_metadata(tree: PyTree, mesh: MeshRequest | Mapping[str, int] | None = None) -> Config:
        """The mesh axes in Flax' partitioning metadata of boxed variables or of `nnx.state(model)`."""
        from jshard._config.foreign_rules import from_metadata

        return as_config(from_metadata(tree, axis_sizes(mesh)))

    @staticmethod
    @checked
    def from_tunix(
        sharding: Mapping[str, Sequence[str | None]] | DataclassInstance,
        mesh: MeshRequest | Mapping[str, int] | None = None,
    ) -> Config:
        """tunix' `ShardingConfig`, a dict of its fields, or a `ModelConfig` that has one."""
        from jshard._config.foreign_rules import from_tunix

        return as_config(from_tunix(sharding, axis_sizes(mesh)))

    def to_yaml(self) -> str:
        """The configuration as YAML text; `Config.of` gives an equal one."""
        from jshard._config.yaml_writer import to_yaml

        return to_yaml(self)

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a YAML file."""
        write_file(path, self.to_yaml(), "Config.save")

    def __str__(self) -> str:
        return self.to_yaml()


def axis_sizes(mesh: MeshRequest | Mapping[str, int] | None) -> Mapping[str, int] | None:
    """The sizes of a mesh's axes, which may be given as they are.

    >>> import jax
    >>> axis_sizes(jax.sharding.AbstractMesh((2, 4), ("data", "model")))
    {'data': 2, 'model': 4}
    """
    if mesh is None or isinstance(mesh, Mapping):
        return mesh
    sizes = getattr(mesh, "axes", None) or getattr(mesh, "shape", None)  # of `topology`, of JAX's meshes
    if not isinstance(sizes, Mapping):
        raise ShardError(
            f"mesh is {describe_value(mesh)}",
            where="mesh",
            fix='a mesh, or the sizes of its axes: {"data": 2, "model": 4}',
        )
    return dict(sizes)


def as_config(record: ConfigRecord) -> Config:
    """The public configuration of a record."""
    return Config(**{f.name: getattr(record, f.name) for f in dataclasses.fields(ConfigRecord)})


def merged_config(*configs: ConfigSource) -> Config | None:
    """Configurations on top of each other, the last above all; None without any.

    >>> merged_config({"level": 1, "mesh": {"x": 2}}, "fsdp").recipe, merged_config() is None
    ('fsdp', True)
    """
    from jshard._config.sections import merge

    record: ConfigRecord | None = None
    for config in configs:
        record = merge(record, Config.of(config))
    return None if record is None else as_config(record)


def config_of_plan(
    plan: PlanRecord, jax_mesh: JaxMesh | None = None, machine: str = "", in_tree: PyTreeDef | None = None,
    out_tree: PyTreeDef | None = None,
) -> Config:  # fmt: skip
    """The configuration of a plan (`Plan.to_config`), on the mesh for which it was made.

    `in_tree`, `out_tree`: the structures of its arguments and results, where they are known.
    """
    from jshard._api.state_matching import tied_rows
    from jshard._config.export import config_of_plan
    from jshard._core.layout import MeshAxes
    from jshard._spec.default_budget import default_memory_budget

    mesh = plan.mesh
    if jax_mesh is not None:
        mesh = MeshAxes(tuple(jax_mesh.axis_names), tuple(jax_mesh.axis_sizes))
    ties = functools.partial(tied_rows, plan.inputs, plan.outputs, in_tree, out_tree)
    return as_config(config_of_plan(plan, mesh, ties, machine, default_memory_budget(plan.chip), in_tree))
