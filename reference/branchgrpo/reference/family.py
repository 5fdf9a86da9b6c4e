"""The plan family of G²RPO and TempFlow-GRPO: one plan for each (k, λ) (spec: singular)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from branchgrpo.reference.errors import PlanError, is_integer
from branchgrpo.reference.granularity import StrideAnchor, granular_indices
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import validate_schedule
from branchgrpo.reference.types import ODE, Kernel, LeafOutput


@dataclass(frozen=True)
class PlanFamily:
    """Singular stochastic sampling: member (k, λ) is an ODE but for step k, where it splits into G children.

    Clause: SING-1 … SING-6, GRAN-1 … GRAN-3.  Source: G²RPO (arXiv 2510.01982) §3.2–3.3; TempFlow-GRPO.

    Attributes:
        sigmas: the full schedule.
        kernel: stochastic kernel of step k.
        ks: M, the steps that are perturbed, each in its own member; ascending.
        group: G ≥ 2 children.
        granularities: Λ, each λ ≥ 1.
        stride_anchor: see ``granular_indices``.
        roots: initial noises a prompt.
        output: what a leaf hands to the reward.
    """

    sigmas: tuple[float, ...]
    kernel: Kernel
    ks: tuple[int, ...]
    group: int = 12
    granularities: tuple[int, ...] = (1,)
    stride_anchor: StrideAnchor = "start"
    roots: int = 1
    output: LeafOutput = LeafOutput.DENOISED

    def __post_init__(self) -> None:
        validate_schedule(self.sigmas)
        top = self.steps - (2 if self.output is LeafOutput.DENOISED else 1)
        if not self.ks:
            raise PlanError("ks", self.ks, "at least one step")
        for i, k in enumerate(self.ks):
            if not is_integer(k) or not 0 <= k <= top or k in self.ks[:i] or list(self.ks) != sorted(self.ks):
                raise PlanError(
                    f"ks[{i}]", k, f"an integer in 0..{top} under {self.output.value}, named once, ascending"
                )
        if not is_integer(self.group) or self.group < 2:
            raise PlanError("group", self.group, "an integer ≥ 2")
        if not self.granularities or len(set(self.granularities)) < len(self.granularities):
            raise PlanError("granularities", self.granularities, "at least one λ, each named once")
        if self.stride_anchor not in get_args(StrideAnchor):
            raise PlanError("stride_anchor", self.stride_anchor, f"one of {list(get_args(StrideAnchor))}")
        for k, granularity in self.members():
            self.member(k, granularity)

    @property
    def steps(self) -> int:
        """T of the full schedule."""
        return len(self.sigmas) - 1

    def members(self) -> Iterator[tuple[int, int]]:
        """All (k, λ), k outermost."""
        return ((k, granularity) for k in self.ks for granularity in self.granularities)

    def continuation(self, k: int, granularity: int) -> tuple[int, ...]:
        """Indices into the full schedule from k + 1 to T."""
        return granular_indices(k + 1, self.steps, granularity, self.stride_anchor)

    def member(self, k: int, granularity: int) -> Plan:
        """The plan of (k, λ): ODE, one stochastic split at step k with s = ∞, then the granular continuation.

        Clause: SING-1, SING-2, GRAN-1.  The levels up to k + 1 are those of the full schedule, so its σ_1 is too.
        """
        sigmas = (*self.sigmas[: k + 1], *(self.sigmas[i] for i in self.continuation(k, granularity)))
        steps = len(sigmas) - 1
        return Plan(
            sigmas=sigmas,
            kernels=tuple(self.kernel if i == k else ODE for i in range(steps)),
            branching=tuple(self.group if i == k else 1 for i in range(steps)),
            spreads=(math.inf,) * steps,
            roots=self.roots,
            output=self.output,
        )
