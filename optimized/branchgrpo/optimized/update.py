"""Parameter gradients of the objective, in bounded memory (spec: objective)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog
from branchgrpo.optimized.objective import Policies, Terms, batch_terms
from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.work import Work, micro_batches, plan_work, step_weights
from branchgrpo.reference.errors import InputError, OptionError, is_integer
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


def trained_weights(trees: Sequence[Tree], work: Sequence[Work], options: Objective) -> dict[int, float]:
    """Step weights over the steps that the update trains.  Clause: OBJ-6."""
    steps = [frozenset(w.step for w in work if w.tree == i) for i in range(len(trees))]
    return step_weights([tree.plan for tree in trees], steps, options.edge_weights)


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
    work, finite = plan_work(trees, kept, options), FiniteLog()
    weights = trained_weights(trees, work, options)
    terms = batch_terms(trees, Policies(model, reference_model, condition), advantages, work, weights, options, finite)
    finite.verify(trees[0].prompts)
    return terms.value


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
) -> UpdateStats:
    """Add the gradient of −J to the model's parameters, one forward and backward a parent.

    Clause: OBJ-1 … OBJ-7.  The sum over micro-batches is the gradient of the whole objective, whatever their size.
    The old log-probabilities are the trees' own, so inner epochs are repeated calls.

    Args:
        trees, model, condition, advantages, kept, options, reference_model: see ``objective``.
        micro_batch: most parents a forward/backward; None takes all at once.
        total_trees: trees that J averages over, where these are some of them only; None counts these.

    Returns:
        J and what the ratios were. The caller steps the optimiser.

    Raises:
        InputError, PlanError: before the first forward.
        ModelError: a non-finite velocity; raised after the last backward, so discard the gradients.
    """
    check_update(trees, condition, advantages, kept, options, reference_model)
    if micro_batch is not None and (not is_integer(micro_batch) or micro_batch < 1):
        raise OptionError("micro_batch", micro_batch, "None or an integer ≥ 1")
    work, finite = plan_work(trees, kept, options, total_trees), FiniteLog()
    weights = trained_weights(trees, work, options)
    policies = Policies(model, reference_model, condition)
    done = []
    for batch in micro_batches(work, micro_batch):
        terms = batch_terms(trees, policies, advantages, batch, weights, options, finite)
        (-terms.value).backward()  # type: ignore[no-untyped-call]
        done.append(Terms(terms.value.detach(), terms.kl, terms.ratios))
    finite.verify(trees[0].prompts)
    return summarise(done, sum(len(w.parents) for w in work), options)


def summarise(done: Sequence[Terms], parents: int, options: Objective) -> UpdateStats:
    """Statistics of an accumulation, with one synchronisation."""
    ratios = torch.cat([terms.ratios for terms in done])
    outside = (ratios < 1.0 - options.clip_low) | (ratios > 1.0 + options.clip_high)
    value, kl = (torch.stack([getattr(t, name) for t in done]).sum() for name in ("value", "kl"))
    numbers = torch.stack([value, outside.double().mean(), ratios.mean(), ratios.min(), ratios.max(), kl]).tolist()
    objective, clipped, mean, low, high, divergence = numbers
    return UpdateStats(objective, clipped, mean, low, high, divergence, len(ratios), parents, len(done))
