"""From a run to its checkpoints and back."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import BranchGRPOError, OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.options import DepthWindow
from branchgrpo.training.checkpoint.configuration import check_config
from branchgrpo.training.checkpoint.logs import cut_logs, log_lengths
from branchgrpo.training.checkpoint.read import load, newest
from branchgrpo.training.checkpoint.state import TrainState, capture, check_derived, notes, restore
from branchgrpo.training.checkpoint.write import OnStage, save
from branchgrpo.training.config.reading import as_toml, config_hash
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.engine.run import Outline, Run


def derived(plan: Outline, iteration: int, seed: int) -> dict[str, Any]:
    """What seed and iteration decide: windows and the counter of the noise (NOISE-4)."""
    current = plan.method.plan_at(iteration, seed)
    steps = current.ks if isinstance(current, PlanFamily) else current.stochastic_steps
    windows = [asdict(rule) for rule in plan.method.pruning if isinstance(rule, DepthWindow)]
    return {"noise_iteration": iteration, "stochastic_steps": list(steps), "depth_windows": windows}


def sampler_state(plan: Outline, iteration: int) -> dict[str, Any]:
    """Where the sampler was in an iteration, and a hash of its prompts: another prompt file is no continuation."""
    epoch, turn = divmod(iteration, plan.sampler.batches)
    digest = hashlib.sha256()
    for prompt in plan.sampler.prompts:
        digest.update(f"{prompt.id}\0{prompt.text}\0".encode())
    ids = [prompt.id for prompt in plan.sampler.batch(iteration)]
    return {"epoch": epoch, "batch": turn, "last_prompts": ids, "prompts_sha256": digest.hexdigest()}


def last_iteration(iteration: int) -> int:
    """The iteration that ``derived`` describes where ``iteration`` is next to run: the last one that is done.

    The next one may lie beyond the run's end, which a resume may move.
    """
    return max(iteration - 1, 0)


def save_run(run: Run, folder: Path, iteration: int, on_stage: OnStage | None) -> Path | None:
    """Save a run after ``iteration`` iterations; every rank calls it, the first one writes.

    Returns:
        The checkpoint's folder; None on the other ranks.

    Raises:
        CheckpointError: see ``save``; on every rank.
    """
    cluster, config, error, path = run.cluster, run.config, None, None
    ema = None if run.ema is None else run.ema.mean
    tensors = capture(run.task.network, run.updater.optimizer, ema, keep=cluster.main)
    if cluster.main:
        at = last_iteration(iteration)
        try:
            state = TrainState(
                iteration=iteration,
                seed=config.run.seed,
                optimizer_steps=run.updater.step,
                world_size=cluster.size,
                config=as_toml(config),
                config_hash=config_hash(config),
                weights=tensors.weights,
                optimizer=tensors.optimizer,
                ema=tensors.ema,
                sampler=sampler_state(run.plan, at),
                derived=derived(run.plan, at, config.run.seed),
                log_bytes=log_lengths(folder),
                baselines=dict(run.baselines),
            )
            path = save(folder, state, config.checkpoint.keep, on_stage)
        except BranchGRPOError as fault:
            error = fault
    cluster.agree(error)
    return path


def find_state(config: TrainConfig, resume: bool | Path) -> TrainState | None:
    """The checkpoint to go on from: the one that is named, or the newest; None where there is none to begin with.

    ``differences`` says what may make the numbers differ by rounding.

    Raises:
        CheckpointError: a damaged checkpoint, or one of other options.
        OptionError: a run that would end before its checkpoint.
    """
    if resume is False:
        return None
    path = newest(Path(config.run.folder)) if resume is True else resume
    if path is None:
        return None
    state = load(path)
    check_config(state, as_toml(config), config_hash(config))
    if state.iteration > config.run.iterations:
        legal = f"at least {state.iteration}, the iterations that are done"
        raise OptionError("run.iterations", config.run.iterations, legal)
    return state


def differences(config: TrainConfig, state: TrainState, world_size: int) -> list[str]:
    """What changed since the checkpoint without forbidding a resume: versions, processes, options of rounding."""
    return [*notes(state, world_size), *check_config(state, as_toml(config), config_hash(config))]


def restore_run(run: Run, state: TrainState) -> None:
    """Put a saved state into a freshly built run.

    Raises:
        CheckpointError: another model, other prompts, other windows.
    """
    at, seed = last_iteration(state.iteration), run.config.run.seed
    check_derived(state, seed, derived(run.plan, at, seed), sampler_state(run.plan, at))
    restore(state, run.task.network, run.updater.optimizer, None if run.ema is None else run.ema.mean)
    run.updater.step = state.optimizer_steps
    run.baselines.update(numbers(state.baselines))


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Values of a JSON object as floats."""
    return {name: float(value) for name, value in values.items()}


def cut(folder: Path, state: TrainState | None) -> None:
    """Cut the logs to where the checkpoint was taken; without one to nothing.

    Raises:
        CheckpointError: logs that are shorter than the checkpoint says.
    """
    cut_logs(folder, {} if state is None else state.log_bytes)
