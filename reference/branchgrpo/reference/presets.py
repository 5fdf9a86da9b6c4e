"""Published methods by name (spec: plan, tables/presets.toml)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.options import (
    DepthWindow,
    ExtremeB,
    Fusion,
    Normalization,
    Objective,
    ParentTop1,
    PruningRule,
)
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

DENSE, MIXED, SPARSE, LATE = (0, 3, 6, 9), (0, 4, 8, 12), (0, 5, 10, 15), (9, 12, 15, 18)
TIGHT = Objective(clip_low=1e-4, clip_high=1e-4)


def dancegrpo(
    name: str, *, steps: int = 20, group: int = 12, eta: float = 0.3, trained_fraction: float = 1.0
) -> Method:
    """DanceGRPO: one noise a prompt, G chains that part at step 0, every step SDE (arXiv 2505.07818; PLAN-8)."""
    kernel = Kernel(KernelKind.SDE, eta)
    plan = tree_plan(steps, kernel, splits=(0,), branching=group, trained_fraction=trained_fraction)
    return Method(name, "DanceGRPO; BranchGRPO Table 1", plan, objective=TIGHT)


def flowgrpo(name: str, *, steps: int = 10, group: int = 24, eta: float = 0.7, kl: float = 0.04) -> Method:
    """Flow-GRPO: G noises a prompt, no branching, every step SDE, the last untrained (arXiv 2505.05470; PLAN-8)."""
    kernel, trained = Kernel(KernelKind.FLOW_SDE, eta), tuple(range(steps - 1))
    plan = tree_plan(steps, kernel, roots=group, output=LeafOutput.SAMPLE, trained_steps=trained)
    scopes = Normalization(mean_scope="prompt", std_scope="batch", bessel=False, eps=1e-4)
    return Method(name, "Flow-GRPO, SD3.5-M", plan, normalization=scopes, objective=replace(TIGHT, kl=kl))


def mixgrpo(name: str, *, steps: int = 25, group: int = 12, window: int = 4, period: int = 25) -> Method:
    """MixGRPO: SDE in a sliding window at whose first step the group parts, else ODE (arXiv 2507.21802; WIN-3)."""
    base = tree_plan(steps, Kernel(KernelKind.FLOW_SDE, 0.7))
    sampler = WindowedPlan(base, WindowSchedule(window, last=steps - 2, period=period), group)
    return Method(name, "MixGRPO; BranchGRPO Table 1", sampler, objective=TIGHT)


def branchgrpo(
    name: str,
    *,
    steps: int = 20,
    splits: Sequence[int] = DENSE,
    branching: int = 2,
    spread: float = 4.0,
    eta: float = 0.3,
    beta: float = 1.0,
    pruning: tuple[PruningRule, ...] = (),
) -> Method:
    """BranchGRPO: K children at each split step, every step SDE (arXiv 2509.06040; PLAN-8, DIV-P11)."""
    kernel = Kernel(KernelKind.SDE, eta)
    plan = tree_plan(steps, kernel, splits=splits, branching=branching, spread=spread)
    return Method(name, "BranchGRPO Tables 1–3", plan, fusion=Fusion(beta=beta), pruning=pruning)


def branchgrpo_mix(name: str, *, window: int = 4, period: int = 25) -> Method:
    """BranchGRPO-Mix: ODE at every step that is neither a split nor in the sliding SDE window (WIN-3, DIV-P9)."""
    base = branchgrpo(name)
    assert not isinstance(base.sampler, WindowedPlan | PlanFamily)
    schedule = WindowSchedule(window, last=base.sampler.steps - 2, period=period)
    return replace(base, sampler=WindowedPlan(base.sampler, schedule))


def g2rpo(name: str, *, steps: int = 16, group: int = 12, granularities: tuple[int, ...] = (1, 2, 3)) -> Method:
    """G²RPO: noise at one step k of the first half, continuations at all λ in Λ (arXiv 2510.01982; PLAN-8, SING-1)."""
    kernel = Kernel(KernelKind.FLOW_SDE, 0.7)
    sampler = PlanFamily(shifted_schedule(steps), kernel, tuple(range(steps // 2)), group, granularities)
    return Method(name, "G²RPO Tables 1–4", sampler, objective=TIGHT)


def tempflow(name: str, *, steps: int = 10, roots: int = 4, group: int = 6, eta: float = 0.7) -> Method:
    """TempFlow-GRPO: noise at one step k, all k but the last, pooled over several roots (arXiv 2508.04324; PLAN-8)."""
    kernel, ks = Kernel(KernelKind.FLOW_SDE, eta), tuple(range(steps - 1))
    family = PlanFamily(shifted_schedule(steps), kernel, ks, group, roots=roots, output=LeafOutput.SAMPLE)
    pooled = Normalization(mean_scope="prompt", std_scope="prompt")
    return Method(name, "TempFlow-GRPO", family, normalization=pooled, objective=replace(TIGHT, edge_weights="std"))


def depth_window(size: int) -> DepthWindow:
    """The paper's depth window: from just below the last dense split towards the leaves (PRUNE-5, DIV-B5, DIV-P4)."""
    return DepthWindow(start=DENSE[-1] + 1, size=size, period=30, direction=1)


PRESETS: dict[str, Callable[[str], Method]] = {
    "dancegrpo": dancegrpo,
    "dancegrpo-tf06": partial(dancegrpo, trained_fraction=0.6),
    "flowgrpo": flowgrpo,
    "mixgrpo": mixgrpo,
    "mixgrpo-20-5": partial(mixgrpo, steps=20, window=5),
    "mixgrpo-10": partial(mixgrpo, steps=10),
    "branchgrpo": branchgrpo,
    "branchgrpo-widpru": partial(branchgrpo, pruning=(ParentTop1(),)),
    "branchgrpo-extreme": partial(branchgrpo, pruning=(ExtremeB(4),)),
    "branchgrpo-deppru": partial(branchgrpo, pruning=(depth_window(4),)),
    "branchgrpo-deppru-5": partial(branchgrpo, pruning=(depth_window(5),)),
    "branchgrpo-mix": branchgrpo_mix,
    "branchgrpo-uniform": partial(branchgrpo, beta=0.0),
    "branchgrpo-mixed": partial(branchgrpo, splits=MIXED),
    "branchgrpo-sparse": partial(branchgrpo, splits=SPARSE),
    "branchgrpo-late": partial(branchgrpo, splits=LATE),
    "branchgrpo-s1": partial(branchgrpo, spread=1.0),
    "branchgrpo-s2": partial(branchgrpo, spread=2.0),
    "branchgrpo-s8": partial(branchgrpo, spread=8.0),
    "branchgrpo-k3": partial(branchgrpo, branching=3),
    "branchgrpo-k4": partial(branchgrpo, branching=4),
    "g2rpo": g2rpo,
    "g2rpo-single": partial(g2rpo, granularities=(1,)),
    "g2rpo-12": partial(g2rpo, granularities=(1, 2)),
    "g2rpo-13": partial(g2rpo, granularities=(1, 3)),
    "g2rpo-10": partial(g2rpo, steps=10),
    "tempflow": tempflow,
}
"""Preset name → its builder; every builder takes the name, and its published settings as defaults."""


def preset(name: str) -> Method:
    """The method of a preset name.

    Clause: PLAN-8.

    Raises:
        OptionError: an unknown name; the message gives the nearest ones.
    """
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3) or sorted(PRESETS)
        raise OptionError("preset", name, f"a known name, such as {', '.join(near)}")
    return PRESETS[name](name)
