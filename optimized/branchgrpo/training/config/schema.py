"""What a training run is made of: one frozen dataclass a table of its TOML file, each checked when it is made."""

from dataclasses import dataclass, field

from branchgrpo.training.config.policy_tables import (
    DataConfig,
    DType,
    LoraConfig,
    MethodConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
)
from branchgrpo.training.config.step_tables import EmaConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from branchgrpo.training.config.together import check_together
from branchgrpo.training.config.watch_tables import (
    CheckpointConfig,
    EvaluationConfig,
    Limit,
    LoggingConfig,
    MonitorsConfig,
)

__all__ = [
    "CheckpointConfig",
    "DType",
    "DataConfig",
    "EmaConfig",
    "EvaluationConfig",
    "Limit",
    "LoggingConfig",
    "LoraConfig",
    "MethodConfig",
    "ModelConfig",
    "MonitorsConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "UpdateConfig",
]


@dataclass(frozen=True)
class TrainConfig:
    """A whole run; every table of its TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rewards: tuple[RewardConfig, ...] = (RewardConfig(),)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        check_together(self.method, self.model, self.rewards, self.data, self.update)
