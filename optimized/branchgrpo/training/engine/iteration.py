"""One iteration of any method: all parts are rolled out and scored, seen as one batch, and then trained on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.sharing import gather_levels
from branchgrpo.optimized.singular import multi_granularity_advantages, singular_rollout
from branchgrpo.optimized.subsets import subset_masks
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import UpdateStats
from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, VelocityModel
from branchgrpo.rewards.score_log import LeafScore, ScoreLog
from branchgrpo.rewards.scoring import score_leaves
from branchgrpo.training.config.schema import RolloutConfig
from branchgrpo.training.engine.distributed import Cluster, concatenated
from branchgrpo.training.engine.task import DTYPES, Task

PHASES = ("rollout", "reward", "tail", "costly", "update", "other")
"""``tail``: from rewards to advantages; ``costly``: monitors with calls of their own; ``other``: the loop's own."""

Member = tuple[int, int] | None
"""(k, λ) of a plan family's member; None for a plan."""

Scores = Sequence[tuple[Member, LeafScore]]
"""Scores of leaves, each with the member whose leaf it is."""


class Abandoned(Exception):
    """An interrupt came while an iteration was sampled: no weight has changed, and it can be sampled again."""


@dataclass(frozen=True, eq=False)
class Part:
    """One accumulation part of this rank: prompts that are rolled out together, with their conditions."""

    prompts: tuple[Prompt, ...]
    condition: Condition


@dataclass(frozen=True, eq=False)
class PartOutcome:
    """The trees of one part under one plan, with what followed from them.

    Attributes:
        part: index of the part.
        member: the perturbed step k of a plan family's member; None for a plan.
        tree: of the part's prompts; of a family's members with this k the one of the first granularity.
        rewards: ``[prompts, leaves, models]`` float64, of that tree.
        values: its fused values, ``[prompts, R·n_d, models]`` a depth.
        advantages: ``[prompts, R·n_d]`` a depth.
        kept: edges that pruning and the trained subset left.
    """

    part: int
    member: int | None
    tree: Tree
    rewards: Tensor
    values: Levels
    advantages: Levels
    kept: Masks


@dataclass(frozen=True, eq=False)
class Measured:
    """What one iteration hands to monitors and logs.

    Attributes:
        rollouts: of this rank.
        updates: over all ranks, one a step of the optimiser.
        gradient_norms: before clipping, one a step of the optimiser.
        learning_rate: of the last step.
        costly: numbers that cost calls of their own; empty in most iterations.
        seconds: by phase (``PHASES``), of this rank.
    """

    rollouts: list[PartOutcome]
    updates: list[UpdateStats]
    gradient_norms: list[float]
    learning_rate: float
    costly: dict[str, float]
    seconds: dict[str, float]


@dataclass
class Clock:
    """Seconds by phase; a GPU is waited for at every boundary."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True, eq=False)
class Scored:
    """A tree with its leaves' rewards and its nodes' fused values."""

    tree: Tree
    rewards: Tensor
    values: Levels


Members = Mapping[Member, Scored]
"""The trees of one part: one under None for a plan, those of all (k, λ) for a plan family."""


def noise_source(config: RolloutConfig, seed: int) -> NoiseSource:
    """The run's source of normal numbers (NOISE-4)."""
    return KeyedNoise(seed) if config.noise == "keyed" else PhiloxNoise(seed)


def sampling_of(config: RolloutConfig, task: Task, method: Method, seed: int, iteration: int) -> Sampling:
    """How the trees of one iteration are grown."""
    return Sampling(
        noise=noise_source(config, seed),
        latent_shape=task.latent_shape,
        dtype=DTYPES[config.dtype],
        storage_dtype=DTYPES[config.storage_dtype],
        reduction=method.log_prob,
        iteration=iteration,
        device=task.device,
        chunk=config.chunk or None,
        offload=config.offload,
        compile=config.compile,
        pad=config.pad,
    )


def noting(said: list[tuple[Member, LeafScore]], member: Member) -> ScoreLog:
    """A log that keeps the scores of one member's leaves."""

    def log(scores: Sequence[LeafScore]) -> None:
        said.extend((member, score) for score in scores)

    return log


@dataclass(frozen=True, eq=False)
class Collector:
    """Rolls out and scores the parts of one iteration.

    Attributes:
        task, method, plan: what is sampled; the plan or family of this iteration.
        sampling: noise, dtypes, iteration.
        cluster: the processes: they fail together.
        decode_chunk: leaves decoded and scored at a time.
        clock: takes the time.
        log: receives the scores of all processes, on the first one; None writes none down.
        interrupted: whether this process was asked to end.
    """

    task: Task
    method: Method
    plan: Plan | PlanFamily
    sampling: Sampling
    cluster: Cluster
    decode_chunk: int
    clock: Clock
    log: Callable[[int, Scores], None] | None = None
    interrupted: Callable[[], bool] = lambda: False

    @property
    def ranks(self) -> Ranks | None:
        """The processes, if there are several."""
        return self.cluster.ranks

    def grow(self, model: VelocityModel, part: Part) -> dict[Member, Tree]:
        """The trees of one part."""
        given = (part.prompts, part.condition, self.sampling)
        if isinstance(self.plan, PlanFamily):
            grown = singular_rollout(self.plan, model, *given, ranks=self.ranks)
            return {member: tree for member, tree in grown.items()}  # noqa: C416 (a wider type of keys)
        return {None: rollout(self.plan, model, *given, ranks=self.ranks)}

    @torch.no_grad()
    def score(self, trees: Mapping[Member, Tree]) -> dict[Member, Tensor]:
        """The rewards of all trees' leaves; one rank's error is every rank's.  Clause: REW-1, REW-2."""
        found: dict[Member, Tensor] = {}
        said: list[tuple[Member, LeafScore]] = []
        error = None
        try:
            for member, tree in trees.items():
                found[member] = score_leaves(
                    tree.leaves.to(self.task.device),
                    tree.prompts,
                    self.task.rewards,
                    decode=self.task.decode,
                    chunk=self.decode_chunk,
                    log=noting(said, member),
                )
        except BranchGRPOError as fault:
            error = fault
        if self.log is not None:
            every = concatenated(self.cluster.everyone(said))
            if self.cluster.main:
                self.log(self.sampling.iteration, every)
        self.cluster.agree(error)
        return found

    def members(self, model: VelocityModel, part: Part) -> Members:
        """Grow, score and fuse one part.  Clause: ROLL-1, FUSE-1."""
        with self.clock.phase("rollout"):
            trees = self.grow(model, part)
        with self.clock.phase("reward"):
            rewards = self.score(trees)
        with self.clock.phase("tail"):
            return {m: Scored(tree, rewards[m], fuse(tree, rewards[m], self.method.fusion))
                    for m, tree in trees.items()}  # fmt: skip

    def collect(self, model: VelocityModel, parts: Sequence[Part], seed: int) -> list[PartOutcome]:
        """All parts rolled out and scored, then normalised and pruned as one batch.

        Clause: NORM-2, PRUNE-1.  Scopes that reach over prompts see all parts of all ranks.

        Args:
            model: the policy.
            parts: of this rank; every rank has as many.
            seed: of the run; keys the trained subsets.

        Raises:
            Abandoned: a process was asked to end, seen between two parts.
        """
        found = []
        for part in parts:
            found.append(self.members(model, part))
            if any(self.cluster.everyone(self.interrupted())):
                raise Abandoned
        with self.clock.phase("tail"):
            if isinstance(self.plan, PlanFamily):
                return [o for k in self.plan.ks for o in self.family_outcomes(self.plan, k, found)]
            return self.plan_outcomes(self.plan, [members[None] for members in found], seed)

    def whole(self, scored: Sequence[Scored]) -> tuple[Levels, list[slice]]:
        """Fused values of all parts of all ranks, and which rows are this rank's parts."""
        values = tuple(torch.cat(levels) for levels in zip(*(s.values for s in scored), strict=True))
        first, sizes = 0, [len(s.tree.prompts) for s in scored]
        if self.ranks is not None:
            values, mine = gather_levels(values, self.ranks)
            first = mine.start
        ends = [first + sum(sizes[: i + 1]) for i in range(len(sizes))]
        return values, [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def plan_outcomes(self, plan: Plan, scored: Sequence[Scored], seed: int) -> list[PartOutcome]:
        """Advantages and kept edges under one plan.  Clause: NORM-1, PRUNE-1, PLAN-7."""
        options, weights, t = self.method.normalization, self.task.rewards.weights, self.sampling.iteration
        values, rows = self.whole(scored)
        advantages = normalize(plan, values, weights, options)
        kept = prune(plan, leaf_keys(plan, values, weights, options), self.method.pruning, t)
        result = []
        for i, (s, at) in enumerate(zip(scored, rows, strict=True)):
            subset = subset_masks(plan, s.tree.prompts, seed, t)
            own = tuple(mask[at] & chosen for mask, chosen in zip(kept, subset, strict=True))
            result.append(PartOutcome(i, None, s.tree, s.rewards, s.values, tuple(a[at] for a in advantages), own))
        return result

    def family_outcomes(self, family: PlanFamily, k: int, found: Sequence[Members]) -> list[PartOutcome]:
        """Advantages of step k's children, summed over the granularities.  Clause: SING-1, GRAN-4."""
        options, weights = self.method.normalization, self.task.rewards.weights
        whole = {g: self.whole([members[k, g] for members in found]) for g in family.granularities}
        first = family.granularities[0]
        values, rows = whole[first]
        by_granularity = {g: levels for g, (levels, _) in whole.items()}
        advantages = multi_granularity_advantages(family, k, by_granularity, weights, options)
        plan = family.member(k, first)
        kept = prune(plan, leaf_keys(plan, values, weights, options), (), self.sampling.iteration)
        result = []
        for i, (members, at) in enumerate(zip(found, rows, strict=True)):
            s = members[k, first]
            own = tuple(mask[at] for mask in kept)
            result.append(PartOutcome(i, k, s.tree, s.rewards, s.values, tuple(a[at] for a in advantages), own))
        return result
