"""The plan of an evaluation: the deterministic sampler on the schedule of training."""

import math

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import ODE
from branchgrpo.reference.windows import WindowedPlan

SAME = 1e-9
"""Largest difference of noise levels that count as the same schedule: far above rounding, far below any step."""


def training_sigmas(method: Method) -> tuple[float, ...]:
    """The noise levels that the method samples on; they do not move with the iteration."""
    sampler = method.sampler
    plan: Plan | PlanFamily = sampler.base if isinstance(sampler, WindowedPlan) else sampler
    return plan.sigmas


def shift_of(sigmas: tuple[float, ...]) -> float | None:
    """The shift s whose schedule this is (SCHED-2); None where there is none, or a single step leaves it open."""
    steps = len(sigmas) - 1
    if steps < 2:
        return None
    plain, shifted = (steps - 1) / steps, sigmas[1]
    shift = shifted * (1.0 - plain) / (plain * (1.0 - shifted))
    close = all(math.isclose(a, b, abs_tol=SAME) for a, b in zip(sigmas, shifted_schedule(steps, shift), strict=True))
    return shift if close else None


def evaluation_sigmas(method: Method, steps: int) -> tuple[float, ...]:
    """The method's own noise levels, or ``steps`` levels with the same shift; 0 steps are the method's own.

    Raises:
        OptionError: another number of steps than the method's, whose schedule no shift explains.
    """
    sigmas = training_sigmas(method)
    if steps in (0, len(sigmas) - 1):
        return sigmas
    shift = shift_of(sigmas)
    if shift is None:
        raise OptionError("evaluation.steps", steps, f"0 or {len(sigmas) - 1}: no shift explains the method's schedule")
    return shifted_schedule(steps, shift)


def evaluation_plan(method: Method, samples: int, steps: int = 0) -> Plan:
    """Independent noises a prompt, every step an ODE step.

    Args:
        method: its schedule and shift.
        samples: a prompt.
        steps: of the ODE; 0 is the method's number.

    Raises:
        OptionError: see ``evaluation_sigmas``.
    """
    sigmas = evaluation_sigmas(method, steps)
    count = len(sigmas) - 1
    return Plan(sigmas, (ODE,) * count, (1,) * count, (math.inf,) * count, roots=samples)
