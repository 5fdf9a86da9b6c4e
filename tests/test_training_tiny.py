"""Tiny pipelines: built once, the same in every process, complete or absent, and loadable."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.tiny import folders
from branchgrpo.models.tiny.folders import TINY, tiny_pipeline
from branchgrpo.models.tiny.tokenizers import QWEN_DROPPED, QWEN_TEMPLATE, clip_tokenizer, qwen_tokenizer, t5_tokenizer
from branchgrpo.reference.errors import OptionError
from branchgrpo.training.config.policy_tables import TINY as SOURCES

SCRIPT = """
from test_training_tiny import digest
from branchgrpo.models.tiny.folders import TINY, tiny_pipeline
for name in TINY:
    print(name, digest(tiny_pipeline(name)))
"""


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHGRPO_CACHE", str(tmp_path))
    return tmp_path


def test_the_configuration_knows_their_names() -> None:
    assert tuple(TINY) == SOURCES


@pytest.mark.parametrize("name", TINY)
def test_a_pipeline_is_built_once_and_loads(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_pipeline(name)
    assert [path.name for path in cache.iterdir()] == [folder.name]
    monkeypatch.setitem(folders.TINY, name, folders.Tiny(lambda seed: pytest.fail("built again"), TINY[name].size))
    assert tiny_pipeline(name) == folder
    backbone = load_backbone(folder)
    frames, height, width = TINY[name].size
    assert len(backbone.encode(["3", "a red cube"])) == 2
    backbone.check_latent(backbone.latent_shape(height, width, frames))


def test_seeds_differ(cache: Path) -> None:
    first, second = tiny_pipeline("tiny-flux"), tiny_pipeline("tiny-flux", seed=1)
    assert first != second
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (first / weights).read_bytes() != (second / weights).read_bytes()


@pytest.mark.slow
def test_every_process_builds_the_same(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "BRANCHGRPO_CACHE": str(tmp_path / seed), "PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = str(Path(__file__).parent)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout)
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == len(TINY)


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "part").write_text("half")
            raise OSError("disk full")

    monkeypatch.setitem(folders.TINY, "tiny-flux", folders.Tiny(lambda seed: Half(), (1, 16, 24)))
    with pytest.raises(OSError, match="disk full"):
        tiny_pipeline("tiny-flux")
    assert list(cache.iterdir()) == []


def test_the_first_of_two_builders_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "index").write_text("second")
            (target := cache / f"tiny-flux-{folders.tiny_key('tiny-flux', 0)}").mkdir()
            (target / "index").write_text("first")

    monkeypatch.setitem(folders.TINY, "tiny-flux", folders.Tiny(lambda seed: Late(), (1, 16, 24)))
    assert (tiny_pipeline("tiny-flux") / "index").read_text() == "first"
    assert len(list(cache.iterdir())) == 1


def test_wrong_names_seeds_and_caches_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="tiny-flux"):
        tiny_pipeline("tiny-sdxl")
    with pytest.raises(OptionError, match="seed = -1"):
        tiny_pipeline("tiny-flux", seed=-1)
    file = cache / "file"
    file.write_text("")
    monkeypatch.setenv("BRANCHGRPO_CACHE", str(file))
    with pytest.raises(OptionError, match="BRANCHGRPO_CACHE"):
        tiny_pipeline("tiny-flux")


def test_tokenizers_tell_prompts_apart() -> None:
    for tokenizer in (clip_tokenizer(), t5_tokenizer(), qwen_tokenizer()):
        found = {tuple(tokenizer(text).input_ids) for text in (*"0123456789", "a red cube", "blue sky")}
        assert len(found) == 12
    assert len(qwen_tokenizer()(QWEN_TEMPLATE.split("{}")[0]).input_ids) == QWEN_DROPPED
