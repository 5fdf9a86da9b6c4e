"""Checkpoints: everything comes back bit for bit, whatever breaks leaves an older one, and nothing is trusted."""

import errno
import json
import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_checkpoint_disk import on_a_disk_of_its_own
from helpers_checkpoints import (
    CONFIG,
    Quantised,
    adamw,
    all_equal,
    grouped,
    network,
    no_pickles,
    state_of,
    train,
    trained_state_at,
    two_checkpoints,
)
from torch import nn

from branchgrpo.reference.errors import BranchGRPOError, InputError
from branchgrpo.training.checkpoint import layout, read, write
from branchgrpo.training.checkpoint.configuration import check_config, differing
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.logs import cut_logs, log_lengths
from branchgrpo.training.checkpoint.state import TrainState, check_derived, notes, restore
from branchgrpo.training.config.reading import as_toml, config_hash
from branchgrpo.training.config.schema import OptimizerConfig, TrainConfig

OPTIMIZERS: dict[str, Callable] = {
    "adamw": adamw,
    "fused": lambda net: adamw(net, fused=True),
    "amsgrad": lambda net: adamw(net, amsgrad=True),
    "momentum": lambda net: torch.optim.SGD(grouped(net), lr=0.02, momentum=0.9),
    "8-bit": lambda net: Quantised(grouped(net)),
}


def freeze(net: nn.Module) -> None:
    net.first.weight.requires_grad_(False)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(kind: str, frozen: bool, tmp_path: Path) -> None:
    nets = [network(0), network(0), network(7)]
    for net in nets:
        if frozen:
            freeze(net)
    whole, first, second = nets
    if frozen:
        second.load_state_dict(network(0).state_dict())  # frozen weights come from the source, not the checkpoint
    whole_opt, first_opt, second_opt = (OPTIMIZERS[kind](net) for net in nets)
    train(whole, whole_opt, 0, 9)
    train(first, first_opt, 0, 4)
    ema = {name: p.detach().double() / 3 for name, p in first.named_parameters() if p.requires_grad}
    with no_pickles():
        folder = write.save(tmp_path, state_of(first, first_opt, 4, ema))
        state = read.load(folder)
    if frozen:
        assert "first.weight" not in state.weights
    mean = {name: torch.zeros_like(value) for name, value in ema.items()}
    restore(state, second, second_opt, mean)
    assert all_equal(mean, ema)
    train(second, second_opt, 4, 9)
    assert all_equal(second.state_dict(), whole.state_dict())
    a, b = state_of(second, second_opt, 9).optimizer, state_of(whole, whole_opt, 9).optimizer
    assert all_equal(a.tensors, b.tensors)
    assert (a.scalars, a.groups) == (b.scalars, b.groups)
    read.load(folder)  # training went on from copies: the file is what was written


def test_what_is_no_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    net = network()
    facts = {
        "sampler": {"epoch": 2, "batch": 1, "prompts": "1f0a"},
        "derived": {"window": [2, 3], "noise": 0.1 + 0.2},
        "log_bytes": {"metrics.jsonl": 10**12},
        "baselines": {"diversity": 1e-300, "evaluation": {"digits": -1.25}},
    }
    saved = state_of(net, adamw(net), 0, **facts)
    state = read.load(write.save(tmp_path, saved))
    assert isinstance(state, TrainState)
    assert state.ema is None
    plain = ("iteration", "seed", "optimizer_steps", "world_size", "config", "config_hash", "versions", *facts)
    assert {name: getattr(state, name) for name in plain} == {name: getattr(saved, name) for name in plain}
    assert state.versions["torch"] == torch.__version__
    assert state.optimizer.groups == saved.optimizer.groups
    assert sorted(p.name for p in (tmp_path / "checkpoints" / "step-000000").iterdir()) == [
        "config.toml",
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_the_optimizers_state_finds_its_parameters_by_name(tmp_path: Path) -> None:
    nets = [network(), network(), network(5)]
    whole, first, second = nets
    opts = [adamw(whole), adamw(first), adamw(second, reverse=True)]
    train(whole, opts[0], 0, 6)
    train(first, opts[1], 0, 3)
    restore(read.load(write.save(tmp_path, state_of(first, opts[1], 3))), second, opts[2])
    train(second, opts[2], 3, 6)
    assert all_equal(second.state_dict(), whole.state_dict())
    assert [group["weight_decay"] for group in opts[2].param_groups] == [0.0, 0.1]
    assert opts[2].param_groups[0]["betas"] == (0.9, 0.999)


def other_names() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6))


def other_shape() -> nn.Module:
    net = network()
    net.gain = nn.Parameter(torch.ones(2))
    return net


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (other_names, "names of weights.*0.bias.*first.bias"),
        (other_shape, r"weights gain.*\(\(\), torch.float32\).*\(\(2,\)"),
        (lambda: network().double(), "float32.*float64"),
    ],
)
def test_another_models_checkpoint_is_refused_before_anything_changes(build: Callable, words: str) -> None:
    net = build()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    optimizer = adamw(net)
    with pytest.raises(CheckpointError, match=words):
        restore(trained_state_at(2), net, optimizer, {name: p.detach() for name, p in net.named_parameters()})
    assert all_equal(net.state_dict(), before)
    assert not optimizer.state


def test_an_average_on_one_side_only_is_refused() -> None:
    net = network()
    with pytest.raises(CheckpointError, match="ema = 'of 4 tensors'"):
        restore(trained_state_at(2), net, adamw(net))
    with pytest.raises(CheckpointError, match="ema = 'none'"):
        restore(state_of(net, adamw(net), 1), net, adamw(net), {"gain": torch.ones(())})


def test_other_parameter_groups_are_refused() -> None:
    net = network()
    one_group = torch.optim.AdamW(net.parameters())
    with pytest.raises(CheckpointError, match=r"parameter groups.*\[1, 3\].*\[4\]"):
        restore(state_of(net, adamw(net), 1), net, one_group)
    with pytest.raises(InputError, match="another network"):
        state_of(network(1), one_group, 1)


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_nothing_has_its_name_before_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what the system is asked for: contents, then the folder, then the name, then its parent."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(handle: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    stages: list[str] = []
    target = write.save(tmp_path, trained_state_at(2), on_stage=stages.append)
    assert stages == list(write.STAGES)
    renamed = [path for what, path in events if what == "rename"]
    assert len(renamed) == 1
    at = events.index(("rename", renamed[0]))
    flushed = {path for what, path in events[:at] if what == "fsync"}
    assert {f"{renamed[0]}/{path.name}" for path in target.iterdir()} | {renamed[0]} <= flushed
    assert ("fsync", str(target.parent)) in events[at:]


@pytest.mark.parametrize("stage", write.STAGES)
def test_an_error_at_any_stage_leaves_a_whole_checkpoint_and_no_litter(stage: str, tmp_path: Path) -> None:
    older = write.save(tmp_path, trained_state_at(2))

    def stop(name: str) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.save(tmp_path, trained_state_at(4), keep=1, on_stage=stop)
    names = [path.name for path in older.parent.iterdir()]
    assert sorted(names) == ["step-000002", *(["step-000004"] if stage == "before-retention" else [])]
    assert read.load(tmp_path / "checkpoints" / max(names)).iteration == (4 if stage == "before-retention" else 2)


def test_the_newest_stay_and_what_killed_writes_left_goes(tmp_path: Path) -> None:
    state = trained_state_at(2)
    root = tmp_path / "checkpoints"
    for iteration in (5, 10, 999_999, 1_000_000):
        write.save(tmp_path, TrainState(**{**vars(state), "iteration": iteration}))
    (root / ".writing-step-000015-0a1b2c3d").mkdir()
    (root / ".removing-step-000001-0a1b2c3d").mkdir()
    (root / "notes").mkdir()
    write.save(tmp_path, TrainState(**{**vars(state), "iteration": 1_000_005}), keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["notes", "step-1000000", "step-1000005"]
    newest = read.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-1000005"


def test_a_run_that_went_back_keeps_its_new_checkpoint(tmp_path: Path) -> None:
    """A corrupt one of a later iteration must not push the good one out."""
    older, newer = two_checkpoints(tmp_path)
    flip(newer / layout.WEIGHTS)
    written = write.save(tmp_path, trained_state_at(3), keep=1)
    assert [p.name for p in older.parent.iterdir()] == [written.name]
    assert read.load(written).iteration == 3


def test_the_same_iteration_again_replaces_the_corrupt_one(tmp_path: Path) -> None:
    _, newer = two_checkpoints(tmp_path)
    flip(newer / layout.WEIGHTS)
    assert write.save(tmp_path, trained_state_at(4), keep=2) == newer
    assert read.load(newer).iteration == 4


def test_a_negative_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep = -1"):
        write.save(tmp_path, trained_state_at(1), keep=-1)
    with pytest.raises(InputError, match=r"state.iteration = -1"):
        TrainState(**{**vars(trained_state_at(1)), "iteration": -1})
    assert not (tmp_path / "checkpoints").exists()


# ---- disks -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_new_checkpoint_only(tmp_path: Path) -> None:
    found = on_a_disk_of_its_own("full", tmp_path)
    for moment, words in (("before", "bytes free"), ("during", "No space left on device")):
        assert words in found[moment]["message"]
        assert str(tmp_path / "run" / "checkpoints") in found[moment]["message"]
        assert "the newest checkpoint stays" in found[moment]["message"]
        assert "step-000002" in found[moment]["message"]
        assert found[moment]["names"] == ["step-000002"]
        assert found[moment]["intact"]
    assert found["room again"]["message"] == ""
    assert found["room again"]["names"] == ["step-000004"]


def test_a_read_only_disk_costs_the_new_checkpoint_only(tmp_path: Path) -> None:
    found = on_a_disk_of_its_own("read-only", tmp_path)["ro"]
    assert "Read-only file system" in found["message"]
    assert str(tmp_path / "run" / "checkpoints" / "step-000002") in found["message"]
    assert found["intact"]


def test_a_limit_on_the_size_of_files_is_one_clear_error(tmp_path: Path) -> None:
    """Real, and needs no rights: the system refuses to let a file grow."""
    older = write.save(tmp_path, trained_state_at(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            write.save(tmp_path, trained_state_at(4), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(older) in str(caught.value)
    assert [path.name for path in older.parent.iterdir()] == [older.name]
    assert read.load(older).iteration == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_an_error_of_the_system_names_the_folder_and_what_is_left(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated at the last possible moment: when the files are flushed."""
    older = write.save(tmp_path, trained_state_at(2))

    def broken(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
        write.save(tmp_path, trained_state_at(4), keep=1)
    assert str(older) in str(caught.value)
    assert [path.name for path in older.parent.iterdir()] == [older.name]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere: the read-only disk stands for it")
def test_a_folder_without_permission_is_one_clear_error(tmp_path: Path) -> None:
    older = write.save(tmp_path, trained_state_at(2))
    older.parent.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            write.save(tmp_path, trained_state_at(4))
    finally:
        older.parent.chmod(0o755)
    assert read.load(older).iteration == 2


# ---- reading ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def linked(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


FILES = (layout.WEIGHTS, layout.OPTIMIZER, layout.EMA, layout.STATE, layout.CONFIG, layout.MANIFEST)
DAMAGE: dict[str, Callable[[Path], None]] = {"altered": flip, "cut": cut, "removed": Path.unlink, "a link": linked}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_older_checkpoint_offered(damage: str, name: str, tmp_path: Path) -> None:
    older, newer = two_checkpoints(tmp_path)
    DAMAGE[damage](newer / name)
    found = read.newest(tmp_path)
    assert found == newer
    with pytest.raises(CheckpointError) as caught:
        read.load(newer)
    message = str(caught.value)
    assert name in message or name == layout.MANIFEST
    assert str(newer) in message
    assert f"an older intact one is {older}" in message
    assert read.load(older).iteration == 2


def test_without_an_intact_older_one_the_error_says_so(tmp_path: Path) -> None:
    older, newer = two_checkpoints(tmp_path)
    flip(older / layout.EMA)
    flip(newer / layout.EMA)
    with pytest.raises(CheckpointError, match="no intact older checkpoint is left"):
        read.load(newer)
    assert read.newest_intact(tmp_path) is None


def rewrite_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((folder / layout.MANIFEST).read_text())
    change(content)
    (folder / layout.MANIFEST).write_text(json.dumps(content))


def lead_outside(content: dict) -> None:
    content["files"]["../../secret"] = content["files"].pop(layout.WEIGHTS)


def take_a_pickle(content: dict) -> None:
    content["files"]["optimizer.pt"] = content["files"][layout.OPTIMIZER]


def no_hash(content: dict) -> None:
    content["files"][layout.STATE] = {"bytes": 1}


@pytest.mark.parametrize("change", [lead_outside, take_a_pickle, no_hash, lambda c: c.update(format=2)])
def test_a_manifest_that_no_write_makes_is_refused(change: Callable, tmp_path: Path) -> None:
    folder = write.save(tmp_path, trained_state_at(2))
    rewrite_manifest(folder, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read.load(folder)


class Harmful:
    """Leaves a mark if it is ever unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    """Not as a further file, and not under the name of a right one, manifest and all."""
    folder = write.save(tmp_path, trained_state_at(2))
    mark = tmp_path / "executed"
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(CheckpointError, match=r"with \['optimizer.pt'\]"):
        read.load(folder)
    (folder / "optimizer.pt").unlink()
    file = folder / layout.OPTIMIZER
    torch.save({"a": Harmful(mark)}, file)
    entry = {"bytes": file.stat().st_size, "sha256": layout.sha256(file)}
    rewrite_manifest(folder, lambda content: content["files"].update({layout.OPTIMIZER: entry}))
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors.*safetensors file"):
        read.load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("text", ["", "[1, 2", '{"format": 1}', "[]", "[" * 100_000, "\x00\xff", '{"format": 7}'])
def test_a_state_that_no_write_makes_is_refused(text: str, tmp_path: Path) -> None:
    folder = write.save(tmp_path, trained_state_at(2))
    file = folder / layout.STATE
    file.write_text(text)
    entry = {"bytes": file.stat().st_size, "sha256": layout.sha256(file)}
    rewrite_manifest(folder, lambda content: content["files"].update({layout.STATE: entry}))
    with pytest.raises(CheckpointError, match=r"checkpoint: (state\.json|format|has_ema)"):
        read.load(folder)


def test_a_huge_manifest_is_not_read_into_memory(tmp_path: Path) -> None:
    folder = write.save(tmp_path, trained_state_at(2))
    os.truncate(folder / layout.MANIFEST, read.TEXT_LIMIT + 1)  # sparse
    with pytest.raises(CheckpointError, match=r"manifest\.json .* = '67108865 bytes'"):
        read.load(folder)


@pytest.mark.parametrize("place", ["nowhere", "file", "empty"])
def test_what_is_no_checkpoint_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="checkpoint"):
        read.load(tmp_path / place)


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert read.newest(tmp_path) is None
    (tmp_path / "checkpoints" / ".writing-step-000001-00ff00ff").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000009").symlink_to(tmp_path)
    assert read.newest(tmp_path) is None


# ---- configuration, derived values, logs -----------------------------------------------------------------------------


def test_options_that_differ_are_named_with_both_values() -> None:
    before = replace(TrainConfig(), optimizer=OptimizerConfig(schedule="constant"))
    after = replace(
        before,
        run=replace(before.run, seed=before.run.seed + 1, iterations=7, folder="elsewhere"),
        rewards=(replace(before.rewards[0], weight=0.25), *before.rewards[1:]),
        update=replace(before.update, micro_batch=3),
    )
    state = replace(trained_state_at(1), config=as_toml(before), config_hash=config_hash(before))
    with pytest.raises(CheckpointError) as caught:
        check_config(state, as_toml(after), config_hash(after))
    message = str(caught.value)
    for words in (
        f"run.seed = {before.run.seed}, now {after.run.seed}",
        f"rewards.0.weight = {before.rewards[0].weight}, now 0.25",
    ):
        assert words in message
    for words in ("iterations", "folder", "micro_batch"):
        assert words not in message


def test_options_that_change_no_number_do_not_stop_a_resume() -> None:
    """A longer run, another folder, other logs; what changes the rounding is told."""
    before = replace(TrainConfig(), optimizer=OptimizerConfig(schedule="constant"))
    state = replace(trained_state_at(1), config=as_toml(before), config_hash=config_hash(before))
    after = replace(
        before, run=replace(before.run, iterations=7, folder="elsewhere"), update=replace(before.update, micro_batch=3)
    )
    noted = check_config(state, as_toml(after), config_hash(after))
    assert noted == [f"update.micro_batch = {before.update.micro_batch}, now 3"]


def test_the_length_of_a_stretched_schedule_is_named() -> None:
    before = replace(TrainConfig(), optimizer=OptimizerConfig(schedule="cosine"))
    state = replace(trained_state_at(1), config=as_toml(before), config_hash=config_hash(before))
    after = replace(before, run=replace(before.run, iterations=7))
    with pytest.raises(CheckpointError, match=f"run.iterations = {before.run.iterations}, now 7"):
        check_config(state, as_toml(after), config_hash(after))


def test_two_texts_are_compared_option_by_option() -> None:
    assert differing(CONFIG, CONFIG) == {}
    changed = CONFIG.replace("seed = 3", "seed = 4") + "\n[ema]\nevery = 2\n"
    assert differing(CONFIG, changed) == {"run.seed": (3, 4), "ema.every": ("absent", 2)}
    with pytest.raises(CheckpointError, match="TOML"):
        differing(CONFIG, "[")


def test_what_follows_from_seed_and_iteration_is_compared() -> None:
    net = network()
    state = state_of(net, adamw(net), 1, derived={"window": [0, 1]}, sampler={"epoch": 0})
    check_derived(state, 3, {"window": [0, 1]}, {"epoch": 0})
    for seed, window, epoch, name in (
        (4, [0, 1], 0, "seed"),
        (3, [1, 2], 0, "derived.window"),
        (3, [0, 1], 1, "epoch"),
    ):
        with pytest.raises(CheckpointError, match=name):
            check_derived(state, seed, {"window": window}, {"epoch": epoch})
    assert notes(state, 1) == []
    older = TrainState(**{**vars(state), "versions": {**state.versions, "torch": "2.0"}})
    assert notes(older, 2) == [f"torch 2.0 saved, {torch.__version__} resumes", "1 ranks saved, 2 resume"]


def test_logs_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    metrics, scores = tmp_path / "metrics.jsonl", tmp_path / "scores.jsonl"
    metrics.write_text('{"iteration": 0}\n')
    lengths = log_lengths(tmp_path)
    assert lengths == {"metrics.jsonl": 17}
    metrics.write_text('{"iteration": 0}\n{"iteration": 1}\n{"iter')
    scores.write_text("{}\n")
    cut_logs(tmp_path, lengths)
    assert (metrics.read_text(), scores.read_text()) == ('{"iteration": 0}\n', "")


def test_a_log_that_lost_lines_is_refused_and_left_alone(tmp_path: Path) -> None:
    metrics, scores = tmp_path / "metrics.jsonl", tmp_path / "scores.jsonl"
    metrics.write_text("{}\n")
    scores.write_text("{}\n{}\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl = '3 bytes': must be at least 6 bytes"):
        cut_logs(tmp_path, {"scores.jsonl": 3, "metrics.jsonl": 6})
    assert scores.read_text() == "{}\n{}\n"
    metrics.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        cut_logs(tmp_path, {"metrics.jsonl": 0})
    with pytest.raises(CheckpointError, match=r"\.\./\.\./important"):
        cut_logs(tmp_path, {"../../important": 0})


def test_an_error_crosses_to_other_ranks_whole() -> None:
    error = CheckpointError("field", "value", "legal")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, BranchGRPOError)
    assert str(copy) == str(error)
