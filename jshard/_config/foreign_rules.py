"""Rules of other libraries as configurations that mean the same.

Regular expressions (EasyLM, scalax, Keras' `LayoutMap`) stay regular expressions. Rules by logical axes (levanter,
haliax, Flax' metadata) are applied to the axes of each tensor and folded to globs. Fields of tunix' `ShardingConfig`
become globs of the parameters that its models annotate with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax

from jshard._config.config_record import ConfigRecord, Entry, MeshSection, Rule
from jshard._config.fewest_rules import fewest_rules
from jshard._config.sections import parse_entry_of, parse_value
from jshard._config.tensors import TensorName
from jshard._config.yaml_reader import locate
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import describe_value, suggest
from jshard._spec.tree_paths import path_name


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def mesh_section(mesh: Mapping[str, int] | None) -> MeshSection | None:
    """Sizes by axis as a section."""
    return None if mesh is None else MeshSection(tuple(mesh.items()))


def from_regexes(
    rules: Iterable[Sequence[object]], mesh: Mapping[str, int] | None = None, match: str = "first"
) -> ConfigRecord:
    """Pairs of a regular expression and a `PartitionSpec`, a tuple or a list.

    >>> from jax.sharding import PartitionSpec as P
    >>> from_regexes([("wq/kernel", P("fsdp", "mp")), (".*", P(None))]).regexes[0].text
    '[fsdp, mp]'
    """
    pairs = list(rules) if isinstance(rules, Iterable) and not isinstance(rules, str | Mapping) else None
    if pairs is None or any(isinstance(p, str) or not isinstance(p, Sequence) or len(p) != 2 for p in pairs):
        raise ShardError(
            f"the rules are {describe_value(rules)}, not pairs of a regular expression and a spec",
            where="Config.from_regexes",
            fix='[("wq/kernel", P("fsdp", "tensor")), (".*", P())]',
        )
    items = [[pair[0], _axes_of(pair[1])] for pair in pairs]
    config = parse_value({"regexes": items, "regex_match": match}, "regexes")
    return dataclasses.replace(config, mesh=mesh_section(mesh), unlisted="replicated")


def from_layout_map(
    layout_map: Mapping[str, object], mesh: Mapping[str, int] | None = None, full: bool = True
) -> ConfigRecord:
    """Keras' `LayoutMap`: an exact path, else the one regular expression that matches; two are an error, none is whole.

    Values are tuples of axes or `TensorLayout`s; `layout_map` is a dict or Keras' own object. An expression matches the
    whole path (`re.fullmatch`, from Keras 3.14 on), or is found in it (`re.search`, up to 3.13) if not `full`.

    >>> from_layout_map({"dense.kernel": (None, "model")}).regex_match
    'full'
    """
    pairs = [(name, getattr(layout_map[name], "axes", layout_map[name])) for name in layout_map]
    return from_regexes(pairs, mesh, match="full" if full else "only")


def _axes_of(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def from_names(
    entries: Mapping[str, Entry], mesh: Mapping[str, int] | None = None, source: str = "rules"
) -> ConfigRecord:
    """Entries of tensors by path, folded to globs."""
    tensors = [TensorName(path, (1,) * len(e), "float32") for path, e in entries.items()]
    rules = fewest_rules(tensors, list(entries.values()))
    return ConfigRecord(parameters=rules, mesh=mesh_section(mesh), unlisted="replicated", source=source)


def from_axis_mapping(
    mapping: Mapping[str, str | Sequence[str] | None],
    names: Mapping[str, Sequence[str | None]],
    mesh: Mapping[str, int] | None = None,
) -> ConfigRecord:
    """levanter's and haliax' axis mapping: each logical axis has its mesh axes, one without is not cut.

    >>> [(r.name, r.text) for r in from_axis_mapping({"embed": "data"}, {"w": ("embed", "mlp")}).parameters]
    [('w', '[data, null]')]
    """
    entries: dict[str, Entry] = {}
    for path, own in names.items():
        dims = tuple(_axes(mapping.get(n) if n is not None else None) for n in own)
        used = [a for d in dims for a in d]
        if len(set(used)) < len(used):
            twice = next(a for a in used if used.count(a) > 1)
            raise ShardError(
                f"{path}, of axes {', '.join(map(str, own))}, is cut twice over {twice!r}",
                where="axis mapping",
                fix=f"one of its axes mapped to {twice}; haliax hands the same to JAX, which refuses it",
            )
        entries[path] = dims
    return from_names(entries, mesh, "axis mapping")


def _axes(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def logical_names(tree: PyTree) -> dict[str, tuple[str | None, ...]]:
    """The axis names that Flax' metadata gives the arrays of a pytree, by path.

    Boxes of linen (`nn.Partitioned`, `nn.LogicallyPartitioned`) have `names`, variables of nnx the metadata `sharding`,
    `sharding_names` or `out_sharding`. A mapping from paths to names is taken as it is.

    >>> logical_names({"mlp.kernel": ("embed", "mlp")})
    {'mlp.kernel': ('embed', 'mlp')}
    """
    if isinstance(tree, Mapping) and all(
        isinstance(v, tuple | list) and all(n is None or isinstance(n, str) for n in v) for v in tree.values()
    ):
        return {str(k): tuple(v) for k, v in tree.items()}
    out: dict[str, tuple[str | None, ...]] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_names)[0]:
        names = _names_of(node)
        if names:
            out[path_name(path)] = tuple(names)
    return out


def _has_names(node: object) -> bool:
    return (
        hasattr(node, "get_metadata") or hasattr(type(node), "get_partition_spec") and hasattr(node, "names")
    )


def _names_of(node: PyTree) -> Sequence[str | None] | None:
    if hasattr(node, "get_metadata"):
        data = node.get_metadata()
        keys = ("sharding_names", "out_sharding", "sharding")
        return next((data[k] for k in keys if isinstance(data.get(k), tuple | list)), None)
    return getattr(node, "names", None)


def from_metadata(tree: PyTree, mesh: Mapping[str, int] | None = None) -> ConfigRecord:
    """The mesh axes that Flax' partitioning metadata gives the arrays of a pytree."""
    names = logical_names(tree)
    if not names:
        raise ShardError(
            f"{describe_value(tree)} carries no partitioning metadata",
            where="Config.from_metadata",
            fix="variables made with nn.with_partitioning or nnx.with_partitioning, not unboxed; or nnx.state(model)",
        )
    entries = {p: parse_entry_of(locate([_axes_of(n) for n in own], p)) for p, own in names.items()}
    return from_names(entries, mesh, "partitioning metadata")


TUNIX_FIELDS = {
    "emb_vd": ("embedder.input_embedding",),
    "emb_dv": ("lm_head.w",),
    "q_weight_ndh": ("layers.*.attn.q_einsum.w", "layers.*.attn.q_proj.w"),
    "q_weight_dnh": ("layers.*.attn.q_proj.w",),
    "kv_weight_ndh": ("layers.*.attn.{k,v}_proj.w",),
    "kv_weight_dnh": ("layers.*.attn.{k,v}_proj.w",),
    "kv_weight_cndh": ("layers.*.attn.kv_einsum.w",),
    "qkv_weight_cndh": ("layers.*.attn.qkv_einsum.w",),
    "o_weight_nhd": ("layers.*.attn.o_proj.w", "layers.*.attn.attn_vec_einsum.w"),
    "ffw_weight_df": ("layers.*.mlp.{gate,up}_proj.kernel",),
    "ffw_weight_fd": ("layers.*.mlp.down_proj.kernel",),
    "rms_norm_weight": ("**.{input_layernorm,post_attention_layernorm,final_norm}.w", "**.*norm*.scale"),
    "exp_weight_edf": ("layers.*.mlp.{gate,up}_proj",),
    "exp_weight_cdf": ("layers.*.mlp.{gate,up}_proj",),
    "exp_weight_efd": ("layers.*.mlp.down_proj",),
    "exp_weight_cfd": ("layers.*.mlp.down_proj",),
}
"""Fields of tunix' `ShardingConfig` -> the parameters of its Llama 3, Qwen and Gemma models that have them
(google/tunix, tunix/models/{llama3,qwen3,gemma}/model.py)."""


def from_tunix(
    sharding: Mapping[str, Sequence[str | None]] | DataclassInstance, mesh: Mapping[str, int] | None = None
) -> ConfigRecord:
    """tunix' `ShardingConfig`, a dict of its fields, or a `ModelConfig`; those of weights become rules, each for whichever
    model has them. With a `ModelConfig` of one head of keys and values, these are cut as Gemma cuts them then.

    >>> record = from_tunix({"emb_vd": ("tp", "fsdp"), "act_btd": ("fsdp", None, "tp")})
    >>> [(r.name, r.text) for r in record.parameters], record.optional
    ([('embedder.input_embedding', '[tp, fsdp]')], ('**',))
    """
    own = getattr(sharding, "shd_config", sharding)
    fields = dict(own) if isinstance(own, Mapping) else {
        f.name: getattr(own, f.name) for f in dataclasses.fields(own)
    }  # fmt: skip
    if own is not sharding and getattr(sharding, "num_kv_heads", None) == 1 and "kv_weight_cndh" in fields:
        fields["kv_weight_cndh"] = (None, None, "fsdp", None)  # a literal in tunix/models/gemma/model.py
    rules = []
    for name, axes in fields.items():
        if name not in TUNIX_FIELDS:
            if not name.startswith(("act_", "vision", "siglip", "score", "per_layer")):
                raise ShardError(
                    f"{name!r} is no field that is known of tunix' models",
                    where="Config.from_tunix",
                    fix=suggest(name, list(TUNIX_FIELDS))
                    + "; or Config.from_metadata(nnx.state(model)), which is exact",
                )
            continue
        if axes is None:
            continue
        entry = parse_entry_of(locate([_axes_of(a) for a in axes], f"tunix {name}"))
        rules += [Rule(path, entry, f"tunix {name}") for path in TUNIX_FIELDS[name]]
    return ConfigRecord(
        parameters=tuple(rules),
        mesh=mesh_section(mesh),
        optional=("**",),
        unlisted="replicated",
        source="tunix",
    )
