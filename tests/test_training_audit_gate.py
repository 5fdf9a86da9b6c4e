"""``--require-audit``: what passes, and one clear line for everything that must not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from branchgrpo.cli.main import main
from branchgrpo.models.folder import PipelineFolder
from branchgrpo.reference.errors import InputError
from branchgrpo.training.audit_gate import IMPLEMENTATION, SCHEMA, VERSION, check_audit, digest_of, identity_of
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.config.schema import TrainConfig

RUN = """\
[run]
folder = "{folder}"
iterations = 1
device = "cpu"

[method]
preset = "branchgrpo-widpru"
settings = {{steps = 8, splits = [0, 2]}}

[data]
prompts_per_iteration = 2

[evaluation]
every = 0

[checkpoint]
every = 0
export = false

[logging]
progress = false
"""


def write_run(folder: Path, name: str = "run") -> Path:
    file = folder / f"{name}.toml"
    file.write_text(RUN.format(folder=folder / name))
    return file


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    return read_config(write_run(folder), overrides)


def sealed(document: dict) -> dict:
    """The document with the digest that goes with it."""
    own = {key: value for key, value in document.items() if key != "digest"}
    return {**own, "digest": digest_of(own)}


def audit_of(config: TrainConfig, decision: str = "adopt") -> dict:
    """What an audit of a run writes, stages apart."""
    grade = {"adopt": "note", "adopt with conditions": "condition", "reject": "reject"}[decision]
    return sealed(
        {
            "schema": SCHEMA,
            "version": VERSION,
            "spec_version": "1.0",
            "implementation": IMPLEMENTATION,
            "audited": identity_of(config).data(),
            "verdict": {"decision": decision, "reasons": [{"grade": grade, "text": "ratios stray", "clause": ""}]},
        }
    )


def stored(folder: Path, document: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(document))
    return folder


def test_an_audit_of_the_same_run_passes(tmp_path: Path):
    config = config_of(tmp_path)
    folder = stored(tmp_path / "audit", audit_of(config))
    check_audit(folder, config)
    check_audit(folder / "audit.json", config)


@pytest.mark.parametrize(
    "override",
    ["run.iterations=7", "run.seed=3", "optimizer.learning_rate=1.0", "rollout.chunk=4", "update.accumulation=2"],
)
def test_what_an_audit_does_not_depend_on_may_differ(tmp_path: Path, override: str):
    check_audit(stored(tmp_path / "audit", audit_of(config_of(tmp_path))), config_of(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("method.settings={steps=8, splits=[0, 3]}", "method.plan"),
        ("method.settings={steps=8, splits=[0, 2], eta=0.7}", "method.plan"),
        ("method.preset=branchgrpo-extreme", "method.pruning"),
        ("method.settings={steps=8, splits=[0, 2], beta=0.0}", "method.fusion.beta"),
        ("method.normalization={bessel=false}", "method.normalization.bessel"),
        ("method.objective={clip_low=1e-4}", "method.objective.clip_low"),
        ("method.log_prob=sum", "method.log_prob"),
        ("model.options={seed=9}", "backbone.fingerprint"),
        ("model.dtype=bfloat16", "model_dtype"),
        ("rollout.dtype=float64", "dtype"),
        ("rollout.storage_dtype=bfloat16", "storage_dtype"),
        ("rollout.noise=fast", "noise"),
    ],
)
def test_an_audit_of_something_else_is_refused(tmp_path: Path, override: str, where: str):
    folder = stored(tmp_path / "audit", audit_of(config_of(tmp_path)))
    with pytest.raises(InputError) as caught:
        check_audit(folder, config_of(tmp_path, override))
    assert caught.value.field == f"audit: {where}"
    assert "\n" not in str(caught.value)
    assert "audit the run again" in str(caught.value)


def test_guidance_is_compared(tmp_path: Path):
    folder = stored(tmp_path / "audit", audit_of(config_of(tmp_path)))
    guided = config_of(tmp_path, "model.guidance=classifier_free", "model.guidance_scale=2.0")
    with pytest.raises(InputError, match="audit: guidance"):
        check_audit(folder, guided)
    weaker = replace(guided, model=replace(guided.model, guidance_scale=1.5))
    with pytest.raises(InputError, match=r"audit: guidance.scale = 2.0: must be 1.5"):
        check_audit(stored(tmp_path / "guided", audit_of(guided)), weaker)


def test_conditions_pass_only_where_the_user_says_so(tmp_path: Path):
    config = config_of(tmp_path)
    folder = stored(tmp_path / "audit", audit_of(config, "adopt with conditions"))
    with pytest.raises(InputError, match=r"ratios stray.*accept the conditions explicitly"):
        check_audit(folder, config)
    check_audit(folder, config, conditions=True)


def test_a_rejection_never_passes(tmp_path: Path):
    config = config_of(tmp_path)
    folder = stored(tmp_path / "audit", audit_of(config, "reject"))
    for conditions in (False, True):
        with pytest.raises(InputError, match="audit: verdict = 'reject"):
            check_audit(folder, config, conditions=conditions)


def changed(**values: object) -> Callable[[dict], object]:
    return lambda document: sealed({**document, **values})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {**d, "verdict": {"decision": "adopt", "reasons": []}, "device": "cuda"}, "digest"),
        (lambda d: {key: value for key, value in d.items() if key != "digest"}, "digest = None"),
        (lambda d: {**d, "extra": float("nan")}, "NaN"),
        (changed(implementation="mylab.grpo"), "implementation = 'mylab.grpo'"),
        (changed(spec_version="0.9"), "spec_version = '0.9'"),
        (changed(version=1), "schema, version"),
        (changed(schema="branchgrpo-trace"), "schema, version"),
        (changed(verdict={"decision": "adopt", "reasons": [{"grade": "reject", "text": "no"}]}), "as its reasons say"),
        (changed(verdict="adopt"), "an object with decision and reasons"),
        (changed(audited=None), "audit: audited = None"),
        (lambda d: [d], "schema, version = 'list'"),
    ],
)
def test_a_document_that_is_not_what_an_audit_wrote_is_refused(
    tmp_path: Path, change: Callable[[dict], object], message: str
):
    config = config_of(tmp_path)
    folder = stored(tmp_path / "audit", change(audit_of(config)))
    with pytest.raises(InputError) as caught:
        check_audit(folder, config)
    assert message in str(caught.value)


def test_sources_that_changed_since_are_refused(tmp_path: Path):
    config = config_of(tmp_path)
    document = audit_of(config)
    document["audited"]["sources"] = "0" * 64
    with pytest.raises(InputError, match=r"audit: sources = .*the audited code has changed since"):
        check_audit(stored(tmp_path / "audit", sealed(document)), config)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\x00\xff"])
def test_what_is_no_json_is_refused(tmp_path: Path, content: str):
    (tmp_path / "audit.json").write_text(content)
    with pytest.raises(InputError, match="readable JSON"):
        check_audit(tmp_path, config_of(tmp_path))


def test_a_missing_or_huge_audit_is_refused(tmp_path: Path):
    config = config_of(tmp_path)
    with pytest.raises(InputError, match="branchgrpo audit --config"):
        check_audit(tmp_path / "nothing.json", config)
    with (tmp_path / "audit.json").open("wb") as file:
        file.truncate(2**27)
    with pytest.raises(InputError, match="at most"):
        check_audit(tmp_path, config)


def test_a_pipeline_is_known_by_its_weights_wherever_it_lies(tmp_path: Path):
    import shutil

    from branchgrpo.models.tiny.folders import tiny_pipeline

    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny_pipeline("tiny-flux"), copy)
    rewards = 'rewards=[{name="colour"}]'
    folder = stored(tmp_path / "audit", audit_of(config_of(tmp_path, "model.source=tiny-flux", rewards)))
    moved = config_of(
        tmp_path, f"model.source={copy}", "model.height=16", "model.width=24", "data.prompts=p.txt", rewards
    )
    check_audit(folder, moved)
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert PipelineFolder.resolve(copy).has("transformer")
    with pytest.raises(InputError, match=r"audit: backbone.fingerprint"):
        check_audit(folder, moved)


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_train_refuses_in_one_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path)
    assert main(["train", "--config", str(run), "--require-audit", str(tmp_path / "none")]) == 2
    assert main(["train", "--config", str(run), "--accept-conditions"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "branchgrpo audit --config" in first
    assert "--require-audit" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_file_serves_the_audit_and_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, out = write_run(tmp_path), tmp_path / "audit"
    assert main(["audit", "--config", str(run), "--out", str(out), "--json", str(tmp_path / "copy.json")]) == 0
    document = json.loads((out / "audit.json").read_text())
    assert document["audited"] == identity_of(read_config(run)).data()
    assert document["verdict"]["decision"] == "adopt", document["verdict"]
    # The run's own plan: 2 splits of 8 steps, on the digits' 64 elements.
    assert document["stages"]["costs"]["measured"]["calls"] == 1 * 1 + 2 * 2 + 4 * 5
    assert document["stages"]["run"]["states"][0][2:] == [1, 8, 8]
    assert main(["train", "--config", str(run), "--require-audit", str(out)]) == 0
    assert main(["train", "--config", str(run), "--require-audit", str(tmp_path / "copy.json"), "--resume"]) == 0
    capsys.readouterr()
    words = ["train", "--config", str(write_run(tmp_path, "other")), "rollout.noise=fast", "--require-audit", str(out)]
    assert main(words) == 2
    assert "audit: noise = 'keyed': must be 'fast'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
