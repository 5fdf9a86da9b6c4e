"""Where the depth-pruning window is at an iteration (spec: pruning)."""

from collections.abc import Sequence

from branchgrpo.reference.errors import OptionError, PlanError, is_integer
from branchgrpo.reference.options import DepthWindow, PruningRule
from branchgrpo.reference.plan import Plan


def largest_shift(rule: DepthWindow, steps: int) -> int:
    """m_max: the largest shift at which the leading edge has not passed ``stop``.

    Clause: PRUNE-5.  The leading edge is the deepest depth for δ = +1 and the shallowest for δ = −1.

    Raises:
        OptionError: a window or stop outside 1..T, or a leading edge past ``stop`` from the start.
    """
    default = steps if rule.direction == 1 else 1
    stop = default if rule.stop is None else rule.stop
    if rule.start > steps:
        raise OptionError("depth_window.start", rule.start, f"in 1..{steps}")
    if stop > steps:
        raise OptionError("depth_window.stop", stop, f"in 1..{steps}")
    leading = rule.start + rule.size - 1 if rule.direction == 1 else rule.start
    room = (stop - leading) * rule.direction
    if room < 0:
        raise OptionError("depth_window.stop", stop, f"not passed by the leading depth {leading} at iteration 0")
    return room


def window_at(rule: DepthWindow, steps: int, iteration: int) -> range:
    """W(t) = {a + δm, …, a + δm + w − 1} clipped to 1..T, m = min(⌊t/τ⌋, m_max).

    Clause: PRUNE-5.  Source: BranchGRPO §3.4.

    Args:
        rule: a, w, τ, δ and stop.
        steps: T of the plan.
        iteration: t ≥ 0.
    """
    if not is_integer(iteration) or iteration < 0:
        raise OptionError("iteration", iteration, "an integer ≥ 0")
    shift = min(iteration // rule.period, largest_shift(rule, steps))
    first = rule.start + rule.direction * shift
    return range(max(first, 1), min(first + rule.size, steps + 1))


def check_trainable_left(plan: Plan, rules: Sequence[PruningRule], iteration: int) -> None:
    """Refuse depth windows that cover every trainable step, before anything is sampled.

    Clause: OBJ-3, ERR-2.  Width rules always let a chain stay, so only depth windows can empty the loss.

    Raises:
        PlanError: no trainable edge is left at this iteration.
    """
    windows = [window_at(rule, plan.steps, iteration) for rule in rules if isinstance(rule, DepthWindow)]
    covered = {depth for window in windows for depth in window}
    if windows and covered.issuperset(step + 1 for step in plan.trainable_steps):
        legal = f"at least one outside the depth windows at iteration {iteration}"
        raise PlanError("trained edges", 0, legal)
