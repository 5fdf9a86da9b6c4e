"""Moving SDE windows: which steps are stochastic at an iteration (spec: windows)."""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from branchgrpo.reference.errors import OptionError, PlanError, is_integer
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.options import check_choice, check_real
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole
from branchgrpo.reference.types import ODE

Order = Literal["progressive", "random"]
Decay = Literal["constant", "linear", "exponential"]
RangeEnd = Literal["stay", "stop", "wrap"]


@dataclass(frozen=True)
class WindowSchedule:
    """A window of w consecutive steps that moves over the iterations.

    Clause: WIN-1 … WIN-6.  Source: MixGRPO (arXiv 2507.21802) §3.2 and its ablation of strategies.

    Attributes:
        size: w ≥ 1 steps; every window is full-size (WIN-2).
        last: last step that a window may hold; the first is 0.
        stride: steps by which the window moves, at most w (WIN-2, DIV-M1).
        period: τ ≥ 1 iterations at a position, before decay.
        order: progressive, or a position drawn uniformly every τ iterations, the same on every rank.
        decay: how τ shrinks as the window's first step l grows (WIN-5).
        rate, threshold: of the exponential decay.
        end: what follows the last position: stay there, stop (no window any more) or wrap to the first.
    """

    size: int
    last: int
    stride: int = 1
    period: int = 25
    order: Order = "progressive"
    decay: Decay = "constant"
    rate: float = 0.1
    threshold: int = 13
    end: RangeEnd = "stay"

    def __post_init__(self) -> None:
        for name in ("size", "stride", "period"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise OptionError(f"window.{name}", getattr(self, name), "an integer ≥ 1")
        if self.stride > self.size:
            raise OptionError("window.stride", self.stride, f"≤ size = {self.size}, so that no step is left out")
        if not is_integer(self.last) or self.last < self.size - 1:
            raise OptionError("window.last", self.last, f"an integer ≥ size − 1 = {self.size - 1}")
        check_choice("window.order", self.order, get_args(Order))
        check_choice("window.decay", self.decay, get_args(Decay))
        check_choice("window.end", self.end, get_args(RangeEnd))
        check_real("window.rate", self.rate, 0.0)

    @property
    def starts(self) -> tuple[int, ...]:
        """First steps of all positions: 0, stride, 2·stride, …, the last one pulled back so that it is full-size."""
        final = self.last - self.size + 1
        return (*range(0, final, self.stride), final)


def period_at(schedule: WindowSchedule, start: int) -> int:
    """Iterations spent where the window starts at step l.

    Clause: WIN-5.  constant: τ;  linear: τ·(1 − l / (last + 1));  exponential: τ·exp(−k·max(0, l − l₀));
    the last two rounded to the nearest integer, at least 1.  Source: MixGRPO (exponential decay).
    """
    if schedule.decay == "linear":
        return max(1, round(schedule.period * (1.0 - start / (schedule.last + 1))))
    if schedule.decay == "exponential":
        return max(1, round(schedule.period * math.exp(-schedule.rate * max(0, start - schedule.threshold))))
    return schedule.period


def window_steps(schedule: WindowSchedule, iteration: int, seed: int) -> tuple[int, ...]:
    """The steps of the window at an iteration; empty once a ``stop`` schedule has run out.

    Clause: WIN-1 … WIN-6.

    Args:
        schedule: the schedule.
        iteration: t ≥ 0.
        seed: of the run; read by the random order only.
    """
    if not is_integer(iteration) or iteration < 0:
        raise OptionError("iteration", iteration, "an integer ≥ 0")
    starts = schedule.starts
    if schedule.order == "random":
        generator = keyed_generator(seed, iteration // schedule.period, NoiseRole.WINDOW)
        start = starts[int(generator.integers(len(starts)))]
        return tuple(range(start, start + schedule.size))
    periods = [period_at(schedule, start) for start in starts]
    if iteration >= sum(periods):
        if schedule.end == "stop":
            return ()
        iteration = iteration % sum(periods) if schedule.end == "wrap" else sum(periods) - 1
    ends = accumulate(periods)
    start = next(start for start, end in zip(starts, ends, strict=True) if iteration < end)
    return tuple(range(start, start + schedule.size))


@dataclass(frozen=True)
class WindowedPlan:
    """A plan whose steps outside a moving window are ODE steps, its own splits excepted.

    Clause: WIN-1, WIN-3, DIV-B7.  BranchGRPO-Mix keeps its splits; MixGRPO parts into a group at the window's start.

    Attributes:
        base: the plan with every step stochastic.
        window: when which steps are in the window.
        group: G; above 1 the window's first step splits into G children with s = ∞, and ``base`` must have no split.
    """

    base: Plan
    window: WindowSchedule
    group: int = 1

    def __post_init__(self) -> None:
        if not is_integer(self.group) or self.group < 1 or (self.group > 1 and self.base.splits):
            raise PlanError("group", self.group, "an integer ≥ 1, and 1 if the base plan has splits of its own")
        if self.window.last != max(self.base.trainable_steps, default=-1):
            legal = f"the last of the trainable steps {self.base.trainable_steps}, so that the windows cover them all"
            raise PlanError("window.last", self.window.last, legal)

    def at(self, iteration: int, seed: int = 0) -> Plan:
        """The plan of one iteration (WIN-1, WIN-3).  Raises ``PlanError`` if no step is left stochastic."""
        window = window_steps(self.window, iteration, seed)
        noisy = {*window, *self.base.splits}
        steps = range(self.base.steps)
        kernels = tuple(self.base.kernels[i] if i in noisy else ODE for i in steps)
        named = self.base.trained_steps
        trained = None if named is None else tuple(i for i in named if i in noisy)
        plan = replace(self.base, kernels=kernels, trained_steps=trained)
        if not plan.stochastic_steps:
            raise PlanError("window", window, f"with a stochastic step of the base plan at iteration {iteration}")
        if self.group == 1:
            return plan
        branching = tuple(self.group if i == window[0] else 1 for i in steps)
        return replace(plan, branching=branching, spreads=(math.inf,) * self.base.steps)
