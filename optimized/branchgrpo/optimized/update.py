"""Parameter gradients of the objective, in bounded memory (spec: objective)."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, velocity
from branchgrpo.optimized.objective import Policies, Terms, batch_terms
from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.table import table_batches, tabulate
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.work import Work, plan_work, step_weights, trainable_masks
from branchgrpo.reference.errors import BranchGRPOError, InputError, OptionError, is_integer
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition, VelocityModel


@dataclass(frozen=True)
class UpdateStats:
    """What one accumulation did.

    Attributes:
        objective: J; the loss is −J.
        clip_fraction: share of edges whose ratio is outside the clip range.
        ratio_mean, ratio_min, ratio_max: of ρ over the edges.
        kl: mean KL to the frozen reference, in J's reduction; 0 without one.
        edges, parents: trained edges and their distinct parents (one forward and backward each).
        batches: micro-batches.
    """

    objective: float
    clip_fraction: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    kl: float
    edges: int
    parents: int
    batches: int

    @property
    def loss(self) -> float:
        """−J."""
        return -self.objective


def check_update(
    trees: Sequence[Tree],
    condition: Condition,
    advantages: Sequence[Levels],
    kept: Sequence[Masks],
    options: Objective,
    reference_model: VelocityModel | None,
) -> None:
    """Everything that can be checked before the first forward.  Clause: ERR-2, ERR-3, OBJ-5.

    Raises:
        InputError: lengths that do not match, or a missing or unused reference model.
    """
    if not trees:
        raise InputError("trees", [], "at least one")
    for name, values in (("advantages", advantages), ("kept", kept)):
        if len(values) != len(trees):
            raise InputError(f"len({name})", len(values), f"{len(trees)}, one entry a tree bundle")
    for i, tree in enumerate(trees):
        if len(condition) != len(tree.prompts):
            raise InputError("len(condition)", len(condition), f"{len(tree.prompts)}, one item a prompt of trees[{i}]")
        if tree.prompts != trees[0].prompts:
            raise InputError(f"trees[{i}].prompts", tree.prompts, "those of trees[0], in one order")
        expected = tuple(len(tree.prompts) * tree.plan.roots * n for n in tree.plan.level_sizes)
        if tuple(level.numel() for level in advantages[i]) != expected:
            raise InputError(
                f"advantages[{i}]", [tuple(a.shape) for a in advantages[i]], "[prompts, R·n_d] at every depth"
            )
    if (reference_model is not None) != (options.kl > 0):
        given = None if reference_model is None else "given"
        raise InputError("reference_model", given, "given if and only if objective.kl > 0")


def trained_stds(trees: Sequence[Tree], kept: Sequence[Masks], ranks: Ranks | None = None) -> dict[int, float]:
    """Std of every step that these trees train, or those of all ranks.  Clause: OBJ-6."""
    stds: dict[int, float] = {}
    for tree, masks in zip(trees, kept, strict=True):
        of_step, trainable = tree.stds, trainable_masks(tree.plan, masks)
        stds |= {step: of_step[step] for step, mask in trainable.items() if bool(mask.any())}
    return stds if ranks is None else ranks.merged(stds)


def trained_weights(
    trees: Sequence[Tree], kept: Sequence[Masks], options: Objective, ranks: Ranks | None = None
) -> dict[int, float]:
    """Step weights over the steps that the whole update trains.  Clause: OBJ-6."""
    return step_weights(trained_stds(trees, kept, ranks), options.edge_weights)


def objective(
    trees: Sequence[Tree],
    model: VelocityModel,
    condition: Condition,
    advantages: Sequence[Levels],
    kept: Sequence[Masks],
    options: Objective,
    reference_model: VelocityModel | None = None,
) -> Float64[Tensor, ""]:
    """J = mean over trees of the reduced edge terms: to be *maximised*; differentiable, all activations held.

    Clause: OBJ-1 … OBJ-7.  Source: BranchGRPO Eq. 9; G²RPO Eq. 7 (its trees are the members of the plan family).

    Args:
        trees: one a plan, of the same prompts; for a plan family the members (k, λ₀).
        model: v_θ.
        condition: one item a prompt.
        advantages: for each tree ``[prompts, R·n_d]`` a depth.
        kept: for each tree the edges that stay, entry d − 1 for child depth d.
        options: clip range, reduction over edges, step weights, β_KL.
        reference_model: frozen policy; given if and only if β_KL > 0.

    Raises:
        InputError, PlanError, ModelError.
    """
    check_update(trees, condition, advantages, kept, options, reference_model)
    work, finite = plan_work(trees, kept, options), FiniteLog(trees[0].dtype)
    table = tabulate(trees, advantages, work, trained_weights(trees, kept, options))
    terms, pullback = batch_terms(trees, Policies(model, reference_model, condition), work, table, options, finite)
    finite.verify(trees[0].prompts)
    return pullback.attached(terms.value)


@dataclass(frozen=True, eq=False)
class Parallel:
    """How an update is spread over processes.

    Attributes:
        ranks: the processes; each calls ``accumulate_gradients`` with its own trees, or with the same ones.
        owned: for every tree the edges that are this process's work, where all processes hold the same trees
            (``sharing.owned_edges``); None where each has prompts of its own.
        no_sync: context in which the model's wrapper holds gradient averaging back (DDP's ``no_sync``), entered for
            all micro-batches but the last.
    """

    ranks: Ranks
    owned: Sequence[Masks] | None = None
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext


def accumulate_gradients(
    trees: Sequence[Tree],
    model: VelocityModel,
    condition: Condition,
    advantages: Sequence[Levels],
    kept: Sequence[Masks],
    options: Objective,
    *,
    micro_batch: int | None = None,
    reference_model: VelocityModel | None = None,
    total_trees: int | None = None,
    all_stds: Mapping[int, float] | None = None,
    parallel: Parallel | None = None,
) -> UpdateStats:
    """Add the gradient of −J to the model's parameters, one forward and backward a parent.

    Clause: OBJ-1 … OBJ-7.  The sum over micro-batches is the gradient of the whole objective, whatever their size.
    The old log-probabilities are the trees' own, so inner epochs are repeated calls.

    Args:
        trees, model, condition, advantages, kept, options, reference_model: see ``objective``.
        micro_batch: most parents a forward/backward; None takes all at once.
        total_trees: trees that J averages over, where these are some of them only; None counts these, or those of
            all ranks.
        all_stds: ``trained_stds`` of the whole update, where these are some of its trees only; None takes these trees',
            or those of all ranks.
        parallel: several processes: same number of micro-batches on each, one objective, one verdict.

    Returns:
        J and what the ratios were, over all ranks. The caller steps the optimiser.

    Raises:
        InputError, PlanError: before the first forward; with ranks, the lowest rank's on every rank.
        ModelError: nothing to train in the model; or a non-finite velocity, raised after the last backward, so discard
            the gradients.
    """
    ranks = parallel.ranks if parallel else None
    check = (trees, condition, advantages, kept, options, reference_model)
    work = agreed(lambda: checked_work(*check, micro_batch, parallel.owned if parallel else None), ranks)
    stds = trained_stds(trees, kept, ranks) if all_stds is None else all_stds
    weights = step_weights(stds, options.edge_weights)
    scale, done = objective_scale(trees, total_trees, parallel), []
    batches = list(table_batches(tabulate(trees, advantages, work, weights), work, micro_batch)) if work else []
    rounds = len(batches) if ranks is None else ranks.largest(len(batches))
    finite, policies = FiniteLog(trees[0].dtype), Policies(model, reference_model, condition)
    for i in range(rounds):
        with nullcontext() if parallel is None or i == rounds - 1 else parallel.no_sync():
            if i >= len(batches):
                idle(trees, policies)
                continue
            terms, pullback = batch_terms(trees, policies, *batches[i], options, finite)
            pullback.backward(-scale.gradient)
            done.append(terms)
    finite.verify(trees[0].prompts, ranks)
    return summarise(done, scale.value, sum(len(w.parents) for w in work), options, ranks)


def checked_work(
    trees: Sequence[Tree],
    condition: Condition,
    advantages: Sequence[Levels],
    kept: Sequence[Masks],
    options: Objective,
    reference_model: VelocityModel | None,
    micro_batch: int | None,
    owned: Sequence[Masks] | None,
) -> list[Work]:
    """The work of an update whose input is in order, its coefficients for one tree.

    Raises:
        InputError, OptionError, PlanError: see ``accumulate_gradients``.
    """
    check_update(trees, condition, advantages, kept, options, reference_model)
    if micro_batch is not None and (not is_integer(micro_batch) or micro_batch < 1):
        raise OptionError("micro_batch", micro_batch, "None or an integer ≥ 1")
    return plan_work(trees, kept, options, 1, owned)


def agreed(prepare: Callable[[], list[Work]], ranks: Ranks | None) -> list[Work]:
    """What ``prepare`` returns, or, on every rank, the error that the lowest rank's raised."""
    if ranks is None:
        return prepare()
    work, found = [], None
    try:
        work = prepare()
    except BranchGRPOError as error:
        found = error
    ranks.agree(found)
    return work


@dataclass(frozen=True)
class Scale:
    """By what a rank's sum over its trees is multiplied: for J's value, and for the gradient it leaves behind."""

    value: float
    gradient: float


def objective_scale(trees: Sequence[Tree], total_trees: int | None, parallel: Parallel | None) -> Scale:
    """1/trees, and that times the number of ranks where the wrapper averages over them.  Clause: OBJ-7."""
    total = total_trees or sum(len(tree.prompts) * tree.plan.roots for tree in trees)
    if parallel is None:
        return Scale(1.0 / total, 1.0 / total)
    if parallel.owned is None and total_trees is None:
        total = parallel.ranks.total(total)
    return Scale(1.0 / total, (parallel.ranks.size if parallel.ranks.averaged else 1) / total)


def idle(trees: Sequence[Tree], policies: Policies) -> None:
    """A forward and backward that add nothing, for a rank with fewer micro-batches: calls are collectives."""
    tree, row = trees[0], torch.zeros(1, dtype=torch.int64)
    x = tree.states[0].flatten(0, 1)[:1].to(tree.device, tree.dtype)
    sigma = torch.ones(1, dtype=x.dtype, device=x.device)
    condition = policies.condition.gather(row.to(x.device))
    v = velocity(policies.model, x, sigma, condition, 0)
    if policies.reference is not None:
        with torch.no_grad():
            velocity(policies.reference, x, sigma, condition, 0)
    (0.0 * v.double().sum()).backward()  # type: ignore[no-untyped-call]


def summarise(
    done: Sequence[Terms], scale: float, parents: int, options: Objective, ranks: Ranks | None
) -> UpdateStats:
    """Statistics of an accumulation, with one synchronisation; over all ranks."""
    ratios = torch.cat([terms.ratios for terms in done]) if done else torch.zeros(0, dtype=torch.float64)
    outside = (ratios < 1.0 - options.clip_low) | (ratios > 1.0 + options.clip_high)
    own = [0.0, 0.0, 0.0, 0.0, math.inf, -math.inf]
    if done:
        value = torch.stack([terms.value for terms in done]).sum() * scale
        divergences = [terms.kl for terms in done if terms.kl is not None]
        kl = torch.stack(divergences).sum() * scale if divergences else torch.zeros_like(value)
        numbers = [value, kl, ratios.sum(), outside.double().sum(), ratios.min(), ratios.max()]
        own = torch.stack(numbers).tolist()
    counts = (len(ratios), parents, len(done))
    mine = [(own, counts)] if ranks is None else ranks.everyone((own, counts))
    columns = list(zip(*(numbers for numbers, _ in mine), strict=True))
    edges, parents, batches = (sum(entries) for entries in zip(*(counts for _, counts in mine), strict=True))
    j, divergence, total, clipped = (math.fsum(column) for column in columns[:4])
    low, high = min(columns[4]), max(columns[5])
    return UpdateStats(j, clipped / edges, total / edges, low, high, divergence, edges, parents, batches)
