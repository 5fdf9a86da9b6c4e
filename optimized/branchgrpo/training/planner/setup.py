"""What a forecast is asked about: backbone, sample, machine and the options that change memory or arithmetic."""

from dataclasses import dataclass

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.training.config.schema import TrainConfig

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
GUIDANCE = ("none", "embedded", "classifier_free")


@dataclass(frozen=True)
class Setup:
    """One training run, as far as its costs go.

    Attributes:
        backbone: a known name, a hub id of one, or the folder of a pipeline.
        height, width, frames: of a sample, in pixels.
        gpus: processes, one a GPU.
        prompts: of one iteration, over all GPUs and accumulation parts.
        dtype: of the network's arithmetic; trained weights are float32.
        storage_dtype: of kept states.
        rank: of adapters; 0 trains all weights.
        targets: layers with an adapter; None is the family's attention projections.
        accumulation: parts of a GPU's prompts.
        micro_batch: most parents a forward and backward; 0 takes a whole part.
        inner_epochs: updates a rollout.
        gradient_checkpointing: whether activations are computed again.
        ema: whether an average of the trained weights is kept.
        guidance: None is the family's default.
        text_tokens: of a prompt; 0 is the family's default.
    """

    backbone: str
    height: int = 720
    width: int = 720
    frames: int = 1
    gpus: int = 1
    prompts: int = 0
    dtype: str = "bfloat16"
    storage_dtype: str = "float32"
    rank: int = 0
    targets: tuple[str, ...] | None = None
    accumulation: int = 1
    micro_batch: int = 1
    inner_epochs: int = 1
    gradient_checkpointing: bool = False
    ema: bool = False
    guidance: str | None = None
    text_tokens: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("gpus", 1),
            ("prompts", 0),
            ("rank", 0),
            ("accumulation", 1),
            ("micro_batch", 0),
            ("inner_epochs", 1),
            ("text_tokens", 0),
        ):
            if not is_integer(getattr(self, name)) or getattr(self, name) < low:
                raise OptionError(name, getattr(self, name), f"an integer ≥ {low}")
        for name in ("dtype", "storage_dtype"):
            if getattr(self, name) not in BYTES:
                raise OptionError(name, getattr(self, name), f"one of {', '.join(BYTES)}")
        if self.guidance is not None and self.guidance not in GUIDANCE:
            raise OptionError("guidance", self.guidance, f"one of {', '.join(GUIDANCE)}")
        if self.all_prompts % (self.gpus * self.accumulation):
            parts = self.gpus * self.accumulation
            raise OptionError("prompts", self.prompts, f"a multiple of gpus · accumulation = {parts}")

    @property
    def all_prompts(self) -> int:
        """Prompts of an iteration; by default one an accumulation part of each GPU."""
        return self.prompts or self.gpus * self.accumulation


def setup_from(config: TrainConfig, gpus: int = 1) -> Setup:
    """The setup of a run's configuration.

    Args:
        config: of the run.
        gpus: processes it is to be launched with.
    """
    model, lora = config.model, config.model.lora
    frames, height, width = model.frames, model.height, model.width
    if not height and model.source.startswith("tiny-"):
        from branchgrpo.models.tiny.folders import TINY

        frames, height, width = TINY[model.source].size
    return Setup(
        backbone=model.source,
        height=height or 720,
        width=width or 720,
        frames=frames,
        gpus=gpus,
        prompts=config.data.prompts_per_iteration,
        dtype=model.dtype,
        storage_dtype=config.rollout.storage_dtype,
        rank=0 if lora is None else lora.rank,
        targets=None if lora is None else lora.targets,
        accumulation=config.update.accumulation,
        micro_batch=config.update.micro_batch,
        inner_epochs=config.update.inner_epochs,
        gradient_checkpointing=model.gradient_checkpointing,
        ema=config.ema.decay > 0,
        guidance=model.guidance,
    )
