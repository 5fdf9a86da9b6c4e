"""The measured quantities, each a function that gives its entry of the results."""

import json
import math
import tempfile
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from backbone import CHANNELS, SIZES, Flux, Recorder, prompts_and_condition
from measure import Paired, interleaved, paired, settled
from torch import Tensor

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.singular import singular_rollout
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import accumulate_gradients
from branchgrpo.reference import rollout as reference
from branchgrpo.reference.counts import count
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.reference.protocols import Condition, Guidance, NoiseSource
from branchgrpo.reference.types import Kernel, KernelKind, Reduction
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.engine.loop import Hooks, train

CAPACITY = 16
"""Items a denoiser call, and parents a micro-batch."""

WIDE = Objective(clip_low=0.2, clip_high=0.2)


def dense(quick: bool) -> Plan:
    """The plan of the timings: the paper's dense tree, or half of its steps and splits."""
    method = preset("branchgrpo")
    assert isinstance(method.sampler, Plan)
    return (
        tree_plan(10, Kernel(KernelKind.SDE, 0.3), splits=(0, 3), branching=2, spread=4.0) if quick else method.sampler
    )


def parts(size: str) -> tuple[int, int]:
    """Tokens and prompts of a size."""
    tokens, prompts = size.split("x")
    return int(tokens), int(prompts)


@cache
def flux(tokens: int) -> Flux:
    """The backbone at one number of tokens."""
    return Flux(tokens)


def sampling(tokens: int, noise: NoiseSource, chunk: int | None = CAPACITY) -> Sampling:
    """Single precision, states in bf16."""
    return Sampling(noise, (tokens, CHANNELS), torch.float32, torch.bfloat16, chunk=chunk, compile=True)


def rollout_over_bare(size: str, pairs: int, quick: bool) -> dict[str, Paired]:
    """A rollout, by source of noise, against the same denoiser calls alone, their inputs made beforehand."""
    tokens, count_ = parts(size)
    prompts, condition = prompts_and_condition(count_)
    plan, model = dense(quick), flux(tokens)
    recorder = Recorder(model)
    sources: dict[str, NoiseSource] = {"fast": PhiloxNoise(1), "keyed": KeyedNoise(1)}
    options = {name: sampling(tokens, source) for name, source in sources.items()}
    rollout(plan, recorder, prompts, condition, options["fast"])

    @torch.no_grad()
    def bare() -> None:
        for call in recorder.calls:
            model(*call)

    sides = [lambda name=name: rollout(plan, model, prompts, condition, options[name]) for name in sources]
    times = interleaved([*sides, bare], pairs)
    return {name: Paired.of([(row[i], row[-1]) for row in times]) for i, name in enumerate(sources)}


@cache
def grown(tokens: int, prompts_: int, quick: bool) -> tuple[Tree, Levels, Tensor, Condition]:
    """A tree with advantages and leaf keys from random rewards."""
    prompts, condition = prompts_and_condition(prompts_)
    plan = dense(quick)
    tree = rollout(plan, flux(tokens), prompts, condition, sampling(tokens, PhiloxNoise(1)))
    rewards = torch.randn(prompts_, plan.leaves, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = fuse(tree, rewards, Fusion())
    advantages = normalize(plan, values, [1.0], Normalization())
    return tree, advantages, leaf_keys(plan, values, [1.0], Normalization()), condition


def update(tokens: int, prompts: int, kept: Masks, quick: bool, model: object = None) -> None:
    """One accumulation of gradients."""
    tree, advantages, _, condition = grown(tokens, prompts, quick)
    network = flux(tokens)
    network.zero_grad()
    policy = network if model is None else model
    accumulate_gradients([tree], policy, condition, [advantages], [kept], WIDE, micro_batch=CAPACITY)  # type: ignore[arg-type]


def train_over_bare(size: str, pairs: int, quick: bool) -> Paired:
    """An update against forward and backward of the same batches, with the velocity's gradient made beforehand."""
    tokens, prompts = parts(size)
    tree, _, keys, _ = grown(tokens, prompts, quick)
    kept = prune(tree.plan, keys, [], 0)
    model = flux(tokens)
    recorder = Recorder(model)
    update(tokens, prompts, kept, quick, recorder)
    batches = [(call, torch.ones_like(call[0])) for call in recorder.calls]

    def bare() -> None:
        model.zero_grad()
        for call, gradient in batches:
            model(*call).backward(gradient)

    return paired(lambda: update(tokens, prompts, kept, quick), bare, pairs)


def pruned_over_full(size: str, name: str, pairs: int) -> Paired:
    """An update with one pruning rule against the update of the whole tree."""
    tokens, prompts = parts(size)
    tree, _, keys, _ = grown(tokens, prompts, False)
    full, kept = prune(tree.plan, keys, [], 0), prune(tree.plan, keys, preset(name).pruning, 0)
    one, other = (lambda masks=masks: update(tokens, prompts, masks, False) for masks in (kept, full))
    return paired(one, other, pairs)


def speedup_over_per_node(tokens: int, prompts_: int, pairs: int) -> Paired:
    """The same rollout with one denoiser item a call, against ours; on a small plan, for the former takes its time."""
    prompts, condition = prompts_and_condition(prompts_)
    plan, model, source = dense(quick=True), flux(tokens), PhiloxNoise(1)
    each = replace(sampling(tokens, source), chunk=1)
    return paired(
        lambda: rollout(plan, model, prompts, condition, each),
        lambda: rollout(plan, model, prompts, condition, sampling(tokens, source)),
        pairs,
    )


def reference_over_optimized(tokens: int, pairs: int, quick: bool) -> Paired:
    """The reference's rollout against ours with the same keyed numbers."""
    prompts, condition = prompts_and_condition(1)
    plan, model, source = dense(quick), flux(tokens), KeyedNoise(1)
    plain = reference.Sampling(source, (tokens, CHANNELS), torch.float32, torch.bfloat16)
    return paired(
        lambda: reference.rollout(plan, model, prompts[0], condition, plain),
        lambda: rollout(plan, model, prompts, condition, sampling(tokens, source)),
        pairs,
    )


def wide_tree(splits: int) -> Tree:
    """A tree of 4^splits leaves, without states to speak of and with random log-probabilities."""
    plan = tree_plan(12, Kernel(KernelKind.SDE, 0.3), splits=tuple(range(splits)), branching=4, spread=4.0)
    generator, (prompts, _) = torch.Generator().manual_seed(3), prompts_and_condition(1)
    states = tuple(torch.zeros(1, n, 1) for n in plan.level_sizes)
    log_probs = tuple(
        torch.randn(1, n, generator=generator, dtype=torch.float64) if step in plan.stochastic_steps else None
        for step, n in enumerate(plan.level_sizes[1:])
    )
    return Tree(plan, tuple(prompts), states, log_probs, torch.float32, torch.device("cpu"), Reduction.MEAN)


@cache
def tail_method() -> Method:
    """The options of the tail: the preset with width pruning."""
    return preset("branchgrpo-widpru")


def tail(tree: Tree, rewards: Tensor) -> None:
    """Fusion, normalization and pruning."""
    method = tail_method()
    values = fuse(tree, rewards, method.fusion)
    normalize(tree.plan, values, [1.0], method.normalization)
    prune(tree.plan, leaf_keys(tree.plan, values, [1.0], method.normalization), method.pruning, 0)


def tail_seconds(repeats: int) -> dict[int, float]:
    """The tail's time at 16,384 and at 65,536 leaves."""
    seconds = {}
    for splits in (7, 8):
        tree = wide_tree(splits)
        generator = torch.Generator().manual_seed(4)
        rewards = torch.randn(1, 4**splits, 1, generator=generator, dtype=torch.float64)
        seconds[4**splits] = settled(lambda tree=tree, rewards=rewards: tail(tree, rewards), repeats)
    return seconds


def tail_exponent(seconds: dict[int, float]) -> float:
    """How the tail's time grows with the leaves between two sizes."""
    (few, fast), (many, slow) = seconds.items()
    return math.log(slow / fast) / math.log(many / few)


def tail_share(tokens: int, repeats: int) -> float:
    """Tail's share of a rollout of the dense preset, one prompt."""
    tree, _, _, condition = grown(tokens, 1, False)
    rewards = torch.randn(1, tree.plan.leaves, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    options = sampling(tokens, PhiloxNoise(1))
    whole = settled(lambda: rollout(tree.plan, flux(tokens), tree.prompts, condition, options), max(repeats // 3, 2))
    return settled(lambda: tail(tree, rewards), 10 * repeats) / whole


def stored_over_ideal_bytes() -> float:
    """Bytes of all stored states over nodes × D × bytes an element."""
    tree, _, _, _ = grown(64, 1, False)
    stored = {state.untyped_storage().data_ptr(): state.untyped_storage().nbytes() for state in tree.states}
    return sum(stored.values()) / (219 * 64 * CHANNELS * 2)


def calls(name: str) -> list[int | None]:
    """Denoiser items a prompt: as public code makes them, where they differ by design, and ours, counted."""
    method = preset(name)
    plan, found = method.plan_at(0, 0), []

    class Counter:
        guidance = Guidance()

        def __call__(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
            found.append(len(x))
            return 0.1 * x

    prompts, condition = prompts_and_condition(1)
    options = Sampling(PhiloxNoise(1), (1,))
    if isinstance(plan, PlanFamily):
        singular_rollout(plan, Counter(), prompts, condition, options)
    else:
        rollout(plan, Counter(), prompts, condition, options)
    return [count(method).calls_public, sum(found)]


def train_loop_over_parts(iterations: int) -> dict[str, float]:
    """Iterations of a training run on the tiny FLUX, from end to end, against their rollout, rewards and updates alone.

    Wall time of both, the first iteration left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        overrides = (f"run.folder={folder}/run", f"run.iterations={iterations + 1}", "checkpoint.export=false")
        moments: list[float] = []
        hooks = Hooks(on_iteration=lambda *_: moments.append(time.perf_counter()))
        train(read_config(preset="branchgrpo@tiny-flux", overrides=overrides), hooks=hooks)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "iteration"][1:]
    parts = [sum(entry[name] for name in ("rollout", "reward", "update")) for entry in seconds]
    wholes = [after - before for before, after in pairwise(moments)]
    ratios = sorted(whole / part for whole, part in zip(wholes, parts, strict=True))
    found = {"ratio": median(ratios), "low": ratios[0], "high": ratios[-1], "seconds": median(wholes)}
    return {name: float(f"{value:.4g}") for name, value in found.items()} | {"iterations": iterations}


__all__ = ["PRESETS", "SIZES"]
