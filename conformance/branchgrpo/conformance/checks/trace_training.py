"""Trace checks of pruning, the trained edges and their coefficients in the objective."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, needs, some, trace_check
from branchgrpo.conformance.checks.levels import by_tree
from branchgrpo.conformance.checks.limits import COEFFICIENT
from branchgrpo.conformance.checks.trace_normalization import unclipped
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1, PruningRule


def leaf_keys(record: Record) -> Float64[Tensor, "prompts roots leaves"]:
    """Keys of PRUNE-2: the weighted reward of a single model, else the advantage before clipping."""
    assert record.rewards is not None
    if len(record.reward_models) == 1:
        return by_tree(record, record.rewards[..., 0] * record.reward_models[0].weight)
    return by_tree(record, unclipped(record, record.plan.steps))


def order(keys: Float64[Tensor, "leaves"]) -> list[int]:
    """Leaves by descending key, then ascending index."""
    return sorted(range(len(keys)), key=lambda leaf: (-float(keys[leaf]), leaf))


def staying(record: Record, rule: ParentTop1 | ExtremeB, keys: Float64[Tensor, "leaves"]) -> set[int]:
    """Leaves of one tree that a width rule lets stay."""
    if isinstance(rule, ExtremeB):
        ranked = order(keys)
        return {*ranked[: rule.b], *ranked[-rule.b :]}
    factor = record.plan.branching[record.plan.splits[-1]]
    families = [range(start, start + factor) for start in range(0, len(keys), factor)]
    return {min(family, key=lambda leaf: (-float(keys[leaf]), leaf)) for family in families}


def width_kept(record: Record, rule: ParentTop1 | ExtremeB, depth: int) -> Bool[Tensor, "prompts nodes"]:
    """Edges of a depth that a width rule keeps."""
    keys = leaf_keys(record)
    first = record.plan.splits[-1] + (1 if rule.drop_split_edges else 2)
    if depth < first:
        return torch.ones(len(record.prompts), record.nodes(depth), dtype=torch.bool)
    rows = [[leaf in staying(record, rule, own) for own in prompt for leaf in range(len(own))] for prompt in keys]
    return torch.tensor(rows)


def depth_window(rule: DepthWindow, steps: int, iteration: int) -> range:
    """W(t) of PRUNE-5."""
    stop = rule.stop if rule.stop is not None else (steps if rule.direction == 1 else 1)
    leading = rule.start + rule.size - 1 if rule.direction == 1 else rule.start
    first = rule.start + rule.direction * min(iteration // rule.period, rule.direction * (stop - leading))
    return range(max(1, first), min(steps, first + rule.size - 1) + 1)


def kept_by(record: Record, rule: PruningRule, depth: int) -> Bool[Tensor, "prompts nodes"]:
    """Edges of a depth that one rule keeps."""
    if isinstance(rule, DepthWindow):
        inside = depth in depth_window(rule, record.plan.steps, record.iteration)
        return torch.full((len(record.prompts), record.nodes(depth)), not inside)
    return width_kept(record, rule, depth)


def ruled_by(records: Sequence[Record], kind: type[PruningRule]) -> list[tuple[int, Record]]:
    """Records with rewards and masks whose only rule is of a kind."""
    found = [
        (r, record)
        for r, record in needs(records, "rewards", "values", "kept")
        if len(record.pruning) == 1 and isinstance(record.pruning[0], kind)
    ]
    return some(found, f"{kind.__name__} as its only rule")


def compare_kept(r: int, record: Record) -> None:
    """Dumped masks against the declared rules."""
    for depth, kept in record.levels["kept"].items():
        wanted = torch.ones_like(kept)
        for rule in record.pruning:
            wanted &= kept_by(record, rule, depth)
        wrong = int((kept != wanted).sum())
        expect(
            wrong == 0,
            f"record {r}, iteration {record.iteration}, depth {depth}: {wrong} edges kept or dropped wrongly",
        )


@trace_check
@clause("PRUNE-1")
def only_rules_drop_edges(records: Sequence[Record]) -> None:
    """Without rules every edge is kept; with several, an edge that no rule drops."""
    found = [(r, record) for r, record in needs(records, "rewards", "values", "kept") if len(record.pruning) != 1]
    for r, record in some(found, "no pruning rule, or several"):
        compare_kept(r, record)


@trace_check
@clause("PRUNE-3")
def parent_top1_keeps_the_better_child(records: Sequence[Record]) -> None:
    """Of the children of each last-split parent the one with the best leaf keeps its chain."""
    for r, record in ruled_by(records, ParentTop1):
        compare_kept(r, record)


@trace_check
@clause("PRUNE-4")
def extreme_b_keeps_best_and_worst(records: Sequence[Record]) -> None:
    """The b best and the b worst leaves of a tree keep their chains."""
    for r, record in ruled_by(records, ExtremeB):
        compare_kept(r, record)


@trace_check
@clause("PRUNE-5")
def depth_windows_are_where_they_should_be(records: Sequence[Record]) -> None:
    """The dropped depths are the window of the iteration, in child depths."""
    for r, record in ruled_by(records, DepthWindow):
        compare_kept(r, record)


@trace_check
@clause("PLAN-6")
def trained_edges_can_change_the_reward(records: Sequence[Record]) -> None:
    """No edge is trained whose step is deterministic, untrained, or the last one under ``denoised``."""
    for r, record in needs(records, "trainable"):
        for depth, trainable in record.levels["trainable"].items():
            if depth - 1 not in record.plan.trainable_steps:
                wrong = int(trainable.sum())
                expect(wrong == 0, f"record {r}, depth {depth}: {wrong} edges trained without a say in the reward")


@trace_check
@clause("OBJ-3")
def trained_edges_are_those_that_survived(records: Sequence[Record]) -> None:
    """E is the kept edges of trainable steps; edges with advantage 0 stay in."""
    whole = [(r, record) for r, record in needs(records, "trainable", "kept") if record.plan.trained_fraction == 1.0]
    for r, record in some(whole, "every trainable step trained"):
        for depth, trainable in record.levels["trainable"].items():
            allowed = depth - 1 in record.plan.trainable_steps
            wanted = record.levels["kept"][depth] & allowed
            wrong = int((trainable != wanted).sum())
            expect(wrong == 0, f"record {r}, depth {depth}: {wrong} edges in or out of the loss wrongly")


@trace_check
@clause("PLAN-7")
def chains_train_their_fraction(records: Sequence[Record]) -> None:
    """With a fraction f below 1 each chain trains ⌊f·S⌋ of the S trainable steps, and chains differ."""
    found = [(r, record) for r, record in needs(records, "trainable") if record.plan.trained_fraction < 1.0]
    for r, record in some([(r, x) for r, x in found if not x.pruning], "a trained fraction below 1 without pruning"):
        steps = record.plan.trainable_steps
        size = max(1, int(record.plan.trained_fraction * len(steps)))
        chains = torch.stack([record.levels["trainable"][step + 1] for step in steps], dim=-1).flatten(0, 1)
        counts = chains.sum(dim=-1)
        expect(bool((counts == size).all()), f"record {r}: chains train {counts.tolist()} steps, expected {size} each")
        if len(chains) >= 8 and 0 < size < len(steps):
            expect(bool((chains != chains[0]).any()), f"record {r}: every chain trains the same steps")


@trace_check
@clause("OBJ-3")
def trained_edges_have_an_advantage(records: Sequence[Record]) -> None:
    """Some trained edge has an advantage that is not 0, where rewards differ."""
    for r, record in needs(records, "rewards", "advantages", "trainable"):
        assert record.rewards is not None
        if float(record.rewards.amax() - record.rewards.amin()) == 0:
            continue
        used = [
            bool((record.levels["advantages"][depth][mask] != 0).any())
            for depth, mask in record.levels["trainable"].items()
        ]
        expect(any(used), f"record {r}: rewards differ, every trained edge has the advantage 0")


def tree_coefficients(record: Record) -> Iterator[tuple[int, Float64[Tensor, "prompts nodes"]]]:
    """∂J/∂log p of every depth for ρ = 1: w·A over the tree's normaliser and the number of trees (OBJ-4, OBJ-7)."""
    trainable = record.levels["trainable"]
    trees = len(record.prompts) * record.plan.roots
    sizes = torch.stack([by_tree(record, trainable[d]).sum(dim=-1) for d in record.depths("edges")])
    depths = (sizes > 0).sum(dim=0)
    stds = {depth: float(record.stds[depth - 1]) for depth, mask in trainable.items() if bool(mask.any())}
    mean_std = sum(stds.values()) / max(len(stds), 1)
    for depth in record.depths("stochastic"):
        size = sizes[depth - 1] if record.objective.reduction == "depth_mean" else sizes.sum(dim=0)
        count = size * depths if record.objective.reduction == "depth_mean" else size
        weight = stds.get(depth, 0.0) / mean_std if record.objective.edge_weights == "std" else 1.0
        own = by_tree(record, record.levels["advantages"][depth]) * by_tree(record, trainable[depth])
        yield depth, (weight * own / count.clamp(min=1).unsqueeze(-1) / trees).flatten(1)


def with_coefficients(records: Sequence[Record], family: bool = False) -> list[tuple[int, Record]]:
    """Records of plans, or of families, that dumped the coefficients of their log-probabilities and have no KL."""
    found = needs(records, "advantages", "trainable", "gradients")
    chosen = [(r, x) for r, x in found if (x.member is not None) is family and x.objective.kl == 0]
    return some(chosen, f"coefficients of a {'family' if family else 'plan'}")


def largest(record: Record) -> float:
    """The largest coefficient that is due."""
    return max(max(float(level.abs().max()) for _, level in tree_coefficients(record)), 1e-300)


@trace_check
@clause("PRUNE-6")
def dropped_edges_have_no_gradient(records: Sequence[Record]) -> None:
    """An edge that is not in E, and one that pruning drops, has the coefficient 0."""
    for r, record in with_coefficients(records):
        kept = record.levels.get("kept", {})
        for depth, found in record.levels["gradients"].items():
            inside = record.levels["trainable"][depth]
            outside = found[~(inside & kept.get(depth, torch.ones_like(inside)))]
            leak = float(outside.abs().max()) / largest(record) if outside.numel() else 0.0
            expect(
                leak <= COEFFICIENT,
                f"record {r}, depth {depth}: an edge dropped or outside E has {leak:.3g} of the largest coefficient",
            )


@trace_check
@clause("OBJ-2")
def coefficients_have_the_sign_of_the_advantage(records: Sequence[Record]) -> None:
    """On policy ∂J/∂log p is a positive multiple of the advantage for every edge of a tree and depth."""
    for r, record in with_coefficients(records):
        for depth, found in record.levels["gradients"].items():
            advantage = record.levels["advantages"][depth] * record.levels["trainable"][depth]
            strong = advantage.abs() > 1e-3 * max(float(advantage.abs().max()), 1e-300)
            wrong = int((found[strong].sign() != advantage[strong].sign()).sum())
            expect(wrong == 0, f"record {r}, depth {depth}: {wrong} coefficients without the sign of their advantage")


@trace_check
@clause("OBJ-4")
def coefficients_are_means_over_the_kept_edges(records: Sequence[Record]) -> None:
    """∂J/∂log p is w·A divided by the normaliser of the declared reduction and by the number of trees."""
    for r, record in with_coefficients(records):
        for depth, wanted in tree_coefficients(record):
            error = float((record.levels["gradients"][depth] - wanted).abs().max()) / largest(record)
            expect(error <= COEFFICIENT, f"record {r}, depth {depth}: coefficients off by {error:.3g} of the largest")


@trace_check
@clause("SING-6")
def members_weigh_the_same(records: Sequence[Record]) -> None:
    """In one update over all k the coefficients are A over G, the number of ks and the number of trees."""
    found = with_coefficients(records, family=True)
    for r, record in found:
        ks = sum(record.iteration == other.iteration for _, other in found)
        for depth, wanted in tree_coefficients(record):
            error = float((record.levels["gradients"][depth] - wanted / ks).abs().max()) / max(
                largest(record) / ks, 1e-300
            )
            expect(
                error <= COEFFICIENT,
                f"record {r}, member {record.member}: coefficients off by {error:.3g} of the largest",
            )
