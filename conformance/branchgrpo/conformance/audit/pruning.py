"""Stage: the gradient under pruning is the mean of the kept edges' gradients, and where it then points."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.capture import every_edge, score
from branchgrpo.conformance.case import Case, conditions, policy
from branchgrpo.conformance.cases import ONE, method, tree
from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, ParentTop1, PruningRule

RULES: dict[str, PruningRule] = {
    "Parent-Top1": ParentTop1(),
    "Extreme-2": ExtremeB(2),
    "depth window, 2 of 6": DepthWindow(4, 2),
}
PARITY = 1e-8
"""Two float64 gradients of one network: a few thousand operations of 2⁻⁵³ and cancellation between edges."""


def gradient(context: Context, case: Case, trace: Trace, advantages: Levels, kept: Masks) -> Float64[Tensor, "weights"]:
    """∇J of the network's weights."""
    model: Any = policy(case)
    value = context.subject.implementation.objective(
        [trace], model, conditions(case), [advantages], [kept], case.method.objective, case.method.log_prob, None
    )
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))]).double()


def masked(advantages: Levels, kept: Masks) -> Levels:
    """Advantages with 0 on dropped edges: their gradient is gone, their place in the mean is not."""
    return (advantages[0], *(a * mask for a, mask in zip(advantages[1:], kept, strict=True)))


def pruning_parity(context: Context) -> Data:
    """Relative error of the parity, and cosine to the unpruned gradient, for every rule."""
    operations = ("rollout", "fuse", "normalize", "leaf_keys", "prune", "objective")
    if not context.has(*operations):
        return missing(*(name for name in operations if not context.has(name)))
    plan = replace(tree(steps=6), branching=(2, 1, 2, 2, 1, 1))
    case = Case(method("audit", plan), ONE, prompts=1, device=context.subject.device)
    implementation, source = context.subject.implementation, KeyedNoise(case.seed)
    trace = implementation.rollout(plan, policy(case), case.prompt_list, conditions(case), source, **case.sampling())
    values = implementation.fuse(trace, score(trace, ONE), Fusion(beta=0.0))
    advantages = implementation.normalize(plan, values, (1.0,), Normalization())
    keys = implementation.leaf_keys(plan, values, (1.0,), Normalization())
    everything = every_edge(trace)
    whole = gradient(context, case, trace, advantages, everything)
    trained = list(plan.trainable_steps)
    rows: list[Data] = []
    reasons: list[Data] = []
    for name, rule in RULES.items():
        try:
            kept = implementation.prune(plan, keys, (rule,), 0)
        except UnsupportedError as unsupported:
            rows.append({"rule": name, "unsupported": str(unsupported)})
            continue
        found = gradient(context, case, trace, advantages, kept)
        edges, stay = (sum(int(masks[step].sum()) for step in trained) for masks in (everything, kept))
        wanted = gradient(context, case, trace, masked(advantages, kept), everything) * (edges / stay)
        error = float((found - wanted).norm() / wanted.norm())
        cosine = float(torch.nn.functional.cosine_similarity(found, whole, dim=0))
        rows.append({"rule": name, "edges": edges, "kept": stay, "error": error, "cosine": cosine})
        if not error <= PARITY:
            reasons.append(
                reason("reject", f"gradient under {name}: off by {error:.3g} of the kept edges' mean", "PRUNE-6")
            )
    return {"rows": rows, "tolerance": PARITY, "reasons": reasons}
