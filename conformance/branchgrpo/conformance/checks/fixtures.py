"""Rollouts that operation checks start from."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import Subject, UnsupportedError
from branchgrpo.conformance.subjects import Distance, Network, condition_for
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole, Prompt, VelocityModel
from branchgrpo.reference.types import Kernel, KernelKind, Reduction

LATENT = (3, 4)
SDE, FLOW = Kernel(KernelKind.SDE, 0.3), Kernel(KernelKind.FLOW_SDE, 0.7)


def prompts_of(count: int) -> tuple[Prompt, ...]:
    """Prompts with the ids 1, 2 and so on."""
    return tuple(Prompt(i + 1, f"prompt {i + 1}") for i in range(count))


def small_tree(**options: Any) -> Plan:
    """Eight leaves at most: splits at steps 0 and 2 of 5, s = 1."""
    return tree_plan(5, SDE, **{"splits": (0, 2), "branching": 2, "spread": 1.0, **options})


def small_plan(subject: Subject, **options: Any) -> Plan:
    """The small tree, or four chains that part at step 0 for a subject that can grow no tree."""
    flat = tree_plan(5, SDE, **{"splits": (0,), "branching": 4, **options})
    for plan in (small_tree(**options), flat):
        try:
            rolled(subject, plan)
        except UnsupportedError:
            continue
        except Exception:  # the check that asked will meet it, and report it as its own
            return plan
        return plan
    return flat


def sampling(iteration: int = 0, storage: torch.dtype = torch.float64) -> dict[str, Any]:
    """Keyword arguments of a rollout in float64."""
    return {
        "latent_shape": LATENT,
        "dtype": torch.float64,
        "storage_dtype": storage,
        "reduction": Reduction.MEAN,
        "iteration": iteration,
    }


def network(subject: Subject, scale: float = 0.5) -> Network:
    """The policy, or with another scale a frozen reference."""
    return Network(math.prod(LATENT), scale).to(subject.device)


def rolled(
    subject: Subject,
    plan: Plan,
    prompts: Sequence[Prompt] = prompts_of(2),
    model: VelocityModel | None = None,
    seed: int = 3,
    **options: Any,
) -> Trace:
    """A rollout of a plan."""
    implementation = subject.operation("rollout")
    condition = condition_for(prompts, torch.float64, subject.device)
    settings = {**sampling(), **options}
    return implementation.rollout(plan, model or network(subject), prompts, condition, KeyedNoise(seed), **settings)


def noise_of(trace: Trace, step: int, seed: int = 3) -> Float64[Tensor, "prompts nodes *latent"]:
    """ξ of all children of a step of a rollout of ``rolled``, drawn once more by the keys of NOISE-3 (NOISE-1)."""
    plan = trace.plan
    private = draw_of(trace, NoiseRole.PRIVATE, step + 1, seed)
    factor, spread = plan.branching[step], plan.spreads[step]
    if factor == 1 or math.isinf(spread):
        return private
    norm = math.hypot(1.0, spread)
    shared = draw_of(trace, NoiseRole.SHARED, step, seed).repeat_interleave(factor, dim=1)
    return shared / norm + (spread / norm) * private


def draw_of(trace: Trace, role: NoiseRole, depth: int, seed: int = 3) -> Float64[Tensor, "prompts nodes *latent"]:
    """The keyed source's draws for all nodes of a depth, in level order, on the CPU."""
    roots, size, latent = range(trace.plan.roots), trace.plan.level_sizes[depth], trace.states[0].shape[2:]
    rows = [(prompt.id, root, node) for prompt in trace.prompts for root in roots for node in range(size)]
    keys = NoiseKeys(0, role, depth, *(torch.tensor(column) for column in zip(*rows, strict=True)))
    drawn = KeyedNoise(seed).draw(keys, tuple(latent), torch.float64, torch.device("cpu"))
    return drawn.reshape(len(trace.prompts), -1, *latent)


def rewards_of(trace: Trace, *targets: float) -> Float64[Tensor, "prompts leaves models"]:
    """Rewards of every leaf: a distance a target."""
    leaves = trace.states[-1]
    columns = [Distance(t)(leaves.flatten(0, 1), ()).reshape(leaves.shape[:2]) for t in targets or (0.3,)]
    return torch.stack(columns, dim=-1)


def all_edges(trace: Trace) -> Masks:
    """Masks that keep every edge."""
    return tuple(torch.ones(s.shape[:2], dtype=torch.bool, device=s.device) for s in trace.states[1:])


def alternating(trace: Trace) -> Levels:
    """Advantages of both signs, different from edge to edge."""
    return tuple(
        torch.cos(torch.arange(s.shape[0] * s.shape[1], dtype=torch.float64, device=s.device) + depth).reshape(
            s.shape[:2]
        )
        for depth, s in enumerate(trace.states)
    )
