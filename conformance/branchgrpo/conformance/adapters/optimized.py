"""The batched path behind the implementation protocol."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized import fusion, kernels, noise, normalization, pruning, rollout, singular, subsets, update
from branchgrpo.optimized.log_probability import log_probability
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import CAPABILITIES, Levels, Masks, Trace
from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.types import Reduction


def to_trace(tree: Tree) -> Trace:
    """A tree bundle that kept its means, as a trace."""
    assert tree.means is not None
    stds = torch.tensor(tree.stds, dtype=torch.float64)
    return Trace(tree.plan, tree.prompts, tree.states, tree.means, stds, tree.log_probs)


def to_tree(trace: Trace, reduction: Reduction = Reduction.MEAN) -> Tree:
    """A trace as a tree bundle; its arithmetic was done in the dtype and on the device of its means."""
    mean = trace.means[0]
    return Tree(trace.plan, trace.prompts, trace.states, trace.log_probs, mean.dtype, mean.device, reduction)


def on_cpu(levels: Levels) -> Levels:
    """Levels where the batched path computes all that follows a rollout."""
    return tuple(level.cpu() for level in levels)


class OptimizedImplementation:
    """``branchgrpo.optimized`` as an ``Implementation``.

    Attributes:
        chunk: most items a denoiser call; None puts all that is ready into one call.
        device: where the arithmetic is done.
        compile: compile the step.
    """

    name = "branchgrpo.optimized"
    spec_version = "1.0"
    capabilities = CAPABILITIES

    def __init__(self, chunk: int | None = None, device: torch.device | None = None, *, compile: bool = False) -> None:
        self.chunk = chunk
        self.device = device or torch.device("cpu")
        self.compile = compile

    def sampling(
        self,
        noise: NoiseSource,
        latent_shape: Sequence[int],
        dtypes: tuple[torch.dtype, torch.dtype],
        reduction: Reduction,
        iteration: int,
    ) -> Sampling:
        """Sampling that keeps means, on this adapter's device and with its chunk size."""
        return Sampling(
            noise,
            tuple(latent_shape),
            *dtypes,
            reduction,
            iteration,
            self.device,
            self.chunk,
            keep_means=True,
            compile=self.compile,
        )

    def transition(
        self, plan: Plan, step: int, x: Float[Tensor, "items *latent"], velocity: Float[Tensor, "items *latent"]
    ) -> tuple[Float[Tensor, "items *latent"], float]:
        """Mean and std of step ``step``."""
        coefficients = kernels.step_coefficients(plan, step)
        return kernels.transition_mean(x, velocity, coefficients), coefficients.std

    def branch_noise(
        self, shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
    ) -> Float[Tensor, "parents K *latent"]:
        """ξ_b = a·ξ₀ + c·η_b."""
        return noise.branch_noise(shared, private, spread)

    def log_probability(
        self,
        child: Float[Tensor, "items *latent"],
        mean: Float[Tensor, "items *latent"],
        std: float,
        reduction: Reduction,
    ) -> Float64[Tensor, "items"]:
        """Log N(child; mean, std²)."""
        return log_probability(child, mean, std, reduction)

    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> Trace:
        """Grow every prompt's trees, all together."""
        sampling = self.sampling(noise, latent_shape, (dtype, storage_dtype), reduction, iteration)
        return to_trace(rollout.rollout(plan, model, prompts, condition, sampling))

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """Node values."""
        return fusion.fuse(to_tree(trace), rewards, options)

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """Advantages."""
        return normalization.normalize(plan, on_cpu(values), weights, options)

    def leaf_keys(
        self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
    ) -> Float64[Tensor, "prompts leaves"]:
        """Keys of all leaves."""
        return pruning.leaf_keys(plan, on_cpu(values), weights, options)

    def prune(
        self, plan: Plan, keys: Float64[Tensor, "prompts leaves"], rules: Sequence[PruningRule], iteration: int
    ) -> Masks:
        """Edges that stay."""
        return pruning.prune(plan, keys.cpu(), rules, iteration)

    def trained_subsets(self, plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int) -> Masks:
        """All edges but those of trainable steps that are in the subset of none of their chains."""
        return subsets.subset_masks(plan, prompts, seed, iteration)

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Float64[Tensor, ""]:
        """J over the trees of all traces."""
        trees = [to_tree(trace, reduction) for trace in traces]
        return update.objective(trees, model, condition, advantages, kept, options, reference_model)

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> dict[tuple[int, int], Trace]:
        """Every member (k, λ), equal inputs called once."""
        sampling = self.sampling(noise, latent_shape, (dtype, storage_dtype), reduction, iteration)
        trees = singular.singular_rollout(family, model, prompts, condition, sampling)
        return {member: to_trace(tree) for member, tree in trees.items()}

    def granular_advantages(
        self,
        family: PlanFamily,
        k: int,
        values: Mapping[int, Levels],
        weights: Sequence[float],
        options: Normalization,
    ) -> Float64[Tensor, "prompts children"]:
        """Multi-granularity advantages of step k's children."""
        placed = {granularity: on_cpu(levels) for granularity, levels in values.items()}
        return singular.multi_granularity_advantages(family, k, placed, weights, options)[k + 1]
