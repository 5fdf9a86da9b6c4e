"""Vectors of options that are accepted, and of options that are not."""

import math
from typing import Any

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import FLOW, case
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.windows import WindowSchedule


def good_options() -> dict[str, tuple[str, Any]]:
    """Options at and off their defaults."""
    return {
        "fusion": ("fusion", Fusion()),
        "fusion-child": ("fusion", Fusion("child_softmax", 0.0)),
        "normalization": ("normalization", Normalization()),
        "normalization-flow": ("normalization", Normalization("prompt", "batch", False, 1e-4)),
        "normalization-unclipped": ("normalization", Normalization(clip=math.inf)),
        "objective": ("objective", Objective()),
        "parent-top1": ("parent_top1", ParentTop1(True)),
        "extreme-b": ("extreme_b", ExtremeB(4)),
        "depth-window": ("depth_window", DepthWindow(10)),
        "kernel": ("kernel", FLOW),
    }


def bad_options() -> dict[str, tuple[str, Any, dict[str, Any], str]]:
    """Kind, a good one, what it is changed to, and the field at fault."""
    window, deep = WindowSchedule(4, 10), DepthWindow(10)
    return {
        "fusion-unknown": ("fusion", Fusion(), {"kind": "max"}, "fusion.kind"),
        "fusion-beta-negative": ("fusion", Fusion(), {"beta": -1.0}, "fusion.beta"),
        "fusion-beta-infinite": ("fusion", Fusion(), {"beta": "inf"}, "fusion.beta"),
        "normalization-mean": ("normalization", Normalization(), {"mean_scope": "batch"}, "normalization.mean_scope"),
        "normalization-std": ("normalization", Normalization(), {"std_scope": "rank"}, "normalization.std_scope"),
        "normalization-eps": ("normalization", Normalization(), {"eps": -1e-8}, "normalization.eps"),
        "normalization-clip": ("normalization", Normalization(), {"clip": 0.0}, "normalization.clip"),
        "normalization-order": ("normalization", Normalization(), {"order": "sum"}, "normalization.order"),
        "objective-clip-low": ("objective", Objective(), {"clip_low": 0.0}, "objective.clip_low"),
        "objective-clip-high": ("objective", Objective(), {"clip_high": "inf"}, "objective.clip_high"),
        "objective-reduction": ("objective", Objective(), {"reduction": "sum"}, "objective.reduction"),
        "objective-weights": ("objective", Objective(), {"edge_weights": "sigma"}, "objective.edge_weights"),
        "objective-kl": ("objective", Objective(), {"kl": -0.1}, "objective.kl"),
        "extreme-b-0": ("extreme_b", ExtremeB(1), {"b": 0}, "extreme_b.b"),
        "depth-window-size": ("depth_window", deep, {"size": 0}, "depth_window.size"),
        "depth-window-period": ("depth_window", deep, {"period": 0}, "depth_window.period"),
        "depth-window-direction": ("depth_window", deep, {"direction": 0}, "depth_window.direction"),
        "window-size": ("window", window, {"size": 0}, "window.size"),
        "window-stride": ("window", window, {"stride": 5}, "window.stride"),
        "window-last": ("window", window, {"last": 2}, "window.last"),
        "window-order": ("window", window, {"order": "backwards"}, "window.order"),
        "window-decay": ("window", window, {"decay": "cosine"}, "window.decay"),
        "window-end": ("window", window, {"end": "bounce"}, "window.end"),
        "window-rate": ("window", window, {"rate": -0.1}, "window.rate"),
    }  # fmt: skip


def option_sets() -> list[Case]:
    """Options that are accepted, and options that are not."""
    made = [
        case("options", slug, "PLAN-8", f"{kind}, accepted as it is", tolerance="exact",
             arguments={"kind": kind, "options": encode(value)})
        for slug, (kind, value) in good_options().items()
    ]  # fmt: skip
    for slug, (kind, value, change, field) in bad_options().items():
        arguments = {"kind": kind, "options": {**encode(value), **change}}
        ((name, found),) = change.items()
        made.append(case("options", slug, "ERR-5", f"{name} = {found}", arguments=arguments, error=field))
    unknown = {"kind": "fusion", "options": {**encode(Fusion()), "temperature": 1.0}}
    made.append(case("options", "unknown-key", "ERR-5", "an option that nobody reads", arguments=unknown,
                     error="fusion.temperature"))  # fmt: skip
    return made
