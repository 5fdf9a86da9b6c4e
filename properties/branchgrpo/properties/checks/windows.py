"""Moving windows: full-size, covering every trainable step, with the periods that the clauses give."""

import math
from itertools import groupby

from branchgrpo.properties.exact import holds
from branchgrpo.properties.findings import Finding
from branchgrpo.reference.types import ODE
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule, window_steps


def defined_period(schedule: WindowSchedule, start: int) -> int:
    """Iterations at a position (WIN-5)."""
    if schedule.decay == "constant":
        return schedule.period
    if schedule.decay == "linear":
        return max(1, round(schedule.period * (1.0 - start / (schedule.last + 1))))
    late = max(0, start - schedule.threshold)
    return max(1, round(schedule.period * math.exp(-schedule.rate * late)))


def cycle(schedule: WindowSchedule, seed: int) -> list[tuple[int, ...]]:
    """Windows of one full pass over the positions."""
    length = sum(defined_period(schedule, start) for start in schedule.starts)
    return [window_steps(schedule, t, seed) for t in range(length)]


def window_findings(schedule: WindowSchedule, seed: int) -> list[Finding]:
    """Windows of a progressive schedule over one pass and beyond its end (WIN-2, WIN-4, WIN-5)."""
    windows = cycle(schedule, seed)
    runs = [(steps, len(list(same))) for steps, same in groupby(windows)]
    full = [list(steps) == list(range(steps[0], steps[0] + schedule.size)) for steps in windows]
    union = set().union(*windows) == set(range(schedule.last + 1))
    times = [n == defined_period(schedule, steps[0]) for steps, n in runs]
    after = window_steps(schedule, len(windows), seed)
    expected = {"stay": windows[-1], "stop": (), "wrap": windows[0]}[schedule.end]
    return [
        holds("windows: full-size", "WIN-2", full),
        holds("windows: cover every trainable step", "WIN-2", [union]),
        holds("windows: iterations at each position", "WIN-4 WIN-5", times),
        holds("windows: ascending, then what the end says", "WIN-4", [windows == sorted(windows), after == expected]),
    ]


def random_window_findings(schedule: WindowSchedule, seed: int) -> list[Finding]:
    """Random positions: full-size, the same for a seed, kept for a period, and none is left out for ever (WIN-6)."""
    tries = 60 * len(schedule.starts)
    windows = [window_steps(schedule, t * schedule.period, seed) for t in range(tries)]
    again = [window_steps(schedule, t * schedule.period + schedule.period - 1, seed) for t in range(tries)]
    full = [list(steps) == list(range(steps[0], steps[0] + schedule.size)) for steps in windows]
    seen = {steps[0] for steps in windows} == set(schedule.starts)
    return [
        holds("random windows: full-size", "WIN-2 WIN-6", full),
        holds("random windows: kept for a period", "WIN-6", [windows == again]),
        holds("random windows: every position is drawn", "WIN-6", [seen]),
    ]


def windowed_plan_findings(plan: WindowedPlan, iteration: int, seed: int) -> list[Finding]:
    """The plan of an iteration: stochastic in the window and at the base plan's splits, else ODE (WIN-1, WIN-3)."""
    now, base = plan.at(iteration, seed), plan.base
    window = window_steps(plan.window, iteration, seed)
    noisy = {*window, *base.splits}
    kernels = [k == (base.kernels[i] if i in noisy else ODE) for i, k in enumerate(now.kernels)]
    trainable = set(now.trainable_steps) == noisy & set(base.trainable_steps)
    splits = now.splits == (base.splits if plan.group == 1 else window[:1])
    return [
        holds("windowed plan: stochastic where it should be", "WIN-1 WIN-3", kernels),
        holds("windowed plan: trained where stochastic", "WIN-1", [trainable]),
        holds("windowed plan: splits", "WIN-3", [splits]),
    ]
