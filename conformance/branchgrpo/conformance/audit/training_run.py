"""A training configuration as what is audited: the run's own plan, network, precisions and noise."""

import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.conformance.audit.config import AuditConfig
from branchgrpo.conformance.case import Backbone
from branchgrpo.reference.protocols import Condition, Prompt
from branchgrpo.training.config.schema import DataConfig, TrainConfig

PROMPTS = 2
"""Prompts of the run that are rolled out."""
TABLES = tuple(field.name for field in fields(TrainConfig))


class Lowered(nn.Module):
    """A network whose arithmetic is in a lower precision than its weights, as a run computes it."""

    def __init__(self, network: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network, self.dtype, self.guidance = network, dtype, network.guidance

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item."""
        if self.dtype is None:
            velocity: Tensor = self.network(x, sigma, condition)
            return velocity
        with torch.autocast(x.device.type, self.dtype):
            velocity = self.network(x, sigma, condition)
        return velocity


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a TOML document is the configuration of a run, with no table of its own for the audit."""
    return "audit" not in document and any(name in document for name in TABLES)


def local_source(source: str) -> str:
    """The backbone as the audit loads it: a word, or a folder."""
    if source == "digits":
        return source
    from branchgrpo.models.folder import PipelineFolder
    from branchgrpo.training.engine.pipeline_task import pipeline_folder

    return str(PipelineFolder.resolve(pipeline_folder(source)).path)


def audit_of_run(config: TrainConfig) -> AuditConfig:
    """The audit's own configuration for a run."""
    from branchgrpo.training.planner.architectures import architecture
    from branchgrpo.training.planner.setup import setup_from

    source, size = local_source(config.model.source), setup_from(config)
    found = architecture(source)
    channels, depth, *sides = found.latent(size.height, size.width, size.frames)
    return AuditConfig(
        preset=config.method.preset,
        backbone=source,
        dtype=config.rollout.dtype,
        storage_dtype=config.rollout.storage_dtype,
        noise=config.rollout.noise,
        seed=config.run.seed,
        prompts=min(PROMPTS, config.data.prompts_per_iteration),
        latent=(channels, *([depth] if found.time > 1 else []), *sides),
    )


def first_prompts(data: DataConfig, count: int) -> tuple[Prompt, ...]:
    """The run's first prompts."""
    from branchgrpo.training.data.prompts import read_prompts
    from branchgrpo.training.digits import digit_prompts

    return (read_prompts(data.prompts, data.column) if data.prompts else digit_prompts())[:count]


def run_backbone(config: TrainConfig, prompts: int, device: torch.device) -> Backbone:
    """The run's network with its first weights, adapters and guidance, in its precision, and its first prompts."""
    from branchgrpo.training.engine.distributed import Cluster
    from branchgrpo.training.engine.task import DTYPES

    own, dtype, lora = first_prompts(config.data, prompts), DTYPES[config.model.dtype], config.model.lora is not None
    lowered = dtype if dtype.itemsize < 4 and not lora else None
    if config.model.source == "digits":
        from branchgrpo.training.digits import digit_condition
        from branchgrpo.training.engine.digits_task import digits_generator

        network = digits_generator(config.model)
        lone = Lowered(network.to(torch.float32 if lowered else dtype), lowered)
        return Backbone(lone, own, digit_condition(own, device))
    from branchgrpo.training.engine.pipeline_task import load_policy

    with tempfile.TemporaryDirectory() as folder:
        # Prompts that the run has not encoded yet are encoded for the audit alone.
        apart = replace(config, run=replace(config.run, folder=str(Path(folder))))
        model = load_policy(apart, Cluster(device=device))
        condition = model.encode([prompt.text for prompt in own])
    return Backbone(Lowered(model, lowered), own, condition)
