"""Wrapping a flat GRPO loop: a group of chains a prompt, group advantages, a clipped loss over steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.conformance.adapters.functions import condition_device, draw_level
from branchgrpo.conformance.adapters.functions_loss import step_objective
from branchgrpo.conformance.adapters.functions_noise import InjectedNoise
from branchgrpo.conformance.adapters.partial import (
    PartialImplementation,
    checked_velocity,
    own_operations,
    require,
    require_kernels,
    undefined,
)
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseRole, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.types import KernelKind, Reduction

Velocity = Callable[[Tensor, float], Tensor]
"""``velocity(latents [n, *latent], sigma) → [n, *latent]``: the model with the prompt's condition."""


@dataclass(frozen=True)
class Chains:
    """What a loop keeps of one group.

    Attributes:
        states: T + 1 tensors ``[G, *latent]``, the first the initial noise.
        means: T tensors, the mean of every transition.
        stds: T numbers, by which the noise was scaled; 0 where there was none.
        log_probs: T tensors ``[G]``; None where there was no noise.
    """

    states: Sequence[Tensor]
    means: Sequence[Tensor]
    stds: Sequence[float]
    log_probs: Sequence[Tensor | None]


class FlatImplementation(PartialImplementation):
    """A flat loop behind the protocol; a subclass defines ``sample`` and what else its code has.

    It can do two kinds of plans: G chains that part at step 0 with independent noise (DanceGRPO), and G roots without
    a split (Flow-GRPO). Every other plan is unsupported, with every clause that only it shows.

    Attributes:
        kernel: the kernel of its steps.
        reduction: of its log-probabilities.
        bessel, eps, clip: of its group advantages; other options are unsupported.
    """

    kernel = KernelKind.SDE
    reduction = Reduction.MEAN
    bessel, eps, clip = True, 1e-8, 5.0

    @property
    def capabilities(self) -> frozenset[str]:
        """``rollout`` and ``fuse``; ``normalize`` and ``objective`` if their hooks are defined; what the class adds."""
        own, base = type(self), FlatImplementation
        optional = {
            "normalize": own.group_advantages is not base.group_advantages,
            "objective": own.loss is not base.loss and own.score is not base.score,
        }
        hooked = {"rollout", "fuse"} | {name for name, there in optional.items() if there}
        return own_operations(self, base) | hooked

    def sample(self, velocity: Velocity, latents: Tensor, plan: Plan, storage_dtype: torch.dtype) -> Chains:
        """Hook: run the loop over one group.

        Every step whose kernel is stochastic draws once, ``torch.randn_like`` of the group's latents or ``torch.randn``
        of their shape; the numbers that it gets are the adapter's.

        Args:
            velocity: the model.
            latents: ``[G, *latent]`` initial noises.
            plan: ``sigmas`` and η of every step, ``effective_kernels[i].eta``, 0 where the step is an ODE step.
            storage_dtype: dtype in which latents are kept.
        """
        raise undefined(self, "sample")

    def group_advantages(self, rewards: Float64[Tensor, "G"]) -> Float64[Tensor, "G"]:
        """Hook: advantages of one group, clipped."""
        raise undefined(self, "group_advantages")

    def score(self, plan: Plan, step: int, x: Tensor, velocity: Tensor, child: Tensor) -> Float64[Tensor, "edges"]:
        """Hook: log-probability of given children in the update, differentiable in the velocity."""
        raise undefined(self, "score")

    def loss(self, new: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
        """Hook: clipped loss over all trained steps of a group, to be minimised."""
        raise undefined(self, "loss")

    def groups(self, plan: Plan) -> int:
        """Chains a prompt; unsupported for a plan that is no flat one."""
        require_kernels(plan, frozenset({self.kernel}))
        require(plan.trained_fraction == 1.0, "every step is trained")
        if plan.splits:
            flat = plan.splits == (0,) and plan.roots == 1 and plan.spreads[0] == float("inf")
            require(flat, "only chains that part at step 0, with independent noise")
            return plan.leaves
        return plan.roots

    @torch.no_grad()
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
        """One group a prompt, one after the other."""
        chains = self.groups(plan)
        require(reduction is self.reduction, f"log-probabilities are reduced by {self.reduction.value}")
        if len(condition) != len(prompts):
            raise InputError("len(condition)", len(condition), f"{len(prompts)}, one a prompt")
        device, found = condition_device(model), []
        for i, prompt in enumerate(prompts):

            def draw(role: NoiseRole, depth: int, nodes: int, prompt: Prompt = prompt) -> Tensor:
                at = (role, depth, [prompt], plan.roots, nodes, latent_shape, dtype)
                return draw_level(noise, iteration, *at)[0].to(device)

            initial = draw(NoiseRole.ROOT, 0, 1).to(storage_dtype).expand(chains, *latent_shape)
            sizes = plan.level_sizes
            draws = [draw(NoiseRole.PRIVATE, step + 1, sizes[step + 1]) for step in plan.stochastic_steps]

            def velocity(x: Tensor, sigma: float, i: int = i) -> Tensor:
                own = condition.gather(torch.full((len(x),), i))
                levels = torch.full((len(x),), sigma, dtype=dtype, device=x.device)
                return checked_velocity(model, x.to(dtype), levels, own)

            with InjectedNoise(draws):
                found.append(self.sample(velocity, initial, plan, storage_dtype))
        return to_trace(plan, prompts, found)

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """A chain's value is its reward, at every depth; the shared root's is the mean (PLAN-9)."""
        self.groups(trace.plan)
        mean = rewards.mean(dim=1, keepdim=True)
        require(options.beta == 0.0 or not trace.plan.splits, "no value of the shared root but the mean, β = 0")
        return tuple(rewards if state.shape[1] == rewards.shape[1] else mean for state in trace.states)

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """The group's advantages, at every depth."""
        self.groups(plan)
        require(tuple(weights) == (1.0,), "one reward of weight 1")
        found = (options.bessel, options.eps, options.clip)
        require(found == (self.bessel, self.eps, self.clip), f"no choice of {found} in group advantages")
        pooled = "tree" if plan.splits else "prompt"
        require(options.mean_scope == options.std_scope == pooled, "a prompt's group is its scope")
        rows = [self.group_advantages(row) for row in values[-1][..., 0].unbind()]
        group = torch.stack(rows).double()
        lone = torch.zeros(len(group), 1, dtype=torch.float64, device=group.device)
        return tuple(group if level.shape[1] == group.shape[1] else lone for level in values)

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
        """−loss of every group."""
        for trace in traces:
            self.groups(trace.plan)
        require(reduction is self.reduction, f"log-probabilities are reduced by {self.reduction.value}")
        require(reference_model is None and options.kl == 0, "no KL")
        require(options.reduction == "edge_mean" and options.edge_weights == "uniform", "edges are weighted alike")
        return step_objective(traces, model, condition, advantages, kept, options, self.score, self.loss)


def to_trace(plan: Plan, prompts: Sequence[Prompt], found: Sequence[Chains]) -> Trace:
    """Groups as one trace; chains that share their initial noise share the root."""
    shared = bool(plan.splits)

    def level(tensors: Sequence[Float[Tensor, "G *latent"]], first: bool = False) -> Tensor:
        return torch.stack([group[:1] if shared and first else group for group in tensors])

    steps = range(plan.steps)
    states = [level([chains.states[d] for chains in found], first=d == 0) for d in range(plan.steps + 1)]
    log_probs = []
    for step in steps:
        rows = [chains.log_probs[step] for chains in found]
        there = [row.double() for row in rows if row is not None]
        log_probs.append(torch.stack(there) if len(there) == len(rows) else None)
    return Trace(
        plan,
        tuple(prompts),
        tuple(states),
        tuple(level([chains.means[step] for chains in found]) for step in steps),
        torch.tensor([float(std) for std in found[0].stds], dtype=torch.float64),
        tuple(log_probs),
    )
