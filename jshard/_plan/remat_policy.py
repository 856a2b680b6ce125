"""What a choice of kept values is in terms of `jax.checkpoint`: the names to save in the user's own code.

A policy of `jax.checkpoint` decides by what a value is, not by which layer it is in. So a choice has an equivalent policy
where all values of one source line and type are kept, or none. The policy saves them by name; `checkpoint_name` gives
the names.
"""

from __future__ import annotations

from collections.abc import Iterable

from jshard._plan.recomputation import Choice, Recomputation, describe


def policy_text(recomputation: Recomputation, choice: Choice) -> tuple[str, ...]:
    """The equivalent policy, line by line; one line that says why, where there is none."""
    saved, again = _saved_and_made_again(recomputation, choice)
    both = [text for text in saved if text in again]
    if both:
        return (f"jax.checkpoint policy: none, since of {both[0]} some are kept and some computed again",)
    if not again:
        return ("jax.checkpoint policy: everything_saveable, the same as no jax.checkpoint",)
    if not saved:
        return ("jax.checkpoint policy: nothing_saveable, the default: jax.checkpoint(layer)",)
    names = {text: f"saved_{k}" for k, text in enumerate(saved)}
    return (
        "jax.checkpoint policy: jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("
        + ", ".join(map(repr, names.values()))
        + ")), with jax.ad_checkpoint.checkpoint_name(value, name) for",
        *(f"  {name}: {text}" for text, name in names.items()),
    )


def _saved_and_made_again(
    recomputation: Recomputation, choice: Choice
) -> tuple[Iterable[str], frozenset[str]]:
    """Descriptions of the values that are kept although they could be computed again, and of those that are not."""
    saved: dict[str, None] = {}
    again: set[str] = set()
    for k, site in enumerate(recomputation.sites):
        graph, kept = recomputation.graphs[k], choice.kept[k]
        late, run_again = graph.needed_late(kept)
        for number in late.tolist():
            v = graph.values[number]
            if v in graph.makers and graph.is_recomputable(number):
                saved[describe(v, graph.makers[v])] = None
        rerun = set(run_again.tolist())
        for v in site.needed:
            number = graph.index.get(v)
            if number is not None and int(graph.cut.maker[number]) in rerun:
                again.add(describe(v, graph.makers[v]))
    return saved, frozenset(again)
