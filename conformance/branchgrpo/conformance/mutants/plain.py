"""The plain implementation, complete: its objective, each decision a method."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.conformance.mutants.plain_tail import PlainTail
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.types import Reduction

Scalar = Float64[Tensor, ""]
Edges = Float64[Tensor, "edges"]


@dataclass(frozen=True, eq=False)
class Step:
    """The trained edges of one tree at one step.

    Attributes:
        step: i.
        parents: ``[edges]`` index of each edge's parent in its level.
        children: ``[edges]`` index of each edge's child in its level.
        advantages, old: ``[edges]`` A and the log-probability of the rollout.
    """

    step: int
    parents: Tensor
    children: Tensor
    advantages: Edges
    old: Edges


class PlainImplementation(PlainTail):
    """Rollout, tail and objective."""

    def trains(self, plan: Plan, step: int) -> bool:
        """Whether edges of a step may be trained."""
        return step in plan.trainable_steps

    def surrogate(self, rho: Edges, advantages: Edges, options: Objective) -> Edges:
        """Clipped surrogate."""
        clipped = rho.clamp(1 - options.clip_low, 1 + options.clip_high)
        return torch.minimum(rho * advantages, clipped * advantages)

    def ratio(self, new: Edges, old: Edges) -> Edges:
        """ρ of the edges."""
        return torch.exp(new - old)

    def kl(self, mean: Tensor, frozen: Tensor, std: float, delta: float, reduction: Reduction) -> Edges:
        """KL of the edges to the frozen policy."""
        terms = ((mean.double() - frozen.double()) ** 2 / (2 * std**2)).flatten(1)
        return terms.sum(dim=1) if reduction is Reduction.SUM else terms.mean(dim=1)

    def frozen_mean(self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition) -> Tensor:
        """Transition mean of the frozen policy."""
        with torch.no_grad():
            return self.training_mean(trace, step, x, model, condition)

    def training_mean(
        self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Transition mean of a policy at stored parents."""
        return self.transition(trace.plan, step, x, self.velocity(model, x, trace.plan.sigmas[step], condition))[0]

    def training_std(self, trace: Trace, step: int) -> float:
        """Std in the log-probability of the update."""
        return float(trace.stds[step])

    def step_weights(
        self, found: Sequence[tuple[Trace, list[Step]]], options: Objective
    ) -> dict[tuple[float, float], float]:
        """Weight of every distinct trained step, keyed by (σ, std)."""
        stds = {(t.plan.sigmas[s.step], float(t.stds[s.step])) for t, steps in found for s in steps}
        mean = sum(std for _, std in stds) / len(stds)
        return {key: key[1] / mean if options.edge_weights == "std" else 1.0 for key in stds}

    def tree_steps(self, trace: Trace, advantages: Levels, kept: Masks, prompt: int, root: int) -> list[Step]:
        """Trained edges of one tree, step by step."""
        found = []
        for step in range(trace.plan.steps):
            if not self.trains(trace.plan, step):
                continue
            size = trace.plan.level_sizes[step + 1]
            children = root * size + kept[step][prompt, root * size : (root + 1) * size].nonzero().flatten()
            level = trace.log_probs[step]
            if len(children) and level is not None:
                children, gains = children.to(level.device), advantages[step + 1].to(level.device)
                parents = children // trace.plan.branching[step]
                found.append(Step(step, parents, children, gains[prompt, children], level[prompt, children]))
        if not found:
            raise ValueError("nothing is left to train")
        return found

    def reduce(self, terms: list[Tensor], options: Objective, edges: int) -> Scalar:
        """Terms of a tree, a tensor a depth, to one number; ``edges`` is the tree's size before pruning."""
        if options.reduction == "depth_mean":
            return torch.stack([term.mean() for term in terms]).mean()
        return torch.cat(terms).mean()

    def tree_value(
        self,
        trace: Trace,
        prompt: int,
        steps: list[Step],
        weights: dict[tuple[float, float], float],
        models: tuple[VelocityModel, VelocityModel | None],
        condition: Condition,
        options: Objective,
        reduction: Reduction,
    ) -> Scalar:
        """Reduced terms of one tree."""
        policy, frozen = models
        dtype, terms = trace.means[0].dtype, []
        for s in steps:
            x = trace.states[s.step][prompt, s.parents].to(dtype)
            own = condition.gather(torch.full((len(x),), prompt))
            mean, std = self.training_mean(trace, s.step, x, policy, own), self.training_std(trace, s.step)
            child = trace.states[s.step + 1][prompt, s.children].to(dtype)
            rho = self.ratio(self.log_probability(child, mean, std, reduction), s.old)
            term = weights[trace.plan.sigmas[s.step], float(trace.stds[s.step])] * self.surrogate(
                rho, s.advantages, options
            )
            if frozen is not None:
                delta = trace.plan.deltas[s.step]
                other = self.frozen_mean(trace, s.step, x, frozen, own)
                term = term - options.kl * self.kl(mean, other, std, delta, reduction)
            terms.append(term)
        return self.reduce(terms, options, trace.plan.leaves * trace.plan.steps)

    def trees(
        self, traces: Sequence[Trace], advantages: Sequence[Levels], kept: Sequence[Masks]
    ) -> Iterator[tuple[Trace, int, list[Step]]]:
        """Every tree of the update with its trained edges."""
        for trace, own, masks in zip(traces, advantages, kept, strict=True):
            for prompt in range(len(trace.prompts)):
                for root in range(trace.plan.roots):
                    yield trace, prompt, self.tree_steps(trace, own, masks, prompt, root)

    def combine(self, values: list[Scalar]) -> Scalar:
        """The trees' values to J."""
        return torch.stack(values).mean()

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
    ) -> Scalar:
        """J of the update."""
        if len(condition) != len(traces[0].prompts):
            raise ValueError("one condition a prompt")
        if (reference_model is not None) != (options.kl > 0):
            raise ValueError("a frozen policy if and only if there is a KL")
        found = list(self.trees(traces, advantages, kept))
        weights = self.step_weights([(trace, steps) for trace, _, steps in found], options)
        models = (model, reference_model)
        return self.combine(
            [self.tree_value(t, p, steps, weights, models, condition, options, reduction) for t, p, steps in found]
        )
