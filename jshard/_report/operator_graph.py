"""The folded operator graph of a plan: operators of one group are one node, and cheap ones are contracted.

A network of 126 layers has as many nodes as one of two: its layers are folded, and an edge from a layer to the next
becomes an edge back (or to itself). Collectives are on the edges whose tensors they reshard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jshard._core.layout import Layout
from jshard._plan.rows import CollectiveRow, OperatorRow
from jshard._report.grouping import (
    CollectiveGroup,
    common_pattern,
    fold_tensors,
    operator_groups,
    sum_collectives,
)
from jshard._report.timeline import program_index


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


MAX_UNFOLDED_NODES = 70  # up to so many operators, each has a node of its own
MIN_COMPUTE_SHARE = 0.005  # share of the compute below which an operator may be contracted


@dataclasses.dataclass(frozen=True)
class Node:
    """Operators of one group, or folded arguments, or folded results."""

    label: str
    detail: str
    kind: str  # "operator", "input" or "output"
    layout: Layout
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Edge:
    """Tensors from one node to another, and the collectives that reshard them."""

    source: int
    target: int
    collectives: tuple[CollectiveGroup, ...]


@dataclasses.dataclass(frozen=True)
class OperatorGraph:
    """Nodes in program order, and edges; an edge to an earlier node leads to the next of the folded layers."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def operator_graph(plan: PlanRecord) -> OperatorGraph:
    """The folded graph."""
    nodes, member = _nodes(plan)
    keep = _shown_nodes(plan, nodes, member)
    links = linked(plan, member)
    edges = _contract_hidden(links, keep, len(nodes))
    order = sorted(keep)
    number = {old: new for new, old in enumerate(order)}
    return OperatorGraph(
        tuple(nodes[i] for i in order),
        tuple(Edge(number[a], number[b], sum_collectives(moved)) for (a, b), moved in edges.items()),
    )


def linked(
    plan: PlanRecord, member: Mapping[tuple[str, str], int]
) -> dict[tuple[int, int], dict[int, CollectiveRow]]:
    """(source, target) -> the collectives between them, by number; `member` is the node of each row by kind and name."""
    maker: dict[str, int] = {r.path: member["input", r.path] for r in plan.inputs}
    every = (*plan.operators, *plan.boundaries)
    for r in every:
        maker.update(dict.fromkeys(r.writes, member["operator", r.name]))
    rows = {c.id: c for c in plan.collectives}
    # (source, target) -> collectives; a target reads what a light node hands on as if it read the light node's operands.
    links: dict[tuple[int, int], dict[int, CollectiveRow]] = {}
    placed: set[int] = set()
    made = {r.path: r.layout for r in plan.inputs}
    made.update((t, lay) for r in every for t, lay in zip(r.writes, r.results, strict=True))
    movers: dict[str, set[int]] = {}  # nodes that read a tensor in another layout than the one it is made in
    for r in every:
        target = member["operator", r.name]
        for tensor, layout in zip(r.reads, r.operands, strict=True):
            if tensor in maker:
                if layout != made[tensor]:
                    movers.setdefault(tensor, set()).add(target)
                own = {i: rows[i] for i in r.collectives if rows[i].tensor == tensor}
                links.setdefault((maker[tensor], target), {}).update(own)
                placed |= own.keys()
    results = {r.path for r in plan.outputs}
    for c in plan.collectives:
        if c.id in placed or c.tensor not in maker:
            continue
        source = maker[c.tensor]
        if c.operator in results:
            links.setdefault((source, member["output", c.operator]), {})[c.id] = c
            continue
        for (a, b), moved in links.items():
            if a == source and b in movers.get(c.tensor, {b}):
                moved[c.id] = c
    for r in plan.outputs:
        if r.tensor in maker:
            links.setdefault((maker[r.tensor], member["output", r.path]), {})
    return links


def _nodes(plan: PlanRecord) -> tuple[list[Node], dict[tuple[str, str], int]]:
    nodes: list[Node] = []
    member: dict[tuple[str, str], int] = {}
    for path, same in fold_tensors(plan.inputs):
        for r in same:
            member["input", r.path] = len(nodes)
        nodes.append(
            Node(path, f"{same[0].dtype}{list(same[0].shape)}", "input", same[0].layout, len(same), 0.0)
        )
    alone = len(plan.operators) <= MAX_UNFOLDED_NODES
    parts = [
        part
        for g in operator_groups(plan)
        if g.rows
        for part in ([(r,) for r in g.rows] if alone else [g.rows])
    ]
    loops: dict[tuple, list[OperatorRow]] = {}
    for r in plan.boundaries:
        loops.setdefault((r.primitive, r.shapes, r.results, r.name if alone else ""), []).append(r)
    for same in sorted([*parts, *map(tuple, loops.values())], key=lambda rows: program_index(rows[0])):
        for r in same:
            member["operator", r.name] = len(nodes)
        first = same[0]
        detail = f"{common_pattern([r.module for r in same])} {first.source.rsplit('/', 1)[-1]} {first.strategy}".strip()
        layout = first.results[0] if first.results else Layout(())
        label = first.name if alone else first.primitive
        nodes.append(Node(label, detail, "operator", layout, len(same), sum(r.seconds for r in same)))
    for path, same in fold_tensors(plan.outputs):
        for r in same:
            member["output", r.path] = len(nodes)
        nodes.append(
            Node(path, f"{same[0].dtype}{list(same[0].shape)}", "output", same[0].layout, len(same), 0.0)
        )
    return nodes, member


def _shown_nodes(plan: PlanRecord, nodes: list[Node], member: dict[tuple[str, str], int]) -> set[int]:
    """The nodes to show: all if there are few, else arguments, results, and operators that take time or communicate."""
    if len(nodes) <= MAX_UNFOLDED_NODES:
        return set(range(len(nodes)))
    whole = plan.cost.compute or 1.0
    keep = {i for i, n in enumerate(nodes) if n.kind != "operator" or n.seconds >= MIN_COMPUTE_SHARE * whole}
    keep |= {member["operator", r.name] for r in plan.operators if r.collectives}
    keep |= {member["operator", r.name] for r in plan.boundaries}
    moved = {c.tensor for c in plan.collectives}
    keep |= {member["operator", r.name] for r in plan.operators if moved & set(r.writes)}
    return keep


def _contract_hidden(
    links: dict[tuple[int, int], dict[int, CollectiveRow]], keep: set[int], n: int
) -> dict[tuple[int, int], list[CollectiveRow]]:
    """Links between shown nodes; a path through hidden nodes becomes one link."""
    after: list[dict[int, dict[int, CollectiveRow]]] = [{} for _ in range(n)]
    for (a, b), moved in links.items():
        after[a][b] = moved
    out: dict[tuple[int, int], dict[int, CollectiveRow]] = {}
    for a in keep:
        seen: set[int] = set()
        todo = [(b, moved) for b, moved in after[a].items()]
        while todo:
            b, moved = todo.pop()
            if b in keep:
                out.setdefault((a, b), {}).update(moved)
            elif b not in seen:
                seen.add(b)
                todo += [(c, {**moved, **more}) for c, more in after[b].items()]
    return {key: list(moved.values()) for key, moved in sorted(out.items())}


def edge_label(m: CollectiveGroup) -> str:
    """One line for the collectives of an edge."""
    return f"{m.name} {m.local}: {m.figures}"


def graphviz_dot(plan: PlanRecord) -> str:
    """The folded graph in Graphviz' language."""
    g = operator_graph(plan)
    palette: dict[str, int] = {}
    lines = [
        f"digraph {_quoted(plan.name)} {{",
        "  rankdir=TB; node [shape=box, style=filled, fontname=Helvetica];",
    ]
    for i, n in enumerate(g.nodes):
        hue = palette.setdefault(str(n.layout), len(palette)) * 0.381966 % 1.0
        times = f" x{n.count}" if n.count > 1 else ""
        shape = ", shape=ellipse" if n.kind != "operator" else ""
        label = _quoted(f"{n.label}{times}\n{n.layout}")
        lines.append(
            f'  n{i} [label={label}, tooltip={_quoted(n.detail)}, fillcolor="{hue:.3f} 0.25 1.0"{shape}];'
        )
    for e in g.edges:
        label = (
            f" [label={_quoted(chr(10).join(map(edge_label, e.collectives)))}, color=red]"
            if e.collectives
            else ""
        )
        lines.append(f"  n{e.source} -> n{e.target}{label};")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
