"""Names of the options, and the kernel: the smallest plain data types (spec: plan, kernels)."""

import math
from dataclasses import dataclass
from enum import StrEnum

from branchgrpo.reference.errors import PlanError


class KernelKind(StrEnum):
    """Families of Gaussian transition kernels (spec: kernels)."""

    ODE = "ode"
    SDE = "sde"
    FLOW_SDE = "flow_sde"
    CPS = "cps"


class Reduction(StrEnum):
    """How a log-probability is reduced over the D latent elements (LOGP-2)."""

    SUM = "sum"
    MEAN = "mean"


class LeafOutput(StrEnum):
    """What a leaf hands to the reward: x_T, or x̂⁰ of the last step (PLAN-6)."""

    SAMPLE = "sample"
    DENOISED = "denoised"


@dataclass(frozen=True)
class Kernel:
    """One transition kernel: its family and noise strength η.

    Clause: KERN-1 … KERN-4, ERR-2.  ``ode`` takes η = 0 only; ``sde`` and ``flow_sde`` any finite η ≥ 0;
    ``cps`` η in [0, 1].
    """

    kind: KernelKind
    eta: float = 0.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", KernelKind(self.kind))
        except ValueError:
            raise PlanError("kernel.kind", self.kind, f"one of {[k.value for k in KernelKind]}") from None
        top = {KernelKind.ODE: 0.0, KernelKind.CPS: 1.0}.get(self.kind, math.inf)
        if not (0.0 <= self.eta <= top and math.isfinite(self.eta)):
            raise PlanError("kernel.eta", self.eta, f"finite and in [0, {top:g}] for {self.kind.value}")

    def is_stochastic(self, sigma_next: float) -> bool:
        """Whether the step's std is positive (KERN-5): η > 0, and for CPS also σ′ > 0."""
        return self.eta > 0.0 and not (self.kind is KernelKind.CPS and sigma_next == 0.0)


ODE = Kernel(KernelKind.ODE)
