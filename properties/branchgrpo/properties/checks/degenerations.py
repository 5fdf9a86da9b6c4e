"""Plans that coincide: flat GRPO as a tree, and a tree whose siblings cannot differ."""

import torch

from branchgrpo.properties.exact import all_close, as_array
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.subject import Subject
from branchgrpo.properties.tolerances import EXACT, PARITY
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource, Prompt


def flat_findings(subject: Subject, trace: Trace, rewards: torch.Tensor, fusion: Fusion) -> list[Finding]:
    """One split at step 0: at every depth ≥ 1 a chain has its leaf's value and advantage, for every β (PLAN-9)."""
    plan, weights = trace.plan, (1.0,) * rewards.shape[2]
    values = subject.implementation.fuse(trace, rewards, fusion)
    advantages = subject.implementation.normalize(plan, values, weights, Normalization())
    depths = range(1, plan.steps + 1)
    name = f"{subject.name}, one split at step 0 is flat GRPO"
    return [
        all_close(f"{name}: values", "PLAN-9 FUSE-1", [values[d] for d in depths], [rewards] * plan.steps, EXACT),
        all_close(
            f"{name}: advantages",
            "PLAN-9 NORM-1",
            [advantages[d] for d in depths],
            [advantages[-1]] * plan.steps,
            EXACT,
        ),
    ]


def unspread_findings(subject: Subject, plan: Plan, source: NoiseSource, prompts: tuple[Prompt, ...]) -> list[Finding]:
    """s = 0 makes the children of a split equal (NOISE-2); ``plan`` has one split, with spread 0."""
    (split,) = plan.splits
    trace = subject.grow(plan, Elementwise().to(subject.device), source, prompts)
    level = as_array(trace.states[split + 1])
    families = level.reshape(level.shape[0], -1, plan.branching[split], *level.shape[2:])
    first = families[:, :, :1].repeat(plan.branching[split], axis=2)
    name = f"{subject.name}, s = 0 makes siblings equal"
    return [all_close(name, "NOISE-2", [families], [first], PARITY)]
