"""A plain level-wise rollout, each decision a method: right as it stands, and one override away from every mutant."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import CAPABILITIES, Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseKeys, NoiseRole, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.types import Kernel, KernelKind, Reduction
from branchgrpo.reference.velocity import CalledOnce

Latent = Float[Tensor, "items *latent"]


class PlainRollout:
    """Steps, noise, log-probabilities and rollouts on level-order arrays.

    Attributes:
        device: where rollouts are done.
    """

    name = "plain"
    spec_version = "1.0"
    capabilities = CAPABILITIES
    device = torch.device("cpu")

    def plan(self, plan: Plan) -> Plan:
        """The plan that is really rolled out."""
        return plan

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        """The plan of a member of a family."""
        return family.member(k, granularity)

    def diffusion(self, kernel: Kernel, sigma: float, second: float) -> float:
        """g of an SDE kernel."""
        if kernel.kind is KernelKind.SDE:
            return kernel.eta
        return kernel.eta * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))

    def std(self, plan: Plan, step: int) -> float:
        """Std of a step."""
        kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
        if kernel.kind is KernelKind.ODE:
            return 0.0
        if kernel.kind is KernelKind.CPS:
            return after * math.sin(kernel.eta * math.pi / 2)
        return self.diffusion(kernel, sigma, plan.sigmas[1]) * math.sqrt(sigma - after)

    def transition(self, plan: Plan, step: int, x: Latent, velocity: Latent) -> tuple[Latent, float]:
        """Mean and std of a step."""
        kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
        data, noise = x - sigma * velocity, x + (1 - sigma) * velocity
        if kernel.kind is KernelKind.CPS:
            mean = (1 - after) * data + after * math.cos(kernel.eta * math.pi / 2) * noise
        else:
            mean = x - (sigma - after) * velocity
            if kernel.kind is not KernelKind.ODE:
                g = self.diffusion(kernel, sigma, plan.sigmas[1])
                mean = mean + self.drift(g, sigma, sigma - after) * noise
        return mean, self.std(plan, step)

    def drift(self, g: float, sigma: float, delta: float) -> float:
        """Coefficient of the predicted noise in the SDE's mean."""
        return -g * g * delta / (2 * sigma)

    def branch_noise(
        self, shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
    ) -> Float[Tensor, "parents K *latent"]:
        """a·ξ₀ + c·η_b."""
        if math.isinf(spread):
            return private
        norm = math.hypot(1.0, spread)
        return shared.unsqueeze(1) / norm + (spread / norm) * private

    def log_probability(
        self, child: Latent, mean: Latent, std: float, reduction: Reduction
    ) -> Float64[Tensor, "items"]:
        """Log-density of the children, reduced."""
        z = (child.double() - mean.double()) / std
        terms = (-z * z / 2 - math.log(std) - math.log(2 * math.pi) / 2).flatten(1)
        return terms.sum(dim=1) if reduction is Reduction.SUM else terms.mean(dim=1)

    def keys(self, plan: Plan, prompts: Sequence[Prompt], role: NoiseRole, depth: int, iteration: int) -> NoiseKeys:
        """Keys of all nodes of a depth, prompt by prompt and root by root."""
        size = plan.level_sizes[depth]
        ids = torch.tensor([prompt.id for prompt in prompts]).repeat_interleave(plan.roots * size)
        roots = torch.arange(plan.roots).repeat_interleave(size).repeat(len(prompts))
        return NoiseKeys(iteration, role, depth, ids, roots, torch.arange(size).repeat(len(prompts) * plan.roots))

    def step_noise(
        self, plan: Plan, step: int, prompts: Sequence[Prompt], noise: NoiseSource, of: dict[str, Any]
    ) -> Float[Tensor, "parents K *latent"]:
        """ξ of every child, by parent."""
        shape, dtype, device = of["latent_shape"], of["dtype"], of["device"]
        private = noise.draw(
            self.keys(plan, prompts, NoiseRole.PRIVATE, step + 1, of["iteration"]), shape, dtype, device
        )
        private = private.reshape(-1, plan.branching[step], *shape)
        if plan.branching[step] == 1:
            return private
        shared = noise.draw(self.keys(plan, prompts, NoiseRole.SHARED, step, of["iteration"]), shape, dtype, device)
        return self.branch_noise(shared, private, plan.spreads[step])

    def velocity(self, model: VelocityModel, x: Latent, sigma: float, condition: Condition) -> Latent:
        """The model at every state of a level."""
        v = model(x, torch.full((len(x),), sigma, dtype=x.dtype, device=x.device), condition)
        if v.shape != x.shape or not bool(torch.isfinite(v).all()):
            raise ValueError("the model's velocity has another shape, or is not finite")
        return v.to(x.dtype)

    def store(self, state: Latent, dtype: torch.dtype) -> Latent:
        """A state as it is kept."""
        return state.to(dtype)

    def made(self, mean: Latent, displacement: Latent, dtype: torch.dtype) -> Latent:
        """A child before it is kept in ``dtype``."""
        return mean + displacement

    def scored(self, made: Latent, stored: Latent) -> Latent:
        """The child whose log-probability is taken."""
        return stored

    def condition(self, condition: Condition, nodes: int) -> Condition:
        """The prompts' conditions, once for each node of a level."""
        return condition.gather(torch.arange(len(condition)).repeat_interleave(nodes))

    @torch.no_grad()
    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> Trace:
        """Grow every prompt's trees level by level."""
        plan, p = self.plan(plan), len(prompts)
        options["device"] = options.get("device", self.device)
        shape, dtype, storage = options["latent_shape"], options["dtype"], options["storage_dtype"]
        start = noise.draw(
            self.keys(plan, prompts, NoiseRole.ROOT, 0, options["iteration"]), shape, dtype, options["device"]
        )
        states, means, log_probs = [self.store(start, storage)], [], []
        for step in range(plan.steps):
            x = states[-1].to(dtype)
            own = self.condition(condition, plan.roots * plan.level_sizes[step])
            mean, std = self.transition(plan, step, x, self.velocity(model, x, plan.sigmas[step], own))
            mean = mean.repeat_interleave(plan.branching[step], dim=0)
            made = mean
            if std > 0:
                xi = self.step_noise(plan, step, prompts, noise, options).flatten(0, 1)
                made = self.made(mean, std * xi, storage)
            states.append(self.store(made, storage))
            means.append(mean)
            scored = self.scored(made, states[-1])
            log_probs.append(self.log_probability(scored, mean, std, options["reduction"]) if std > 0 else None)
        stds = torch.tensor([self.std(plan, step) for step in range(plan.steps)], dtype=torch.float64)
        levels = [tuple(level.reshape(p, -1, *shape) for level in part) for part in (states, means)]
        found = tuple(None if level is None else level.reshape(p, -1) for level in log_probs)
        return Trace(plan, tuple(prompts), levels[0], levels[1], stds, found)

    def answering_once(self, model: VelocityModel) -> VelocityModel:
        """The model as all members of a family call it."""
        return CalledOnce(model)

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> dict[tuple[int, int], Trace]:
        """Every member, equal inputs called once."""
        once = self.answering_once(model)
        return {
            (k, g): self.rollout(self.family_member(family, k, g), once, prompts, condition, noise, **options)
            for k, g in family.members()
        }
