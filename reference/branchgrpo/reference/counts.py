"""What a method costs a prompt, counted from its plan alone (spec: plan)."""

from dataclasses import dataclass
from itertools import pairwise

from branchgrpo.reference.depth_window import window_at
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.family_counts import anchor_calls, continuation_calls, public_calls
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.subsets import trained_subset


@dataclass(frozen=True)
class Counts:
    """Counts a prompt (PLAN-4, PLAN-5): kept = after pruning; trained = kept and allowed by the causal credit rule.

    ``nfe_nodes`` and ``nfe_calls`` are nodes and denoiser calls a leaf. The last three are of plan families only.
    """

    steps: int
    leaves: int
    nodes: int
    edges: int
    denoiser_calls: int
    kept_edges: int
    kept_parents: int
    trained_edges: int
    trained_parents: int
    calls_public: int | None = None
    calls_shared: int | None = None
    calls_shared_stopped_anchor: int | None = None

    @property
    def nfe_nodes(self) -> float:
        """Nodes a leaf."""
        return self.nodes / self.leaves

    @property
    def nfe_calls(self) -> float:
        """Denoiser calls a leaf."""
        return self.denoiser_calls / self.leaves


def staying_leaves(plan: Plan, rules: tuple[PruningRule, ...]) -> tuple[int, bool]:
    """Leaves a tree that width rules let stay, and whether the others lose their split edge too.

    Clause: PLAN-5, PRUNE-3, PRUNE-4.

    Raises:
        PlanError: several width rules: which leaves both keep depends on the rewards.
    """
    width = [rule for rule in rules if not isinstance(rule, DepthWindow)]
    if len(width) > 1:
        raise PlanError("pruning", width, "at most one width rule, for a count that no reward changes")
    if not width:
        return plan.leaves, False
    if not plan.splits or plan.trained_fraction < 1.0:
        raise PlanError(
            "pruning", width[0], "no width rule for a plan without a split, or with a trained fraction below 1"
        )
    parents = plan.level_sizes[plan.splits[-1]]
    stay = parents if isinstance(width[0], ParentTop1) else min(2 * width[0].b, plan.leaves)
    if isinstance(width[0], ExtremeB) and width[0].drop_split_edges and stay < plan.leaves:
        raise PlanError("pruning", width[0], "without drop_split_edges, for a count that no reward changes")
    return stay, width[0].drop_split_edges


def kept_by_depth(plan: Plan, rules: tuple[PruningRule, ...], iteration: int) -> list[tuple[int, int]]:
    """(kept edges, their distinct parents) of one tree for child depth 1 … T.  Clause: PRUNE-1 … PRUNE-5."""
    stay, drop_split = staying_leaves(plan, rules)
    windows = [window_at(rule, plan.steps, iteration) for rule in rules if isinstance(rule, DepthWindow)]
    last_split = plan.splits[-1] if plan.splits else plan.steps
    kept = []
    for depth, (parents, nodes) in enumerate(pairwise(plan.level_sizes), start=1):
        if any(depth in window for window in windows):
            kept.append((0, 0))
        elif depth > last_split + 1 or (depth == last_split + 1 and drop_split):
            kept.append((min(stay, nodes), min(stay, parents)))
        else:
            kept.append((nodes, parents))
    return kept


def subset_counts(plan: Plan, kept: list[tuple[int, int]], iteration: int) -> tuple[int, int]:
    """(trained edges, their parents) of one tree whose chains train random subsets: those of seed 0, prompt 0.

    Clause: PLAN-5, PLAN-7.  Edges that a depth window drops do not count.
    """
    chosen = {leaf: trained_subset(plan, 0, iteration, 0, 0, leaf) for leaf in range(plan.leaves)}
    edges = [(step, leaf) for leaf, steps in chosen.items() for step in steps if kept[step][0]]
    parents = {(step, leaf * plan.level_sizes[step] // plan.leaves) for step, leaf in edges}
    return len(edges), len(parents)


def count_plan(plan: Plan, rules: tuple[PruningRule, ...] = (), iteration: int = 0) -> Counts:
    """Counts of a plan, all roots of one prompt.  Clause: PLAN-4 … PLAN-6, DIV-P1."""
    kept = kept_by_depth(plan, rules, iteration)
    trained = [pair if step in plan.trainable_steps else (0, 0) for step, pair in enumerate(kept)]
    if plan.trained_fraction < 1.0:
        trained = [subset_counts(plan, kept, iteration)]
    sizes, roots = plan.level_sizes, plan.roots
    return Counts(
        steps=plan.steps,
        leaves=roots * plan.leaves,
        nodes=roots * sum(sizes),
        edges=roots * sum(sizes[1:]),
        denoiser_calls=roots * sum(sizes[:-1]),
        kept_edges=roots * sum(edges for edges, _ in kept),
        kept_parents=roots * sum(parents for _, parents in kept),
        trained_edges=roots * sum(edges for edges, _ in trained),
        trained_parents=roots * sum(parents for _, parents in trained),
    )


def count_family(family: PlanFamily) -> Counts:
    """Counts of a plan family: anchor, children and equal calls shared.  Clause: SING-4, GRAN-3, PLAN-5.

    Every state that is not a leaf is called once.  States of one index that different λ reach with jumps of different
    length are different nodes, also where the call behind them is one.
    """
    continued, anchor = continuation_calls(family), anchor_calls(family)
    roots, perturbed = family.roots, family.roots * len(family.ks) * family.group
    leaves = perturbed * len(family.granularities)
    nodes = anchor + continued + leaves
    return Counts(
        steps=family.steps,
        leaves=leaves,
        nodes=nodes,
        edges=nodes - roots,
        denoiser_calls=anchor + continued,
        kept_edges=nodes - roots,
        kept_parents=anchor + continued,
        trained_edges=perturbed,
        trained_parents=roots * len(family.ks),
        calls_public=public_calls(family),
        calls_shared=roots * family.steps + continued,
        calls_shared_stopped_anchor=anchor + continued,
    )


def count(method: Method, iteration: int = 0, seed: int = 0) -> Counts:
    """Counts of a method at an iteration.  Clause: PLAN-5."""
    plan = method.plan_at(iteration, seed)
    if isinstance(plan, PlanFamily):
        return count_family(plan)
    return count_plan(plan, method.pruning, iteration)
