"""Where states and log-probabilities are kept: one array a level, each state once (spec: rollout)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from branchgrpo.optimized.growth import Growth
from branchgrpo.optimized.log_probability import log_density, log_normaliser
from branchgrpo.optimized.sampling import CPU, Sampling
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt


class Store:
    """Flat arrays ``[prompts · R · n_d, *latent]`` of every level, allocated at once.  Clause: ROLL-5.

    Offloaded states are written and read back on one stream, so no step waits for the copies; what reads them on the
    CPU comes after the rollout's verdict on the velocities, which does.

    Attributes:
        states: a level's states, as stored.
        distances: ‖child − mean‖ of every edge of a stochastic step, −1 where it was not grown; None for other levels.
        log_probs: made of the distances by ``finish``, 0 where nothing was grown.
    """

    def __init__(self, growth: Growth, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.prompts, self.sampling = tuple(prompts), sampling
        device, dtype, shape = sampling.device, sampling.storage_dtype, sampling.latent_shape
        sizes = [len(prompts) * growth.roots * level.width for level in growth.levels]
        self.stds = {step.target: step.coefficients.std for step in growth.steps if step.coefficients.std > 0}
        self.away = sampling.offload and device.type != "cpu"
        home, pin = (CPU, device.type == "cuda" and torch.cuda.is_available()) if self.away else (device, False)
        self.states = [torch.empty((n, *shape), dtype=dtype, device=home, pin_memory=pin) for n in sizes]
        self.counts = [sizes[level] for level in self.stds]
        self.every = torch.full((sum(self.counts),), -1.0, dtype=torch.float64, device=device)
        self.distances = self.by_level(self.every)
        self.log_probs: list[Tensor | None] = [None for _ in sizes]
        self.means: list[list[Tensor]] | None = [[] for _ in sizes] if sampling.keep_means else None

    def by_level(self, flat: Float64[Tensor, "edges"]) -> list[Tensor | None]:
        """The parts of an array over all edges of stochastic steps, by level."""
        parts = dict(zip(self.stds, torch.split(flat, self.counts), strict=True))
        return [parts.get(level) for level in range(len(self.states))]

    def room(self, level: int, first: int, last: int) -> Float[Tensor, "children *latent"]:
        """Where the children first … last − 1 of a level are to be put, on the device of the arithmetic."""
        states = self.states[level]
        if self.away:
            return torch.empty((last - first, *states.shape[1:]), dtype=states.dtype, device=self.sampling.device)
        return states[first:last]

    def write(
        self,
        level: int,
        first: int,
        last: int,
        children: Float[Tensor, "children *latent"],
        distance: Float64[Tensor, "children"] | None,
        mean: Float[Tensor, "parents *latent"],
    ) -> None:
        """Keep the children first … last − 1 of a level, put into their ``room``, written once and in order."""
        if self.away:
            self.states[level][first:last].copy_(children, non_blocking=True)
        kept = self.distances[level]
        if kept is not None and distance is not None:
            kept[first:last].copy_(distance)
        if self.means is not None:
            self.means[level].append(mean.repeat_interleave(len(children) // len(mean), dim=0))

    def finish(self) -> Bool[Tensor, ""]:
        """Turn all distances into log-probabilities; whether all are finite.  Clause: LOGP-1, LOGP-3, LOGP-4."""
        stds = torch.tensor(list(self.stds.values()), dtype=torch.float64)
        repeats = torch.tensor(self.counts, dtype=torch.int64)
        each = stds.repeat_interleave(repeats, output_size=sum(self.counts)).to(self.every.device, non_blocking=True)
        reduced = (math.prod(self.sampling.latent_shape), self.sampling.reduction)
        density = log_density(self.every, each, log_normaliser(each, *reduced), *reduced)
        self.log_probs = self.by_level(density.masked_fill_(self.every < 0.0, 0.0))
        return torch.isfinite(density).all()

    def tree(self, plan: Plan, path: Sequence[int]) -> Tree:
        """The tree whose depth d is level ``path[d]``; trees of one store share their arrays."""
        rows, kept = len(self.prompts), self.means
        log_probs = [self.log_probs[level] for level in path[1:]]
        means = (
            None
            if kept is None
            else tuple(torch.unflatten(torch.cat(kept[level]), 0, (rows, -1)) for level in path[1:])
        )
        return Tree(
            plan=plan,
            prompts=self.prompts,
            states=tuple(torch.unflatten(self.states[level], 0, (rows, -1)) for level in path),
            log_probs=tuple(None if lp is None else lp.view(rows, -1) for lp in log_probs),
            dtype=self.sampling.dtype,
            device=self.sampling.device,
            reduction=self.sampling.reduction,
            means=means,
        )
