"""Wrapping stand-alone functions in the style of the public scripts: a step, a branch noise, a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.conformance.adapters.functions_loss import Loss, step_objective
from branchgrpo.conformance.adapters.functions_noise import InjectedNoise
from branchgrpo.conformance.adapters.partial import (
    PartialImplementation,
    checked_velocity,
    own_operations,
    require,
    require_kernels,
)
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseKeys, NoiseRole, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.types import KernelKind, Reduction

Step = Callable[..., Any]
BranchNoise = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a script, and what they are good for.

    Attributes:
        step: ``step(model_output, latents, eta, sigmas, index, prev_sample)``; draws its own noise with
            ``torch.randn_like`` where ``prev_sample`` is None and η > 0, and scores a ``prev_sample`` that is given.
        sample: position of the next latents in what the step returns.
        log_prob: position of the log-probability, one number an item.
        kernel: the kernel that it implements; η = 0 is its ODE.
        reduction: how its log-probability is reduced.
        score: ``sampled`` takes the log-probability that comes with the sample, as most scripts do; ``stored`` asks
            again for that of the child as it is kept.
        branch_noise: ``branch_noise(shared [n, *latent], private [n, K, *latent], spread) → [n, K, *latent]``.
        loss: ``loss(new, old, advantages, clip) → scalar``, to be minimised.
    """

    step: Step
    sample: int = 0
    log_prob: int = 2
    kernel: KernelKind = KernelKind.SDE
    reduction: Reduction = Reduction.MEAN
    score: str = "sampled"
    branch_noise: BranchNoise | None = None
    loss: Loss | None = None


class FunctionsImplementation(PartialImplementation):
    """Functions behind the protocol: the adapter grows the trees, every number in them is the functions'.

    The mean of a step is what it returns when its draw is 0, its std what a draw of 1 adds: measured, not believed.

    Args:
        functions: what is wrapped.
        name: what the report calls it.
    """

    def __init__(self, functions: StepFunctions, name: str = "functions") -> None:
        self.functions, self.name = functions, name

    @property
    def capabilities(self) -> frozenset[str]:
        """What the functions are good for: the step for two operations, the others for one; and what a class adds."""
        optional = {"branch_noise": self.functions.branch_noise, "objective": self.functions.loss}
        hooked = {"transition", "rollout"} | {name for name, function in optional.items() if function}
        return own_operations(self, FunctionsImplementation) | hooked

    def call(
        self, plan: Plan, step: int, x: Tensor, velocity: Tensor, child: Tensor | None, draws: list[Tensor]
    ) -> Any:
        """The wrapped step with η, levels and noise of a plan's step."""
        require_kernels(plan, frozenset({self.functions.kernel}))
        sigmas = torch.tensor(plan.sigmas, dtype=torch.float64, device=x.device)
        with InjectedNoise(draws):
            return self.functions.step(velocity, x, plan.effective_kernels[step].eta, sigmas, step, child)

    def moved(self, plan: Plan, step: int, x: Tensor, velocity: Tensor, noise: Tensor) -> Tensor:
        """Next latents for a given noise; a deterministic step draws nothing."""
        draws = [noise] if step in plan.stochastic_steps else []
        sample: Tensor = self.call(plan, step, x, velocity, None, draws)[self.functions.sample]
        return sample

    def transition(
        self, plan: Plan, step: int, x: Float[Tensor, "items *latent"], velocity: Float[Tensor, "items *latent"]
    ) -> tuple[Float[Tensor, "items *latent"], float]:
        """Mean and std of step ``step``, measured by draws of 0 and 1."""
        mean = self.moved(plan, step, x, velocity, torch.zeros_like(x))
        if step not in plan.stochastic_steps:
            return mean, 0.0
        with torch.no_grad():
            lifted = self.moved(plan, step, x.detach(), velocity.detach(), torch.ones_like(x))
        return mean, float((lifted.double() - mean.detach().double()).mean())

    def branch_noise(
        self, shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
    ) -> Float[Tensor, "parents K *latent"]:
        """The wrapped branch noise; without one only independent siblings can be had."""
        if self.functions.branch_noise is None:
            require(spread == float("inf"), "no branch noise: siblings are independent")
            return private
        return self.functions.branch_noise(shared, private, spread)

    def noise_of(
        self, plan: Plan, step: int, prompts: Sequence[Prompt], draw: Callable[[NoiseRole, int, int], Tensor]
    ) -> Float[Tensor, "prompts nodes *latent"]:
        """ξ of all children of a step, from the source's draws."""
        private = draw(NoiseRole.PRIVATE, step + 1, plan.level_sizes[step + 1])
        if plan.branching[step] == 1:
            return private
        shared = draw(NoiseRole.SHARED, step, plan.level_sizes[step])
        latent = private.shape[2:]
        grouped = private.reshape(-1, plan.branching[step], *latent)
        return self.branch_noise(shared.reshape(-1, *latent), grouped, plan.spreads[step]).reshape(private.shape)

    def log_prob_of(self, plan: Plan, step: int, x: Tensor, v: Tensor, noise: Tensor, stored: Tensor) -> Tensor:
        """The wrapped log-probability: of the sample as it was made, or of the child as it is kept."""
        if self.functions.score == "sampled":
            result = self.call(plan, step, x, v, None, [noise])
        else:
            result = self.call(plan, step, x, v, stored.to(x.dtype), [])
        found: Tensor = result[self.functions.log_prob]
        return found.double()

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
        """All trees, level by level, through the wrapped functions."""
        require(reduction is self.functions.reduction, f"log-probabilities are reduced by {self.functions.reduction}")
        if len(condition) != len(prompts):
            raise InputError("len(condition)", len(condition), f"{len(prompts)}, one a prompt")

        def draw(role: NoiseRole, depth: int, nodes: int) -> Tensor:
            found = draw_level(noise, iteration, role, depth, prompts, plan.roots, nodes, latent_shape, dtype)
            return found.to(condition_device(model))

        states, means, log_probs = [draw(NoiseRole.ROOT, 0, 1).to(storage_dtype)], [], []
        stds = []
        for step in range(plan.steps):
            x = states[-1].to(dtype).flatten(0, 1)
            own = condition.gather(torch.arange(len(prompts)).repeat_interleave(states[-1].shape[1]))
            sigma = torch.full((len(x),), plan.sigmas[step], dtype=dtype, device=x.device)
            factor = plan.branching[step]
            v = checked_velocity(model, x, sigma, own).repeat_interleave(factor, dim=0)
            x = x.repeat_interleave(factor, dim=0)
            mean, std = self.transition(plan, step, x, v)
            noisy = step in plan.stochastic_steps
            xi = self.noise_of(plan, step, prompts, draw).flatten(0, 1) if noisy else torch.zeros_like(mean)
            child = self.moved(plan, step, x, v, xi).to(storage_dtype)
            shape = (len(prompts), -1)
            log_probs.append(self.log_prob_of(plan, step, x, v, xi, child).reshape(shape) if noisy else None)
            states.append(child.reshape(*shape, *latent_shape))
            means.append(mean.reshape(*shape, *latent_shape))
            stds.append(std)
        return Trace(
            plan, tuple(prompts), tuple(states), tuple(means), torch.tensor(stds, dtype=torch.float64), tuple(log_probs)
        )

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
        """−loss of the trained edges, tree by tree, new log-probabilities by the wrapped step."""
        require(self.functions.loss is not None, "no loss")
        require(reduction is self.functions.reduction, f"log-probabilities are reduced by {self.functions.reduction}")
        require(reference_model is None and options.kl == 0, "no KL")
        require(options.reduction == "edge_mean" and options.edge_weights == "uniform", "edges are weighted alike")

        def score(plan: Plan, step: int, x: Tensor, v: Tensor, child: Tensor) -> Tensor:
            found: Tensor = self.call(plan, step, x, v, child, [])[self.functions.log_prob]
            return found.double()

        assert self.functions.loss is not None
        return step_objective(traces, model, condition, advantages, kept, options, score, self.functions.loss)


def draw_level(
    noise: NoiseSource,
    iteration: int,
    role: NoiseRole,
    depth: int,
    prompts: Sequence[Prompt],
    roots: int,
    nodes: int,
    latent_shape: Sequence[int],
    dtype: torch.dtype,
) -> Float[Tensor, "prompts nodes *latent"]:
    """Draws for all nodes of a depth: ``nodes`` a root, roots outermost (NOISE-3, TRACE-2)."""
    rows = [(prompt.id, root, node) for prompt in prompts for root in range(roots) for node in range(nodes)]
    ids, root_index, node_index = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))
    keys = NoiseKeys(iteration, role, depth, ids, root_index, node_index)
    drawn = noise.draw(keys, tuple(latent_shape), dtype, torch.device("cpu"))
    return drawn.reshape(len(prompts), roots * nodes, *latent_shape)


def condition_device(model: VelocityModel) -> torch.device:
    """Where a model's parameters live; the CPU for one without parameters."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return first.device if isinstance(first, Tensor) else torch.device("cpu")
