"""A run's configuration: what is refused, how files and overrides are read, that what is written reads back equal."""

import math
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchgrpo.reference.errors import BranchGRPOError, InputError, OptionError
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Reduction
from branchgrpo.training.config.documents import LARGEST
from branchgrpo.training.config.effects import EFFECTS, FILES
from branchgrpo.training.config.leaves import leaves
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.reading import as_toml, config_from, config_hash, read_config, write_config
from branchgrpo.training.config.schema import (
    CheckpointConfig,
    DataConfig,
    EmaConfig,
    EvaluationConfig,
    Limit,
    LoggingConfig,
    LoraConfig,
    MethodConfig,
    ModelConfig,
    MonitorsConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    UpdateConfig,
)

FLUX = ("model.source=tiny-flux", 'rewards=[{name="colour"}]')


def refusal(*overrides: str) -> str:
    """The one line with which some overrides are refused."""
    with pytest.raises(BranchGRPOError) as caught:
        read_config(overrides=overrides)
    text = str(caught.value)
    assert len(text) < 1000
    return text


def written(folder: Path, text: str, name: str = "run.toml") -> Path:
    """A file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


ILLEGAL = [
    ("run.folder=", "run.folder = '': must be one line of printable text"),
    ("run.iterations=0", "run.iterations = 0: must be an integer in 1..1000000"),
    ("run.iterations=1000001", "run.iterations = 1000001: must be an integer in 1..1000000"),
    ("run.iterations=1.5", "run.iterations = 1.5: must be an integer"),
    ("run.iterations=true", "run.iterations = True: must be an integer"),
    ("run.iterations=1979-05-27", "run.iterations = '1979-05-27': must be an integer"),
    ("run.seed=-1", "run.seed = -1: must be an integer in 0..9223372036854775807"),
    ("run.seed=9223372036854775808", "run.seed"),
    ("run.device=gpu", "run.device = 'gpu': must be auto, cpu, cuda or cuda:N"),
    ("run.deterministic=1", "run.deterministic = 1: must be"),
    ("run.parallel=fsdp", "run.parallel = 'fsdp': must be 'auto', 'ddp' or 'fsdp2'"),
    ("method.preset=brachgrpo", "method.preset = 'brachgrpo': must be 'branchgrpo'"),
    ("method.log_prob=median", "method.log_prob"),
    ("method.settings.stps=4", "method.settings.stps = 4: must be left out; did you mean method.settings.steps?"),
    ("method.settings.steps='4'", "method.settings.steps = '4': must be an integer"),
    ("method.settings.steps=100000000", "method.settings.steps = 100000000: must be integers of at most 4096"),
    ("method.settings.splits=[0, 99]", "method.settings: splits[1] = 99: must be an integer in 0..19"),
    ("method.settings.beta=nan", "method.settings.beta = nan: must be a number"),
    ("method.settings.eta=-1", "method.settings: kernel.eta"),
    ("method.settings.pruning=[{rule='top'}]", "method.settings.pruning[0].rule = 'top'"),
    ("method.settings.pruning=[{rule='extreme_b'}]", "method.settings.pruning[0].b = None: must be given"),
    ("method.settings.pruning=[{rule='extreme_b', b=0}]", "extreme_b.b = 0: must be an integer ≥ 1"),
    ("method.settings.pruning=[{b=1}]", "must be a table with rule ="),
    ("method.fusion.betta=1", "method.fusion.betta = 1: must be left out; did you mean method.fusion.beta?"),
    ("method.fusion.beta='high'", "method.fusion.beta = 'high': must be a number"),
    ("method.objective.kl=-1", "method.objective.kl = -1.0: must be finite and ≥ 0"),
    ("method.normalization.mean_scope=all", "method.normalization.mean_scope"),
    ("model.source=", "model.source"),
    ("model.dtype=bf16", "model.dtype = 'bf16': must be 'float64', 'float32', 'bfloat16' or 'float16'"),
    ("model.guidance=classifier_free", "model.guidance_scale = None: must be given beside guidance"),
    ("model.guidance_scale=3", "model.guidance_scale = 3.0: must be left out without a guidance"),
    ("model.height=8", "model.height, model.width = (8, 0): must be both given or both 0"),
    ("model.frames=0", "model.frames = 0: must be an integer ≥ 1"),
    ("model.frames=5", "model.frames = 5: must be 1: digits makes images"),
    ("model.lora.rank=4", "model.lora"),
    ("model.lora.rank=0", "model.lora.rank = 0: must be an integer ≥ 1"),
    ("model.gradient_checkpointing=true", "model.gradient_checkpointing = True: must be left out"),
    ("model.source=tiny-flx", "model.source = 'tiny-flx': must be 'tiny-flux'; or ./tiny-flx for a folder"),
    ("model.source=owner/name", "model.height, model.width = (0, 0): must be given in pixels"),
    ("rewards=[]", "rewards = (): must be at least one"),
    ("rewards=3", "rewards = 3: must be a list"),
    ("rewards.0.weight=0", "rewards = (('digits', 0.0, False),): must be at least one"),
    ("rewards.0.weight=inf", "rewards[0].weight = inf: must be finite"),
    ("rewards.0.weight=true", "rewards[0].weight = True: must be a number"),
    ("rewards.0.name=digit", "rewards[0].name = 'digit'"),
    ("rewards.0.name=colour", "rewards[0].name = 'colour': must be digits or digits_judge"),
    ("rewards.1.name=digits", "rewards[1].name = 'digits': must be named once"),
    ("rewards.0.options={name={}}", "rewards[0].options.name = {}: must be one line of printable text"),
    ("rewards.2.name=digits", "rewards.2: index = 2: must be an integer in 0..1"),
    ("rewards.x.name=digits", "rewards.x: index = -1: must be an integer in 0..1"),
    ("data.column=text", "data.column = 'text': must be left out without data.prompts"),
    ("data.held_out_prompts=0", "data.held_out_prompts"),
    ("data.shuffle=1", "data.shuffle = 1: must be true or false"),
    ("rollout.pad=true", "rollout.pad = True: must be false without a rollout.chunk to fill"),
    ("rollout.chunk=-1", "rollout.chunk = -1: must be an integer ≥ 0"),
    ("rollout.noise=slow", "rollout.noise = 'slow': must be 'keyed' or 'fast'"),
    ("update.accumulation=3", "update.accumulation = 3: must be a divisor of data.prompts_per_iteration = 10"),
    ("update.step_per=iteration", "update.step_per = 'iteration': must be left out: branchgrpo is no plan family"),
    ("update.micro_batch=-1", "update.micro_batch = -1: must be an integer ≥ 0"),
    ("update.max_grad_norm=nan", "update.max_grad_norm = nan: must be a number and > 0"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate = 0.0: must be finite and > 0"),
    ("optimizer.learning_rate=1e300", "optimizer.learning_rate = 1e+300: must be finite and > 0 and ≤ 1000"),
    ("optimizer.weight_decay=1e300", "optimizer.weight_decay = 1e+300: must be finite and ≥ 0 and ≤ 1000"),
    ("optimizer.eps=1e300", "optimizer.eps = 1e+300: must be finite and > 0 and ≤ 1000"),
    ("optimizer.betas=[0.9]", "optimizer.betas[1]"),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas = (0.9, 0.9, 0.9): must be a shorter list"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas[1] = 1.0: must be finite and ≥ 0 and < 1"),
    ("optimizer.final_fraction=0.5", "optimizer.final_fraction = 0.5: must be left out of a constant schedule"),
    ("ema.decay=1.0", "ema.decay = 1.0: must be finite and ≥ 0 and < 1"),
    ("ema.every=2", "ema.every = 2: must be left out where ema.decay = 0"),
    ("monitors.kl.warn=nan", "monitors.kl.warn = nan: must be finite and ≥ 0"),
    ("monitors.kl.stop=0.1", "monitors.kl.stop = 0.1: must be ≥ warn = 1"),
    ("monitors.diversity.stop=0.5", "monitors.diversity.stop = 0.5: must be ≤ warn = 0.3"),
    ("evaluation.samples=0", "evaluation.samples = 0: must be an integer ≥ 1"),
    ("checkpoint.keep=-1", "checkpoint.keep = -1: must be an integer ≥ 0"),
    ("logging.wandb=yes", "logging.wandb = 'yes': must be 'off', 'offline' or 'online'"),
    ("logging.wandb_project=", "logging.wandb_project"),
    ("evaluation=3", "evaluation = 3: must be a table"),
]


@pytest.mark.parametrize(("override", "text"), ILLEGAL, ids=[override for override, _ in ILLEGAL])
def test_an_illegal_value_is_refused_in_one_line_that_names_it(override: str, text: str) -> None:
    assert text in refusal(override)


@pytest.mark.parametrize("source", ["./tiny-flx", "./tiny-flux", "./digits", "owner/tiny-flux", "/models/tiny-wan"])
def test_a_path_or_repository_named_like_a_built_in_model_is_a_pipeline(source: str) -> None:
    asked = [f"model.source={source}", "model.height=64", "model.width=64", "rewards.0.name=colour"]
    with pytest.raises(OptionError, match=r"data\.prompts = '': must be a file"):
        read_config(overrides=asked)
    assert read_config(overrides=[*asked, "data.prompts=prompts.txt"]).model.source == source


UNKNOWN = {
    "optimizer.learning_rte=1": "optimizer.learning_rate",
    "optimzer.learning_rate=1": "optimizer",
    "learning_rate=1": "optimizer.learning_rate",
    "run.seeds=1": "run.seed",
    "monitors.kl.wran=1": "monitors.kl.warn",
    "monitors.clip_frction.warn=1": "monitors.clip_fraction",
    "model.lora.rnk=1": "model.lora.rank",
    "rewards.0.wieght=1": "rewards.weight",
    "evaluatoin.every=1": "evaluation",
}


@pytest.mark.parametrize(("override", "near"), UNKNOWN.items())
def test_an_unknown_option_is_refused_with_the_nearest_name(override: str, near: str) -> None:
    assert f"did you mean {near}" in refusal(override)


def test_every_default_is_legal_and_complete() -> None:
    assert read_config() == TrainConfig()
    assert config_from({}) == TrainConfig()
    assert set(leaves()) == set(EFFECTS)


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_are_typed_by_their_option() -> None:
    config = read_config(
        overrides=[
            "run.folder=2024",
            'run.device="cpu"',
            "optimizer.learning_rate=1",
            "optimizer.betas=[0.5, 0]",
            "update.max_grad_norm=inf",
            "monitors.kl.warn=",
            "method.settings.splits=[0, 3]",
        ]
    )
    assert config.run.folder == "2024"
    assert config.run.device == "cpu"
    assert config.optimizer.learning_rate == 1.0
    assert config.optimizer.betas == (0.5, 0.0)
    assert config.update.max_grad_norm == math.inf
    assert config.monitors.kl == Limit(None, None)
    assert config.method.settings == {"splits": (0, 3)}


def test_later_overrides_win_and_lists_are_reached_by_index() -> None:
    config = read_config(
        overrides=[
            "run.seed=1",
            "run.seed=2",
            "rewards.0.weight=2.0",
            "rewards.1.name=digits_judge",
            "rewards.1.held_out=true",
        ]
    )
    assert config.run.seed == 2
    assert config.rewards == (RewardConfig(weight=2.0), RewardConfig("digits_judge", held_out=True))


@pytest.mark.parametrize("word", ["run.seed", "=3", "run..seed=3", "run seed=3", "1run=3"])
def test_a_word_that_is_no_override_is_refused(word: str) -> None:
    assert "override = " in refusal(word)


def test_an_override_through_something_that_is_no_table_is_refused() -> None:
    assert "run.seed is no table" in refusal("run.seed.x=1")


def test_an_override_cannot_smuggle_in_a_second_key() -> None:
    assert "run.iterations" in refusal("run.iterations=3\nseed = 4")


def test_an_optional_table_can_be_taken_back() -> None:
    config = read_config(overrides=[*FLUX, "model.lora.rank=4", "model.lora="])
    assert config.model.lora is None
    assert read_config(overrides=[*FLUX, "model.lora.rank=4"]).model.lora == LoraConfig(rank=4)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_laid_over_the_defaults_and_under_the_overrides(tmp_path: Path) -> None:
    path = written(
        tmp_path, "[run]\nseed = 5\niterations = 7\n[monitors.kl]\nstop = 3.0\n[audit]\npreset = 'nonsense'\n"
    )
    config = read_config(path, ["run.seed=6"])
    assert (config.run.seed, config.run.iterations) == (6, 7)
    assert config.monitors.kl == Limit(warn=1.0, stop=3.0)
    assert config.optimizer == OptimizerConfig()


def test_a_file_may_stand_on_another_one_or_on_a_preset(tmp_path: Path) -> None:
    written(tmp_path, "[run]\nseed = 5\n[data]\nprompts_per_iteration = 4\n", "below.toml")
    above = written(tmp_path, 'base = "below.toml"\n[run]\niterations = 2\n')
    config = read_config(above)
    assert (config.run.seed, config.run.iterations, config.data.prompts_per_iteration) == (5, 2, 4)
    named = written(tmp_path, 'base = "g2rpo@digits"\n[run]\nseed = 9\n', "named.toml")
    assert read_config(named) == replace(
        read_config(preset="g2rpo@digits"), run=replace(read_config(preset="g2rpo@digits").run, seed=9)
    )


def test_a_file_that_stands_on_itself_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 'base = "run.toml"\n')
    with pytest.raises(InputError, match="at most 8 documents"):
        read_config(path)


def test_a_base_beside_a_preset_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 'base = "branchgrpo"\n')
    with pytest.raises(OptionError, match="left out beside the preset"):
        read_config(path, preset="g2rpo")


BAD_FILES = {
    "[run\n": "valid TOML",
    "run = 3\n": "run = 3: must be a table",
    "[run]\nseed = 1\nseed = 2\n": "valid TOML",
    "[run]\nseed = 2024-01-01\n": "run.seed",
    "[runn]\nseed = 1\n": "did you mean run",
    "a = " + "[" * 5000 + "]" * 5000: "valid TOML",
    "[method.settings]\nsplits = [0, 2024-01-01]\n": "method.settings.splits[1]",
    "[model.options]\nx = nan\n": "model.options.x = nan",
    "base = 3\n": "base = 3",
    'base = "nowhere"\n': "preset = 'nowhere'",
    'base = "nowhere.toml"\n': "existing TOML file",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items(), ids=[text[:20] for text in BAD_FILES])
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BranchGRPOError) as caught:
        read_config(written(tmp_path, text))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_missing_huge_and_misencoded_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="existing TOML file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(InputError, match="existing TOML file"):
        read_config(tmp_path)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(InputError, match="at most 1048576 bytes"):
        read_config(huge)
    odd = tmp_path / "odd.toml"
    odd.write_bytes(b'[run]\nfolder = "\xff"\n')
    with pytest.raises(InputError, match="valid TOML"):
        read_config(odd)


# ---- writing ---------------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
POSITIVE = st.floats(1e-300, 1e300)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(WORDS, PLAIN, max_size=3)
REWARD_TABLES = TABLES.filter(lambda table: isinstance(table.get("name", ""), str))


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Any legal configuration, every option drawn."""
    digits = draw(st.booleans())
    guided = draw(st.booleans())
    accumulation = draw(st.integers(1, 4))
    chunk = draw(st.integers(0, 9))
    schedule = draw(st.sampled_from(["constant", "linear", "cosine"]))
    decay = draw(st.sampled_from([0.0, 0.5, 0.999]))
    family = draw(st.booleans())
    flag = st.booleans()
    limit = st.builds(Limit, st.none() | st.floats(0, 1e9)) | st.builds(lambda stop: Limit(None, stop), st.floats(0, 1))
    monitors = {name: draw(limit) for name in asdict(MonitorsConfig()) if name != "costly_every"}
    prompts = draw(st.just("") | WORDS) if digits else draw(WORDS)
    pixels = 0 if digits else draw(st.integers(8, 2000))
    rewards = [RewardConfig("digits" if digits else "colour", draw(POSITIVE), False, draw(REWARD_TABLES))]
    if draw(flag):
        rewards.append(RewardConfig("digits_judge" if digits else "contrast", draw(POSITIVE), draw(flag)))
    lora = st.builds(LoraConfig, st.integers(1, 9), st.integers(1, 9), st.none() | st.tuples(WORDS, WORDS))
    return TrainConfig(
        RunConfig(draw(WORDS), draw(st.integers(1, 10**6)), draw(st.integers(0, 2**63 - 1)), "cuda:1", "fsdp2"),
        MethodConfig(
            "g2rpo" if family else "branchgrpo",
            {"steps": 12, "group": 3} if family else {"splits": [0, 2], "pruning": [{"rule": "extreme_b", "b": 1}]},
            draw(st.none() | st.sampled_from(["mean", "sum"])),
            fusion={"beta": draw(st.floats(0, 9))},
            objective={"kl": draw(st.floats(0, 9))},
        ),
        ModelConfig(
            "digits" if digits else draw(WORDS.map("models/{}".format)),
            draw(st.sampled_from(["float64", "bfloat16"])),
            "classifier_free" if guided else draw(st.none() | st.just("none")),
            draw(st.floats(0, 9)) if guided else None,
            pixels,
            pixels,
            1 if digits else draw(st.integers(1, 99)),
            None if digits else draw(st.none() | lora),
            not digits and draw(flag),
            "" if digits else draw(st.just("") | WORDS),
            draw(TABLES),
        ),
        tuple(rewards),
        DataConfig(prompts, draw(WORDS) if prompts else "", "", draw(st.integers(1, 9)), 12 * accumulation, draw(flag)),
        RolloutConfig("float64", "bfloat16", "fast", chunk, chunk > 0 and draw(flag), draw(flag), draw(flag), 3),
        UpdateConfig(
            accumulation, draw(st.integers(0, 9)), 2, "iteration" if family else "member", draw(POSITIVE) * 1e9
        ),
        OptimizerConfig(
            draw(st.floats(1e-300, 1e3)),
            (draw(st.floats(0, 0.99)), 0.5),
            1e-9,
            draw(st.floats(0, 9)),
            "adamw_fused",
            schedule,
            3,
            0.0 if schedule == "constant" else draw(st.floats(0, 1)),
        ),
        EmaConfig(decay, draw(st.integers(1, 9)) if decay else 1),
        MonitorsConfig(**monitors, costly_every=draw(st.integers(0, 9))),
        EvaluationConfig(draw(st.integers(0, 9)), 3, 5, draw(st.integers(0, 2**40)), 0),
        CheckpointConfig(draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(flag)),
        LoggingConfig(draw(flag), draw(flag), draw(st.sampled_from(["off", "online"])), draw(WORDS), draw(flag)),
    )


def check_round_trip(config: TrainConfig) -> None:
    again = config_from(tomllib.loads(as_toml(config)))
    assert again == config
    assert as_toml(again) == as_toml(config)
    assert config_hash(again) == config_hash(config)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs())
def test_what_is_written_reads_back_equal(config: TrainConfig) -> None:
    check_round_trip(config)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs())
def test_what_is_written_reads_back_equal_many_times(config: TrainConfig) -> None:
    check_round_trip(config)


def test_lists_of_tables_are_written_behind_plain_values() -> None:
    config = read_config(overrides=["rewards.0.options={T=[{}], flag=false, inner={a=1}}"])
    check_round_trip(config)


def test_every_option_is_written(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = read_config(overrides=[*FLUX, "model.lora.rank=4"])
    write_config(config, path)
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name in leaves():
        value: Any = tables
        for part in name.split("."):
            value = value[0] if isinstance(value, list) else value
            value = value[part]
    assert read_config(path) == config
    assert os.listdir(tmp_path) == ["config.toml"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can be written"):
        write_config(TrainConfig(), tmp_path / "none" / "config.toml")


# ---- effects ---------------------------------------------------------------------------------------------------------


WALK = """
import sys
from branchgrpo.training.config.effects import EFFECTS
from branchgrpo.training.config.reading import config_hash, read_config, value_at
for name, effect in EFFECTS.items():
    given, other = ([w.replace("{files}", sys.argv[1]) for w in words] for words in (effect.given, effect.alternative))
    base, changed = read_config(overrides=given), read_config(overrides=[*given, *other])
    assert value_at(base, name) != value_at(changed, name), name
    assert (config_hash(base) != config_hash(changed)) == ("numbers" in effect.changes), name
print(len(EFFECTS))
"""


def test_every_option_has_a_legal_alternative_that_the_hash_sees_if_it_changes_numbers(tmp_path: Path) -> None:
    """In a process of its own, where no types are checked."""
    for file, text in FILES.items():
        written(tmp_path, text, file)
    done = subprocess.run([sys.executable, "-c", WALK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(leaves())


def test_the_length_of_a_run_counts_where_a_schedule_is_stretched_over_it() -> None:
    def hashed(*words: str) -> str:
        return config_hash(read_config(overrides=words))

    assert hashed() == hashed("run.iterations=7")
    assert hashed("optimizer.schedule=linear") != hashed("optimizer.schedule=linear", "run.iterations=7")


# ---- method ----------------------------------------------------------------------------------------------------------


def test_a_method_is_its_preset_and_what_differs() -> None:
    rules = [{"rule": "parent_top1"}, {"rule": "extreme_b", "b": 2}, {"rule": "depth_window", "start": 7, "size": 2}]
    method = build_method(
        MethodConfig(
            settings={"steps": 8, "splits": [0, 2], "branching": 3, "spread": 1, "pruning": rules},
            log_prob="sum",
            fusion={"beta": 0.5},
            normalization={"clip": math.inf},
            objective={"clip_low": 1},
        )
    )
    assert isinstance(method.sampler, Plan)
    assert method.sampler.branching == (3, 1, 3, 1, 1, 1, 1, 1)
    assert method.pruning == (ParentTop1(), ExtremeB(2), DepthWindow(7, 2))
    assert method.log_prob is Reduction.SUM
    assert (method.fusion.beta, method.normalization.clip, method.objective.clip_low) == (0.5, math.inf, 1.0)


def test_presets_keep_their_own_settings_beside_new_ones() -> None:
    assert build_method(MethodConfig("branchgrpo-widpru", {"splits": (0, 3)})).pruning == (ParentTop1(),)
    assert build_method(MethodConfig("branchgrpo-widpru", {"pruning": ()})).pruning == ()


def test_the_size_of_the_pictures_of_an_error_is_bounded() -> None:
    assert "…" in refusal(f"run.iterations={list(range(1000))}")
