"""Operation checks of fusion, normalization and pruning on given arrays."""

from dataclasses import replace

import torch

from branchgrpo.conformance.checks.base import Subject, expect, expect_close, operation_check
from branchgrpo.conformance.checks.fixtures import prompts_of, rewards_of, rolled, small_tree
from branchgrpo.conformance.checks.limits import EXACT, INVARIANCE
from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, ParentTop1
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Reduction


def summed(subject: Subject, plan: Plan) -> Trace:
    """A rollout whose log-probabilities are sums: their spread makes fusion weights uneven."""
    return rolled(subject, plan, reduction=Reduction.SUM)


@operation_check
@clause("FUSE-3")
def path_softmax_is_nested_evidence(subject: Subject) -> None:
    """A value is the softmax over children of their evidence: own log-probability plus log-sum-exp below."""
    plan, beta = small_tree(), 0.3
    trace = summed(subject, plan)
    rewards = rewards_of(trace)
    values = subject.operation("fuse").fuse(trace, rewards, Fusion(beta=beta))
    evidence = torch.zeros_like(rewards[..., 0])
    value = rewards[..., 0]
    for depth in reversed(range(plan.steps)):
        level = trace.log_probs[depth]
        own = torch.zeros_like(evidence) if level is None else level
        score = (beta * own + evidence).reshape(len(trace.prompts), -1, plan.branching[depth])
        value = (torch.softmax(score, dim=-1) * value.reshape(score.shape)).sum(dim=-1)
        evidence = torch.logsumexp(score, dim=-1)
        expect_close(values[depth][..., 0], value, EXACT * 10, f"values of depth {depth} from children's evidence")


@operation_check
@clause("FUSE-6")
def beta_zero_is_uniform(subject: Subject) -> None:
    """At β = 0 every kind gives the mean over the leaves."""
    plan = small_tree(branching=3)
    trace = summed(subject, plan)
    rewards = rewards_of(trace, 0.3, -1.0)
    for kind in ("path_softmax", "child_softmax", "standardised"):
        values = subject.operation("fuse").fuse(trace, rewards, Fusion(kind, 0.0))
        for depth, found in enumerate(values):
            wanted = rewards.reshape(2, found.shape[1], -1, 2).mean(dim=2)
            expect_close(found, wanted, EXACT, f"{kind} values of depth {depth} at β = 0")


@operation_check
@clause("FUSE-2")
def large_beta_follows_the_likeliest_leaf(subject: Subject) -> None:
    """At huge β the value is the likeliest leaf's reward, and nothing overflows."""
    plan = small_tree()
    trace = summed(subject, plan)
    rewards = rewards_of(trace)
    found = subject.operation("fuse").fuse(trace, rewards, Fusion(beta=1e8))[0][..., 0]
    total = torch.zeros_like(rewards[..., 0])
    for level in trace.log_probs:
        if level is not None:
            total = total + level.repeat_interleave(total.shape[1] // level.shape[1], dim=1)
    wanted = rewards[..., 0].gather(1, total.argmax(dim=1, keepdim=True))
    expect_close(found, wanted, EXACT, "root values at β = 1e8")


@operation_check
@clause("NORM-5")
def rewards_combine_in_the_declared_order(subject: Subject) -> None:
    """Normalise then sum, or sum then normalise: the two differ, each is as declared."""
    plan = small_tree()
    trace = summed(subject, plan)
    rewards = rewards_of(trace, 0.3, 2.0) * torch.tensor([1.0, 50.0], dtype=torch.float64, device=subject.device)
    values = subject.operation("fuse").fuse(trace, rewards, Fusion(beta=0.0))
    weights, normalize = (1.0, -0.3), subject.operation("normalize").normalize
    plain = Normalization(clip=1e6)
    parts = [normalize(plan, tuple(v[..., m : m + 1] for v in values), (1.0,), plain) for m in range(2)]
    for depth, found in enumerate(normalize(plan, values, weights, plain)):
        expect_close(found, parts[0][depth] - 0.3 * parts[1][depth], 1e-9, f"normalised, then summed, depth {depth}")
    mixed = tuple((v @ torch.tensor(weights, dtype=torch.float64, device=v.device)).unsqueeze(-1) for v in values)
    first = normalize(plan, values, weights, replace(plain, order="sum_then_normalize"))
    for depth, wanted in enumerate(normalize(plan, mixed, (1.0,), plain)):
        expect_close(first[depth], wanted, 1e-9, f"summed, then normalised, depth {depth}")


@operation_check
@clause("NORM-7")
def advantages_ignore_origin_and_scale(subject: Subject) -> None:
    """Adding a constant to a model's rewards, or multiplying them, leaves advantages alone; two of them are ±1/√2."""
    plan = small_tree(splits=(0,))
    trace = summed(subject, plan)
    rewards = rewards_of(trace)
    base = normalized(subject, plan, trace, rewards)
    for what, other in {"+ 1000": rewards + 1000, "× 40": rewards * 40, "× 1e-3": rewards * 1e-3}.items():
        for depth, found in enumerate(normalized(subject, plan, trace, other)):
            expect_close(found, base[depth], INVARIANCE, f"advantages of depth {depth} after rewards {what}")
    pair = base[-1].abs()
    expect_close(pair, torch.full_like(pair, 2**-0.5), INVARIANCE, "advantages of two leaves")


def normalized(subject: Subject, plan: Plan, trace: Trace, rewards: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Advantages of uniform fusion."""
    values = subject.operation("fuse").fuse(trace, rewards, Fusion(beta=0.0))
    return subject.operation("normalize").normalize(plan, values, (1.0,), Normalization(eps=0.0))


@operation_check
@clause("PRUNE-2")
def equal_keys_keep_the_lower_index(subject: Subject) -> None:
    """Among equal keys the lower index comes first; keys are unclipped, one model's key is its weighted reward."""
    plan = small_tree()
    leaves = plan.leaves
    prune = subject.operation("prune").prune
    equal = torch.zeros(1, leaves, dtype=torch.float64, device=subject.device)
    best = prune(plan, equal, (ParentTop1(),), 0)[-1][0].tolist()
    expect(best == [True, False] * (leaves // 2), f"Parent-Top1 of equal keys keeps {best}")
    extreme = prune(plan, equal, (ExtremeB(1),), 0)[-1][0].tolist()
    expect(extreme == [True, *[False] * (leaves - 2), True], f"Extreme-1 of equal keys keeps {extreme}")
    values = tuple(
        torch.arange(n, dtype=torch.float64, device=subject.device).reshape(1, n, 1) for n in plan.level_sizes
    )
    keys = subject.operation("leaf_keys").leaf_keys(plan, values, (-2.0,), Normalization())
    expect_close(keys, -2.0 * values[-1][..., 0], EXACT, "keys of one reward model")
    two = torch.cat([values[-1], values[-1].flip(1) ** 3], dim=-1)
    both = (*(torch.cat([v, v**3], dim=-1) for v in values[:-1]), two)
    open_clip, tight = Normalization(clip=1e6), Normalization(clip=0.1)
    unclipped = subject.operation("normalize").normalize(plan, both, (1.0, 1.0), open_clip)[-1]
    keys = subject.operation("leaf_keys").leaf_keys(plan, both, (1.0, 1.0), tight)
    expect_close(keys, unclipped, 1e-9, "keys of two reward models")


@operation_check
@clause("PRUNE-1")
def rules_commute_and_change_nothing_else(subject: Subject) -> None:
    """Rules in any order, or twice, keep the same edges, and their inputs are what they were."""
    plan = small_tree()
    keys = torch.tensor([[0.3, 0.1, 0.7, 0.2], [0.0, 1.0, 2.0, -1.0]], dtype=torch.float64, device=subject.device)
    saved = keys.clone()
    rules = (ParentTop1(), DepthWindow(4, 1), ExtremeB(1))
    prune = subject.operation("prune").prune
    first = prune(plan, keys, rules, 0)
    for other in (rules[::-1], (*rules, *rules)):
        for depth, (a, b) in enumerate(zip(first, prune(plan, keys, other, 0), strict=True), start=1):
            expect(torch.equal(a, b), f"rules in another order, or twice, keep other edges at depth {depth}")
    expect(torch.equal(keys, saved), "pruning changes the keys")


@operation_check
@clause("NORM-2")
def a_batch_is_normalised_as_its_prompts_are(subject: Subject) -> None:
    """Within tree or prompt scope a prompt's advantages do not depend on the other prompts of the batch."""
    plan = small_tree(roots=2)
    trace = rolled(subject, plan, prompts_of(3), reduction=Reduction.SUM)
    values = subject.operation("fuse").fuse(trace, rewards_of(trace), Fusion(beta=0.0))
    normalize = subject.operation("normalize").normalize
    for mean, std in (("tree", "tree"), ("prompt", "prompt"), ("tree", "prompt")):
        options = Normalization(mean_scope=mean, std_scope=std)  # type: ignore[arg-type]
        together = normalize(plan, values, (1.0,), options)
        for prompt in range(3):
            alone = normalize(plan, tuple(v[prompt : prompt + 1] for v in values), (1.0,), options)
            for depth, found in enumerate(alone):
                expect_close(found[0], together[depth][prompt], EXACT, f"{mean}/{std} advantages of depth {depth}")
