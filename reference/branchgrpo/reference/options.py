"""Options of fusion, normalization, pruning and objective: frozen, validated once (spec: the chapter of each)."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from branchgrpo.reference.errors import OptionError, is_integer

FusionKind = Literal["path_softmax", "child_softmax", "standardised"]
MeanScope = Literal["tree", "prompt"]
StdScope = Literal["tree", "prompt", "batch"]
ObjectiveReduction = Literal["edge_mean", "depth_mean"]
EdgeWeighting = Literal["uniform", "std"]
RewardOrder = Literal["normalize_then_sum", "sum_then_normalize"]


def check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ``OptionError`` unless ``value`` is one of ``choices``.  Clause: ERR-5."""
    if value not in choices:
        raise OptionError(field, value, f"one of {list(choices)}")


def check_real(field: str, value: float, low: float, *, open_low: bool = False) -> None:
    """Raise ``OptionError`` unless ``value`` is finite and at least (or, if open, above) ``low``.  Clause: ERR-5."""
    if not (math.isfinite(value) and (value > low if open_low else value >= low)):
        raise OptionError(field, value, f"finite and {'>' if open_low else '≥'} {low:g}")


@dataclass(frozen=True)
class Fusion:
    """How leaf rewards become node values (FUSE-1 … FUSE-6): estimator and inverse temperature β ≥ 0."""

    kind: FusionKind = "path_softmax"
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_choice("fusion.kind", self.kind, get_args(FusionKind))
        check_real("fusion.beta", self.beta, 0.0)


@dataclass(frozen=True)
class Normalization:
    """How node values become advantages (NORM-1 … NORM-7).

    Attributes:
        mean_scope: nodes of a depth whose mean is subtracted: one tree, or all trees of the prompt.
        std_scope: nodes of a depth whose std divides: one tree, the prompt, or the whole batch.
        bessel: divide the sum of squares by n − 1 (True) or by n.
        eps: ε ≥ 0 added to the std.
        clip: A_max > 0; the weighted sum over reward models is clipped once to ±A_max.
        order: normalise each reward model and then sum, or sum the weighted rewards and then normalise.
    """

    mean_scope: MeanScope = "tree"
    std_scope: StdScope = "tree"
    bessel: bool = True
    eps: float = 1e-8
    clip: float = 5.0
    order: RewardOrder = "normalize_then_sum"

    def __post_init__(self) -> None:
        check_choice("normalization.mean_scope", self.mean_scope, get_args(MeanScope))
        check_choice("normalization.std_scope", self.std_scope, get_args(StdScope))
        check_choice("normalization.order", self.order, get_args(RewardOrder))
        check_choice("normalization.bessel", self.bessel, (True, False))
        check_real("normalization.eps", self.eps, 0.0)
        if not self.clip > 0:
            raise OptionError("normalization.clip", self.clip, "> 0 (∞ switches clipping off)")


@dataclass(frozen=True)
class ParentTop1:
    """Width pruning: one child of each last-split parent stays (PRUNE-3)."""

    drop_split_edges: bool = False


@dataclass(frozen=True)
class ExtremeB:
    """Width pruning: the b best and the b worst leaves of a tree stay (PRUNE-4)."""

    b: int
    drop_split_edges: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.b) or self.b < 1:
            raise OptionError("extreme_b.b", self.b, "an integer ≥ 1")


@dataclass(frozen=True)
class DepthWindow:
    """Depth pruning: edges whose child depth is in a window that slides over iterations are dropped (PRUNE-5).

    Attributes:
        start: a, the shallowest depth of the window at iteration 0 (1..T).
        size: w ≥ 1 depths.
        period: τ ≥ 1 iterations between shifts.
        direction: δ, +1 towards the leaves or −1 towards the root.
        stop: depth that the leading edge never passes; None is T for δ = +1 and 1 for δ = −1.
    """

    start: int
    size: int = 4
    period: int = 30
    direction: Literal[1, -1] = 1
    stop: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "size", "period"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise OptionError(f"depth_window.{name}", getattr(self, name), "an integer ≥ 1")
        check_choice("depth_window.direction", self.direction, (1, -1))
        if self.stop is not None and (not is_integer(self.stop) or self.stop < 1):
            raise OptionError("depth_window.stop", self.stop, "None or an integer ≥ 1")


PruningRule = ParentTop1 | ExtremeB | DepthWindow


@dataclass(frozen=True)
class Objective:
    """The clipped surrogate (OBJ-1 … OBJ-8).

    Attributes:
        clip_low, clip_high: ε_lo and ε_hi > 0; the ratio is clipped to [1 − ε_lo, 1 + ε_hi].
        reduction: mean over a tree's kept edges, or mean within a depth and then over depths.
        edge_weights: ``uniform``, or ``std``: proportional to the step's std, mean 1 over trained steps.
        kl: β_KL ≥ 0, weight of the KL to a frozen reference policy.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    reduction: ObjectiveReduction = "edge_mean"
    edge_weights: EdgeWeighting = "uniform"
    kl: float = 0.0

    def __post_init__(self) -> None:
        check_real("objective.clip_low", self.clip_low, 0.0, open_low=True)
        check_real("objective.clip_high", self.clip_high, 0.0, open_low=True)
        check_choice("objective.reduction", self.reduction, get_args(ObjectiveReduction))
        check_choice("objective.edge_weights", self.edge_weights, get_args(EdgeWeighting))
        check_real("objective.kl", self.kl, 0.0)
