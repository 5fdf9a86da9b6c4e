"""The noise levels that a pipeline would visit by its own scheduler."""

from typing import Any

import numpy as np

from branchgrpo.models.folder import PipelineFolder
from branchgrpo.reference.errors import InputError, PlanError, is_integer


def load_scheduler(folder: PipelineFolder) -> Any:
    """The pipeline's flow-matching Euler scheduler, or the one with the same shift (Wan ships a multistep solver).

    Raises:
        InputError: a scheduler whose noise levels are not a flow-matching schedule.
    """
    import diffusers

    kind, config = folder.component_class("scheduler"), folder.config("scheduler")
    euler: Any = diffusers.FlowMatchEulerDiscreteScheduler
    if kind == "FlowMatchEulerDiscreteScheduler":
        return euler.from_config(config)
    if config.get("use_flow_sigmas") and "flow_shift" in config:
        return euler(shift=config["flow_shift"])
    raise InputError("component scheduler", kind, "FlowMatchEulerDiscreteScheduler, or a solver with flow sigmas")


def dynamic_shift(config: Any, tokens: int) -> float:
    """μ, linear in the number of image tokens, with the scheduler's end points."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (high - low)
    return float(tokens * slope + config.get("base_shift", 0.5) - slope * low)


def pipeline_schedule(folder: PipelineFolder, steps: int, tokens: int, explicit: bool) -> tuple[float, ...]:
    """The T + 1 noise levels of a pipeline call with ``num_inference_steps`` = T.

    Args:
        folder: the pipeline.
        steps: T ≥ 1.
        tokens: image tokens, for schedules that depend on the resolution.
        explicit: whether the pipeline hands linspace(1, 1/T, T) to its scheduler, instead of a number of steps.

    Raises:
        PlanError: T < 1.
    """
    if not is_integer(steps) or steps < 1:
        raise PlanError("steps", steps, "an integer ≥ 1")
    scheduler = load_scheduler(folder)
    shift = {"mu": dynamic_shift(scheduler.config, tokens)} if scheduler.config.use_dynamic_shifting else {}
    if explicit:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), **shift)
    else:
        scheduler.set_timesteps(steps, **shift)
    return tuple(float(sigma) for sigma in scheduler.sigmas)
