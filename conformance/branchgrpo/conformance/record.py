"""A record of a trace: one rollout and the update that follows it, as level-order arrays (TRACE-2, TRACE-3)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Reduction

Level = dict[int, Tensor]
"""Depth → array ``[prompts, R·n_d, *rest]``."""

ALL, EDGES, STOCHASTIC = "all", "edges", "stochastic"
FIELDS = {
    "states": ALL,
    "means": EDGES,
    "log_probs": STOCHASTIC,
    "values": ALL,
    "advantages": ALL,
    "kept": EDGES,
    "trainable": EDGES,
    "ratios": STOCHASTIC,
    "gradients": STOCHASTIC,
    "weight_versions": STOCHASTIC,
}
"""Fields that have an array a depth, and which depths."""

REQUIRED = ("states", "means", "log_probs")
DTYPES = {"kept": torch.bool, "trainable": torch.bool, "weight_versions": torch.int64}
"""Dtype of a field where it is not float64 (states and means: any floating dtype)."""


@dataclass(frozen=True)
class RewardInfo:
    """A reward model's name and weight."""

    name: str
    weight: float


@dataclass(frozen=True, eq=False)
class Record:
    """One record; ``levels[field][d]`` is the array of depth d, a field that was not dumped is absent.

    Attributes:
        plan, member, iteration, prompts, reduction, fusion, normalization, pruning, objective, reward_models: TRACE-5.
        dtype, storage_dtype: of the arithmetic and of stored states, by torch's name.
        stds: std of every step.
        rewards: one a leaf and reward model, or None.
        levels: the arrays that have depths.
    """

    plan: Plan
    iteration: int
    prompts: tuple[Prompt, ...]
    reduction: Reduction
    fusion: Fusion
    normalization: Normalization
    pruning: tuple[PruningRule, ...]
    objective: Objective
    reward_models: tuple[RewardInfo, ...]
    dtype: str
    storage_dtype: str
    stds: Float64[Tensor, "steps"]
    levels: dict[str, Level]
    rewards: Float64[Tensor, "prompts leaves models"] | None = None
    member: tuple[int, int] | None = None

    def depths(self, which: str) -> list[int]:
        """The depths that a field of this kind has."""
        if which == STOCHASTIC:
            return [step + 1 for step in self.plan.stochastic_steps]
        return list(range(0 if which == ALL else 1, self.plan.steps + 1))

    def has(self, *names: str) -> bool:
        """Whether all these fields were dumped."""
        return all(self.rewards is not None if name == "rewards" else name in self.levels for name in names)

    def with_levels(self, **changed: Level) -> "Record":
        """A copy with some fields replaced."""
        return replace(self, levels={**self.levels, **changed})


def expected_shape(record: Record, field: str, depth: int) -> tuple[int, ...]:
    """Shape that the plan implies for a field at a depth, the latent's own dimensions left out for states and means."""
    nodes = record.plan.roots * record.plan.level_sizes[depth]
    models = (len(record.reward_models),) if field == "values" else ()
    return (len(record.prompts), nodes, *models)


def validate_record(record: Record, where: str) -> None:
    """Refuse arrays that the plan does not imply (TRACE-3, TRACE-7).

    Raises:
        InputError: names the array, what was found and what the plan implies.
    """
    for name in REQUIRED:
        if name not in record.levels:
            raise InputError(f"{where}/{name}", "missing", "present in every trace")
    if record.stds.shape != (record.plan.steps,):
        raise InputError(f"{where}/stds: shape", tuple(record.stds.shape), f"({record.plan.steps},), one a step")
    latent = tuple(record.levels["states"][0].shape[2:]) if 0 in record.levels["states"] else ()
    for name, level in record.levels.items():
        if sorted(level) != record.depths(FIELDS[name]):
            raise InputError(f"{where}/{name}: depths", sorted(level), f"{record.depths(FIELDS[name])}")
        for depth, array in level.items():
            shape = expected_shape(record, name, depth) + (latent if name in ("states", "means") else ())
            check_array(
                array,
                shape,
                f"{where}/{name}/{depth}",
                DTYPES.get(name, array.dtype if name in ("states", "means") else torch.float64),
            )
    if record.rewards is not None:
        leaves = record.plan.roots * record.plan.leaves
        check_array(
            record.rewards, (len(record.prompts), leaves, len(record.reward_models)), f"{where}/rewards", torch.float64
        )


def check_array(array: Tensor, shape: tuple[int, ...], where: str, dtype: torch.dtype) -> None:
    """Refuse another shape or dtype."""
    if tuple(array.shape) != shape:
        raise InputError(f"{where}: shape", tuple(array.shape), f"{shape}")
    if array.dtype is not dtype or (dtype.is_complex):
        raise InputError(f"{where}: dtype", str(array.dtype), str(dtype))
