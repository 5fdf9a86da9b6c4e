"""What every option changes, so that no option is a silent nothing and none changes more than it says.

``numbers``: what is computed: samples, gradients, weights, averages of weights.  ``rounding``: the same only up to
rounding, such as the size of a batch.  ``files``: which files a run writes.  ``logs``: what its logs and monitors say,
when it is interrupted by them, and how far it runs.  An option without any of these changes time and memory only.
"""

from dataclasses import dataclass, fields
from typing import Literal

from branchgrpo.training.config.schema import MonitorsConfig
from branchgrpo.training.config.watch_tables import BELOW

Change = Literal["numbers", "rounding", "files", "logs"]


@dataclass(frozen=True)
class Effect:
    """What an option changes, and how to try it.

    Attributes:
        changes: see the module's text.
        alternative: overrides that change the option, and only it where that is legal.
        given: overrides without which the alternative, or the run without it, would not be legal or would not differ.
    """

    changes: frozenset[Change]
    alternative: tuple[str, ...]
    given: tuple[str, ...] = ()


FILES = {
    "digits.txt": "".join(f"{digit}\n" for digit in range(10)),
    "digits.csv": "prompt,caption\n" + "".join(f"{digit},{9 - digit}\n" for digit in range(10)),
    "three.txt": "1\n2\n3\n",
}
"""Prompt files of the alternatives, which name them ``{files}/NAME``."""

FLUX = ("model.source=tiny-flux", 'rewards=[{name="colour"}]', "data.prompts_per_iteration=2", "evaluation.every=0")
WAN = ("model.source=tiny-wan", *FLUX[1:])
LORA = (*FLUX, "model.lora.rank=4", "model.lora.alpha=4")
GUIDED = ("model.guidance=classifier_free", "model.guidance_scale=1.5")
PROMPTS = ("data.prompts={files}/digits.txt", "data.held_out_prompts=2", "data.prompts_per_iteration=4")
TABLE = ("data.prompts={files}/digits.csv", *PROMPTS[1:])
TWO_REWARDS = (*FLUX, 'rewards=[{name="colour"}, {name="contrast"}]')
FAMILY = ("method.preset=g2rpo-single", "method.settings={steps=6, group=4}")


def changes(kinds: str, *alternative: str, given: tuple[str, ...] = ()) -> Effect:
    """An effect with its kinds of change in one text, such as ``files logs``."""
    known: dict[str, Change] = {"numbers": "numbers", "rounding": "rounding", "files": "files", "logs": "logs"}
    return Effect(frozenset(known[kind] for kind in kinds.split()), alternative, given)


RUN = {
    "run.folder": changes("files", "run.folder={files}/elsewhere"),
    "run.iterations": changes("files logs", "run.iterations=4"),
    "run.seed": changes("numbers", "run.seed=7"),
    "run.device": changes("rounding", "run.device=cpu"),
    "run.parallel": changes("rounding", "run.parallel=ddp"),
    "run.deterministic": changes("rounding", "run.deterministic=true"),
}
METHOD = {
    "method.preset": changes("numbers", "method.preset=dancegrpo"),
    "method.settings": changes("numbers", "method.settings.steps=12"),
    "method.log_prob": changes("numbers", "method.log_prob=sum"),
    "method.fusion": changes("numbers", "method.fusion.beta=0.0"),
    "method.normalization": changes("numbers", "method.normalization.bessel=false"),
    "method.objective": changes("numbers", "method.objective.reduction=depth_mean"),
}
MODEL = {
    "model.source": changes("numbers", "model.source=tiny-sd3", given=FLUX),
    "model.dtype": changes("numbers", "model.dtype=float64"),
    "model.guidance": changes("numbers", *GUIDED),
    "model.guidance_scale": changes("numbers", "model.guidance_scale=3.0", given=GUIDED),
    "model.height": changes("numbers", "model.height=32", "model.width=32", given=FLUX),
    "model.width": changes("numbers", "model.height=32", "model.width=48", given=FLUX),
    "model.frames": changes("numbers", "model.frames=9", given=(*WAN, "model.frames=5")),
    "model.lora.rank": changes("numbers", "model.lora.rank=2", given=LORA),
    "model.lora.alpha": changes("numbers", "model.lora.alpha=16", given=LORA),
    "model.lora.targets": changes("numbers", 'model.lora.targets=["to_q"]', given=LORA),
    "model.gradient_checkpointing": changes("rounding", "model.gradient_checkpointing=true", given=FLUX),
    "model.prompt_cache": changes("files", "model.prompt_cache={files}/prompts", given=FLUX),
    "model.options": changes("numbers", "model.options.max_sequence_length=8", given=FLUX),
}
REWARDS = {
    "rewards.name": changes("numbers", "rewards.0.name=contrast", given=FLUX),
    "rewards.weight": changes("numbers", "rewards.0.weight=0.5"),
    "rewards.held_out": changes("numbers", "rewards.1.held_out=true", given=TWO_REWARDS),
    "rewards.options": changes("numbers", "rewards.0.options.target_weight=0.35"),
}
DATA = {
    "data.prompts": changes("numbers", *PROMPTS),
    "data.column": changes("numbers", "data.column=caption", given=TABLE),
    "data.held_out": changes("numbers", "data.held_out={files}/three.txt", given=PROMPTS),
    "data.held_out_prompts": changes("numbers", "data.held_out_prompts=4", given=PROMPTS),
    "data.prompts_per_iteration": changes("numbers", "data.prompts_per_iteration=5"),
    "data.shuffle": changes("numbers", "data.shuffle=false", given=("data.prompts_per_iteration=4",)),
}
ROLLOUT = {
    "rollout.dtype": changes("numbers", "rollout.dtype=float64"),
    "rollout.storage_dtype": changes("numbers", "rollout.storage_dtype=bfloat16"),
    "rollout.noise": changes("numbers", "rollout.noise=fast"),
    "rollout.chunk": changes("rounding", "rollout.chunk=48"),
    "rollout.pad": changes("rounding", "rollout.pad=true", given=("rollout.chunk=48",)),
    "rollout.offload": changes("", "rollout.offload=true"),
    "rollout.compile": changes("rounding", "rollout.compile=true"),
    "rollout.decode_chunk": changes("rounding", "rollout.decode_chunk=5"),
}
UPDATE = {
    "update.accumulation": changes("rounding", "update.accumulation=2"),
    "update.micro_batch": changes("rounding", "update.micro_batch=16"),
    "update.inner_epochs": changes("numbers", "update.inner_epochs=2"),
    "update.step_per": changes("numbers", "update.step_per=iteration", given=FAMILY),
    "update.max_grad_norm": changes("numbers", "update.max_grad_norm=0.001"),
}
LINEAR = ("optimizer.schedule=linear",)
OPTIMIZER = {
    "optimizer.learning_rate": changes("numbers", "optimizer.learning_rate=3e-4"),
    "optimizer.betas": changes("numbers", "optimizer.betas=[0.8, 0.9]"),
    "optimizer.eps": changes("numbers", "optimizer.eps=1e-3"),
    "optimizer.weight_decay": changes("numbers", "optimizer.weight_decay=0.1"),
    "optimizer.kind": changes("numbers", "optimizer.kind=adamw_fused"),
    "optimizer.schedule": changes("numbers", *LINEAR),
    "optimizer.warmup_steps": changes("numbers", "optimizer.warmup_steps=2"),
    "optimizer.final_fraction": changes("numbers", "optimizer.final_fraction=0.5", given=LINEAR),
}
EMA = {
    "ema.decay": changes("numbers", "ema.decay=0.9"),
    "ema.every": changes("numbers", "ema.every=2", given=("ema.decay=0.9",)),
}
LIMITS = [item.name for item in fields(MonitorsConfig) if item.name != "costly_every"]
MONITORS = {
    f"monitors.{name}.{level}": changes("logs", f"monitors.{name}.{level}={value}")
    for name in LIMITS
    for level, value in (("warn", "0.01"), ("stop", "0.0" if name in BELOW else "1e9"))
} | {"monitors.costly_every": changes("logs", "monitors.costly_every=1")}
EVALUATION = {
    "evaluation.every": changes("files logs", "evaluation.every=1"),
    "evaluation.samples": changes("files logs", "evaluation.samples=2"),
    "evaluation.steps": changes("files logs", "evaluation.steps=3"),
    "evaluation.seed": changes("files logs", "evaluation.seed=5"),
    "evaluation.grid": changes("files", "evaluation.grid=2"),
}
OUTPUT = {
    "checkpoint.every": changes("files", "checkpoint.every=1"),
    "checkpoint.keep": changes("files", "checkpoint.keep=1", given=("checkpoint.every=1",)),
    "checkpoint.export": changes("files", "checkpoint.export=false"),
    "logging.progress": changes("logs", "logging.progress=false"),
    "logging.tensorboard": changes("files", "logging.tensorboard=true"),
    "logging.wandb": changes("files", "logging.wandb=offline"),
    "logging.wandb_project": changes("files", "logging.wandb_project=other", given=("logging.wandb=offline",)),
    "logging.scores": changes("files", "logging.scores=true"),
}
EFFECTS: dict[str, Effect] = (
    RUN | METHOD | MODEL | REWARDS | DATA | ROLLOUT | UPDATE | OPTIMIZER | EMA | MONITORS | EVALUATION | OUTPUT
)
"""Dotted name of every option → what it changes. ``rewards`` stands for each table ``[[rewards]]``."""
