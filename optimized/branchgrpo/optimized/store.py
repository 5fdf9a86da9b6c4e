"""Where states and log-probabilities are kept: one array a level, each state once (spec: rollout)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.growth import Growth
from branchgrpo.optimized.sampling import CPU, Sampling
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt


class Store:
    """Flat arrays ``[prompts · R · n_d, *latent]`` of every level, allocated at once.  Clause: ROLL-5.

    Offloaded states are written and read back on one stream, so no step waits for the copies; what reads them on the
    CPU comes after the rollout's verdict on the velocities, which does.
    """

    def __init__(self, growth: Growth, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.prompts, self.sampling = tuple(prompts), sampling
        device, dtype, shape = sampling.device, sampling.storage_dtype, sampling.latent_shape
        sizes = [len(prompts) * growth.roots * level.width for level in growth.levels]
        noisy = {step.target for step in growth.steps if step.coefficients.std > 0}
        home, pin = (CPU, device.type == "cuda" and torch.cuda.is_available()) if sampling.offload else (device, False)
        self.states = [torch.empty((n, *shape), dtype=dtype, device=home, pin_memory=pin) for n in sizes]
        self.log_probs = [
            torch.zeros(n, dtype=torch.float64, device=device) if i in noisy else None for i, n in enumerate(sizes)
        ]
        self.means: list[list[Tensor]] | None = [[] for _ in sizes] if sampling.keep_means else None

    def write(
        self,
        level: int,
        first: int,
        last: int,
        children: Float[Tensor, "children *latent"],
        log_prob: Float64[Tensor, "children"] | None,
        mean: Float[Tensor, "parents *latent"],
    ) -> None:
        """Keep the children first … last − 1 of a level, written once and in order."""
        self.states[level][first:last].copy_(children, non_blocking=True)
        kept = self.log_probs[level]
        if kept is not None and log_prob is not None:
            kept[first:last].copy_(log_prob)
        if self.means is not None:
            self.means[level].append(mean.repeat_interleave(len(children) // len(mean), dim=0))

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
            log_probs=tuple(None if lp is None else torch.unflatten(lp, 0, (rows, -1)) for lp in log_probs),
            dtype=self.sampling.dtype,
            device=self.sampling.device,
            reduction=self.sampling.reduction,
            means=means,
        )
