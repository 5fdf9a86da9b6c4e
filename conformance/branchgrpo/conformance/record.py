"""A record of a trace: one rollout and the update that follows it, as level-order arrays (TRACE-2, TRACE-7)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Reduction
from branchgrpo.reference.windows import WindowSchedule

Level = dict[int, Tensor]
"""Depth → array ``[prompts, R·n_d, *rest]``."""


@dataclass(frozen=True)
class Field:
    """A field of a trace that has an array a depth.

    Attributes:
        array: its name in the file.
        depths: every depth, the depths of edges, or those that a stochastic step ends in.
        dtype: None for any floating dtype.
        default: value of rows that are not in ``depths``.
        required: whether a trace without it is refused.
    """

    array: str
    depths: str
    dtype: torch.dtype | None = torch.float64
    default: float = 0.0
    required: bool = False


STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that states are kept in: those that arithmetic is defined for."""

ALL, EDGES, STOCHASTIC = "all", "edges", "stochastic"
FIELDS = {
    "states": Field("node.state", ALL, None, required=True),
    "values": Field("node.value", ALL),
    "advantages": Field("node.advantage", ALL),
    "means": Field("edge.mean", EDGES, None, required=True),
    "log_probs": Field("edge.log_prob", STOCHASTIC, required=True),
    "kept": Field("edge.kept", EDGES, torch.bool),
    "pruned_by": Field("edge.pruned_by", EDGES, torch.int64, -1),
    "trainable": Field("edge.trainable", EDGES, torch.bool),
    "ratios": Field("edge.ratio", STOCHASTIC, default=1.0),
    "gradients": Field("edge.gradient", STOCHASTIC),
    "weight_versions": Field("edge.weight_version", STOCHASTIC, torch.int64),
}


@dataclass(frozen=True)
class RewardInfo:
    """A reward model: name, version and weight."""

    name: str
    version: str
    weight: float


@dataclass(frozen=True)
class Dtypes:
    """Dtypes by torch's names: of the arithmetic, of stored states, of the denoiser."""

    arithmetic: str
    storage: str
    denoiser: str

    def __post_init__(self) -> None:
        for name in ("arithmetic", "storage", "denoiser"):
            dtype = getattr(torch, str(getattr(self, name)), None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise InputError(
                    f"dtypes.{name}", getattr(self, name), "the name of a floating dtype, such as 'float32'"
                )


@dataclass(frozen=True, eq=False)
class Record:
    """One record; ``levels[field][d]`` is the array of depth d, a field that was not dumped is absent.

    Attributes:
        plan, iteration, prompts, reduction, dtypes, reward_models, fusion, normalization, pruning, objective: TRACE-7.
        stds: ``[T]`` std by which each step scaled its noise.
        levels: the arrays that have depths.
        rewards: one a leaf and reward model, or None.
        member: (k, λ) of a plan family.
        window: the schedule that gave the plan at this iteration.
        seed: of the noise, if it has one.
    """

    plan: Plan
    iteration: int
    prompts: tuple[Prompt, ...]
    reduction: Reduction
    dtypes: Dtypes
    reward_models: tuple[RewardInfo, ...]
    fusion: Fusion
    normalization: Normalization
    pruning: tuple[PruningRule, ...]
    objective: Objective
    stds: Float64[Tensor, "steps"]
    levels: dict[str, Level]
    rewards: Float64[Tensor, "prompts leaves models"] | None = None
    member: tuple[int, int] | None = None
    window: WindowSchedule | None = None
    seed: int | None = None

    def depths(self, which: str) -> list[int]:
        """The depths that a field of this kind has."""
        if which == STOCHASTIC:
            return [step + 1 for step in self.plan.stochastic_steps]
        return list(range(0 if which == ALL else 1, self.plan.steps + 1))

    def nodes(self, depth: int) -> int:
        """R·n_d, nodes of a depth a prompt."""
        return self.plan.roots * self.plan.level_sizes[depth]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one state."""
        return tuple(self.levels["states"][0].shape[2:])

    def has(self, *names: str) -> bool:
        """Whether all these fields were dumped."""
        return all(self.rewards is not None if name == "rewards" else name in self.levels for name in names)

    def with_levels(self, **changed: Level) -> "Record":
        """A copy with some fields replaced."""
        return replace(self, levels={**self.levels, **changed})

    def trailing_shape(self, field: str) -> tuple[int, ...]:
        """Shape of one node's entry in a field."""
        if FIELDS[field].dtype is None:
            return self.latent_shape
        return (len(self.reward_models),) if field == "values" else ()


def validate_record(record: Record, where: str) -> None:
    """Refuse arrays that the plan does not imply, and non-finite values (TRACE-7).

    Raises:
        InputError: names the array, what was found and what the plan implies.
    """
    plan, prompts = record.plan, len(record.prompts)
    check_array(record.stds, (plan.steps,), torch.float64, f"{where}/edge.std")
    for name, field in FIELDS.items():
        if field.required and name not in record.levels:
            raise InputError(f"{where}/{field.array}", "missing", "present in every trace")
    for name, level in record.levels.items():
        field = FIELDS[name]
        if sorted(level) != record.depths(field.depths):
            raise InputError(f"{where}/{field.array}: depths", sorted(level), f"{record.depths(field.depths)}")
        for depth, array in level.items():
            shape = (prompts, record.nodes(depth), *record.trailing_shape(name))
            check_array(array, shape, field.dtype, f"{where}/{field.array} at depth {depth}")
    if record.rewards is not None:
        shape = (prompts, plan.roots * plan.leaves, len(record.reward_models))
        check_array(record.rewards, shape, torch.float64, f"{where}/leaf.reward")


def check_array(array: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, where: str) -> None:
    """Refuse another shape, another dtype (None: anything but a floating one) and non-finite values."""
    if tuple(array.shape) != shape:
        raise InputError(f"{where}: shape", tuple(array.shape), f"{shape}")
    if array.dtype not in STATE_DTYPES if dtype is None else array.dtype is not dtype:
        raise InputError(f"{where}: dtype", str(array.dtype), str(dtype) if dtype else "a floating dtype")
    if array.dtype.is_floating_point and not bool(torch.isfinite(array).all()):
        raise InputError(where, "NaN or ±inf", "finite")
