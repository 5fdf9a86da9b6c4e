"""What an iteration's trees say about its health: pure functions of trees, rewards, advantages and update statistics.

Every number is a moment of some set of numbers, so parts of a batch and ranks are merged exactly: one process and
several measure the same, to rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import EQUAL
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan
from branchgrpo.training.monitors.moments import Moments, Tally, merge


@runtime_checkable
class Part(Protocol):
    """Trees of one plan with what followed from them; several make up an iteration.

    Attributes:
        tree: as grown.
        rewards: ``[prompts, leaves, models]`` float64.
        values: fused values, ``[prompts, R·n_d, models]`` a depth.
        advantages: ``[prompts, R·n_d]`` a depth.
    """

    @property
    def tree(self) -> Tree:
        """As grown."""
        ...

    @property
    def rewards(self) -> Tensor:
        """A reward a leaf and model."""
        ...

    @property
    def values(self) -> Levels:
        """A fused value a node and model."""
        ...

    @property
    def advantages(self) -> Levels:
        """An advantage a node."""
        ...


def group_count(plan: Plan, options: Normalization) -> int:
    """Groups a prompt within which samples are compared: its trees, or the prompt as a whole.

    A tree with a single leaf can be compared with nothing of its own, so then the prompt is the group, too.
    """
    return plan.roots if options.mean_scope == "tree" and plan.leaves > 1 else 1


def grouped(level: Tensor, groups: int) -> Tensor:
    """``[prompts, nodes, *rest]`` → ``[prompts·groups, nodes/groups, *rest]``."""
    return torch.unflatten(level, 1, (groups, -1)).flatten(0, 1)


def reward_tally(
    rewards: Float64[Tensor, "prompts leaves models"], names: Sequence[str], weights: Sequence[float], groups: int
) -> Tally:
    """Rewards by model, their std within groups by model, and which groups teach nothing.

    A group is degenerate if its rewards are equal (NORM-4) under every model that trains.
    """
    tally = {f"reward/{name}": Moments.of(rewards[..., m]) for m, name in enumerate(names)}
    table = grouped(rewards, groups)
    if table.shape[1] < 2:
        return tally
    spread = table.std(dim=1, correction=0)
    tally |= {f"reward_spread/{name}": Moments.of(spread[:, m]) for m, name in enumerate(names)}
    top, bottom = table.amax(1), table.amin(1)
    equal = top - bottom <= EQUAL * torch.maximum(top.abs(), bottom.abs())
    trained = torch.tensor([weight != 0.0 for weight in weights])
    return tally | {"degenerate_groups": Moments.of(equal[:, trained].all(dim=1))}


def depth_name(depth: int) -> str:
    """How a depth is written in the name of a number; names sort as depths do."""
    return f"depth_{depth:02d}"


def spread_tally(part: Part, weights: Sequence[float], options: Normalization) -> Tally:
    """A trainable depth's advantages and the std of its fused values within groups.

    Depths whose groups hold a single node are left out: they have no spread to lose.
    """
    plan, w = part.tree.plan, torch.tensor(list(weights), dtype=torch.float64)
    groups = group_count(plan, options)
    by_size: dict[int, list[int]] = {}
    for step in plan.trainable_steps:
        if plan.roots * plan.level_sizes[step + 1] > groups:
            by_size.setdefault(plan.level_sizes[step + 1], []).append(step + 1)
    tally: Tally = {}
    for depths in by_size.values():  # depths of one size in one go
        values = torch.stack([part.values[depth] for depth in depths]) @ w
        spread = torch.unflatten(values, 2, (groups, -1)).std(dim=3, correction=0).flatten(1)
        advantages = torch.stack([part.advantages[depth] for depth in depths]).flatten(1)
        for depth, of_advantages, of_spread in zip(depths, Moments.rows(advantages), Moments.rows(spread), strict=True):
            tally[f"advantage/{depth_name(depth)}"] = of_advantages
            tally[f"value_spread/{depth_name(depth)}"] = of_spread
    return dict(sorted(tally.items()))


def path_weights(tree: Tree, options: Fusion) -> Float64[Tensor, "prompts roots leaves"]:
    """w_ℓ of every root's leaves in its fused value, which is linear in the rewards: fuse unit rewards.

    Clause: FUSE-1 … FUSE-5.
    """
    leaves = tree.plan.leaves
    unit = torch.eye(leaves, dtype=torch.float64).repeat(tree.plan.roots, 1)
    return fuse(tree, unit.expand(len(tree.prompts), -1, -1), options)[0]


def effective_samples(weights: Float64[Tensor, "*trees leaves"]) -> Float64[Tensor, "*trees"]:
    """1 / Σ w²: the number of leaves that speak for a root; all of them where the weights are equal."""
    return 1.0 / weights.square().sum(dim=-1)


def leaf_distance(leaves: Tensor, groups: int) -> Float64[Tensor, "groups"]:
    """Root of the mean squared distance of two leaves of a group: √(2·trace of the sample covariance).

    Args:
        leaves: ``[prompts, leaves, *latent]``.
        groups: a prompt.
    """
    distances = []
    for row in leaves.detach():
        for group in torch.unflatten(row.flatten(1), 0, (groups, -1)).double():
            deviations = (group - group.mean(dim=0)).square().sum()
            distances.append((2.0 * deviations / (len(group) - 1)).sqrt())
    return torch.stack(distances)


def part_tally(part: Part, method: Method, names: Sequence[str], weights: Sequence[float]) -> Tally:
    """Everything that one part's trees say; see ``measure`` for the names."""
    plan = part.tree.plan
    groups = group_count(plan, method.normalization)
    tally = reward_tally(part.rewards, names, weights, groups) | spread_tally(part, weights, method.normalization)
    if plan.leaves > 1:
        samples = effective_samples(path_weights(part.tree, method.fusion))
        tally["effective_sample_size/leaves"] = Moments.of(samples)
        tally["effective_sample_size"] = Moments.of((samples - 1.0) / (plan.leaves - 1))
    if plan.roots * plan.leaves > groups:
        tally["diversity/distance"] = Moments.of(leaf_distance(part.tree.leaves, groups))
    return tally


def finalise(tally: Tally, weights: Mapping[str, float]) -> dict[str, float]:
    """Numbers for the log and for the limits, from the tally of a whole iteration.

    Args:
        tally: merged over parts and ranks.
        weights: of the reward models, by name: those with 0 do not train, and no limit looks at them.
    """
    found: dict[str, float] = {}
    for name, moments in tally.items():
        kind, _, rest = name.partition("/")
        if kind == "reward":
            found |= {f"{name}/mean": moments.mean, f"{name}/std": moments.std}
            found |= {f"{name}/min": moments.low, f"{name}/max": moments.high}
        elif kind == "advantage":
            found[f"advantage_spread/{rest}"] = moments.std
        else:
            found[name] = moments.mean
    spreads = [found[f"reward_spread/{n}"] for n, w in weights.items() if w != 0.0 and f"reward_spread/{n}" in found]
    depths = [value for name, value in found.items() if name.startswith("advantage_spread/")]
    for name, numbers in (("reward_spread", spreads), ("advantage_spread", depths)):
        if numbers:
            found[name] = least(numbers)
    return found


def least(numbers: Sequence[float]) -> float:
    """The smallest number; NaN if one is, whatever its place."""
    return float(torch.tensor(list(numbers), dtype=torch.float64).min())


def measure(
    parts: Sequence[Part], method: Method, weights: Mapping[str, float], ranks: Ranks | None = None
) -> dict[str, float]:
    """Numbers of one iteration's trees, over all parts and ranks; a collective where there are ranks.

    ``reward/NAME/{mean,std,min,max}``; ``reward_spread/NAME``: std within a group, mean over groups, and
    ``reward_spread``: the smallest of the models that train; ``degenerate_groups``: share of groups whose rewards are
    all equal; ``advantage_spread/depth_DD``: std over all nodes of a depth, and ``advantage_spread``: its smallest;
    ``value_spread/depth_DD``: std of fused values within a group; ``effective_sample_size/leaves``: 1/Σw² of the path
    weights at the roots, and ``effective_sample_size``: 0 where one leaf has all the weight, 1 where all have the
    same; ``diversity/distance``: of two leaves of a group, in the latent space.  What a plan cannot have is left out.

    Args:
        parts: of this rank.
        method: its fusion and normalization say what belongs together.
        weights: of the reward models by name, in the order of ``rewards``' last axis.
        ranks: the processes; None for one.
    """
    own = merge(part_tally(part, method, list(weights), list(weights.values())) for part in parts)
    return finalise(merge(ranks.everyone(own)) if ranks is not None else own, weights)
