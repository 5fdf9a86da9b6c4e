"""The exact velocity of Gaussian data, as a model (spec: oracle)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Condition, Guidance, TensorCondition
from branchgrpo.reference.schedule import validate_schedule


class ExactGaussian(nn.Module):
    """v(x, σ) = E[ε − x⁰ | x] for data x⁰ ~ N(m, τ²·I), plus an optional trainable vector θ_i a step.

    Clause: ORACLE-2, ORACLE-13.  A ``VelocityModel`` with a known answer to everything: written on its own, from the
    conditional mean of the data, so that the oracle's recursion and this model check each other.

    Args:
        mean: m.
        tau: τ > 0.
        sigmas: the schedule that θ belongs to; needed for θ.  With a schedule, only its levels σ_0 … σ_{T−1} are
            accepted, matched exactly in the dtype of the call.
        latent_shape: shape of one state; with it (and ``sigmas``) the model has ``theta`` ``[T, *latent]``, from 0.
        mean_key: name of a tensor of the condition ``[items, *rest]`` (``rest`` broadcasts against the latent) that is
            added to m, so that a condition that is mixed up shows in the velocity; None ignores the condition.
        dtype: of ``theta``.

    Raises:
        OptionError: a non-finite mean, τ ≤ 0, or a latent shape without a schedule.
        PlanError: a schedule that is not strictly decreasing from 1 to 0.
    """

    guidance = Guidance("none")

    def __init__(
        self,
        mean: float,
        tau: float,
        sigmas: Sequence[float] | None = None,
        *,
        latent_shape: Sequence[int] | None = None,
        mean_key: str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if not math.isfinite(mean):
            raise OptionError("mean", mean, "finite")
        if not (math.isfinite(tau) and tau > 0.0):
            raise OptionError("tau", tau, "finite and > 0")
        if latent_shape is not None and sigmas is None:
            raise OptionError("sigmas", None, "the schedule, one θ a step, where latent_shape is given")
        if sigmas is not None:
            validate_schedule(sigmas)
        self.mean = float(mean)
        self.tau = float(tau)
        self.mean_key = mean_key
        self.sigmas = None if sigmas is None else tuple(float(sigma) for sigma in sigmas)
        self.theta: nn.Parameter | None = None
        if latent_shape is not None and self.sigmas is not None:
            self.theta = nn.Parameter(torch.zeros(len(self.sigmas) - 1, *latent_shape, dtype=dtype))

    def step_of(self, sigma: Float[Tensor, "items"]) -> Int64[Tensor, "items"]:
        """Step i of each item, by exact equality with σ_i in the dtype of ``sigma``.

        Raises:
            InputError: a level that is not one of σ_0 … σ_{T−1}, or that two steps share in this dtype.
        """
        if self.sigmas is None:
            raise OptionError("sigmas", None, "the schedule: a model without one has no steps")
        levels = torch.tensor(self.sigmas[:-1], dtype=torch.float64).to(device=sigma.device, dtype=sigma.dtype)
        matches = sigma[:, None] == levels[None, :]
        wrong = torch.nonzero(matches.sum(dim=1) != 1).flatten().tolist()
        if wrong:
            raise InputError(f"sigma[{wrong[0]}]", sigma[wrong[0]].item(), f"exactly one of {levels.tolist()}")
        return matches.to(torch.int64).argmax(dim=1)

    def data_mean(self, x: Float[Tensor, "items *latent"], condition: Condition) -> Float[Tensor, "items *broadcast"]:
        """m of every item, shaped to broadcast against x.

        Raises:
            InputError: a condition without the tensor ``mean_key``, or of another batch size.
        """
        if len(condition) != x.shape[0]:
            raise InputError("len(condition)", len(condition), f"{x.shape[0]}, one an item")
        if self.mean_key is None:
            return torch.full((x.shape[0], *[1] * (x.dim() - 1)), self.mean, dtype=x.dtype, device=x.device)
        if not isinstance(condition, TensorCondition) or self.mean_key not in condition.tensors:
            raise InputError("condition", type(condition).__name__, f"a TensorCondition with {self.mean_key!r}")
        offset = condition.tensors[self.mean_key].to(device=x.device, dtype=x.dtype)
        return self.mean + offset.reshape(offset.shape + (1,) * (x.dim() - offset.dim()))

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """E[ε | x] − E[x⁰ | x] + θ_i.

        E[x⁰ | x] = m + (1 − σ)τ²/q · (x − (1 − σ)m), E[ε | x] = σ/q · (x − (1 − σ)m), q = (1 − σ)²τ² + σ².

        Args:
            x: states.
            sigma: noise level of every item, in (0, 1].
            condition: one an item; read only with ``mean_key``.
        """
        mean = self.data_mean(x, condition)
        level = sigma.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))
        signal = 1.0 - level
        residual = (x - signal * mean) / (signal.square() * self.tau**2 + level.square())
        data = mean + signal * self.tau**2 * residual
        noise = level * residual
        velocity = noise - data
        if self.sigmas is None:
            return velocity
        step = self.step_of(sigma)
        return velocity if self.theta is None else velocity + self.theta[step].to(x.dtype)
