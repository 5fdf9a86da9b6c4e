"""The cache of trained weights."""

import json
import logging

import pytest
import torch

from branchgrpo.models.cache_folder import cache_directory
from branchgrpo.models.digits import DigitsConfig
from branchgrpo.reference.errors import OptionError
from branchgrpo.training import digits, digits_cache, digits_data
from branchgrpo.training.digits_generator import GeneratorConfig

TINY = GeneratorConfig(DigitsConfig(width=8, hidden=8, blocks=1, frequencies=2), steps=2, batch=4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRANCHGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def trainings(monkeypatch):
    """Number of times that the generator was really trained."""
    count, train = [], digits.train_generator
    monkeypatch.setattr(digits, "train_generator", lambda *arguments: count.append(1) or train(*arguments))
    return count


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trained_once_and_then_read_bit_for_bit(cache, trainings):
    first = digits.pretrained_generator(TINY)
    second = digits.pretrained_generator(TINY)
    assert len(trainings) == 1
    assert torch.equal(weights_of(first), weights_of(second))
    assert not second.training
    (record,) = cache.glob("digits-generator-*.json")
    described = json.loads(record.read_text())
    assert described["made_from"]["config"]["steps"] == 2
    assert sorted(p.name for p in cache.iterdir()) == sorted([record.name, described["weights"]])


def test_training_has_one_thread_whatever_the_caller_has(cache, monkeypatch):
    seen, train, before = [], digits.train_generator, torch.get_num_threads()
    monkeypatch.setattr(digits, "train_generator", lambda *a: seen.append(torch.get_num_threads()) or train(*a))
    torch.set_num_threads(2)
    try:
        digits.pretrained_generator(TINY)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_another_configuration_or_code_is_another_entry(cache, trainings):
    digits.pretrained_generator(TINY)
    digits.pretrained_generator(GeneratorConfig(TINY.network, steps=2, batch=4, seed=1))
    assert len(trainings) == 2
    assert len(list(cache.glob("*.json"))) == 2
    one, _ = digits_cache.cache_key(TINY, (digits_data,))
    other, _ = digits_cache.cache_key(TINY, (digits_data, digits_cache))
    assert one != other


@pytest.mark.parametrize("damage", ["cut", "altered", "removed", "record"])
def test_a_damaged_entry_is_trained_again_with_a_warning(cache, trainings, caplog, damage):
    first = digits.pretrained_generator(TINY)
    (record,) = cache.glob("*.json")
    (weights,) = cache.glob("*.safetensors")
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-10])
    elif damage == "altered":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "removed":
        weights.unlink()
    else:
        record.write_text("{")
    with caplog.at_level(logging.WARNING):
        again = digits.pretrained_generator(TINY)
    assert len(trainings) == 2
    assert f"cache entry {record} is unusable" in caplog.text
    assert torch.equal(weights_of(first), weights_of(again))
    digits.pretrained_generator(TINY)
    assert len(trainings) == 2


def test_a_write_that_fails_leaves_no_trace(cache, monkeypatch):
    target = cache / "entry.json"
    digits_cache.write_atomically(target, b"old")
    monkeypatch.setattr(digits_cache.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        digits_cache.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in cache.iterdir()] == ["entry.json"]


def test_the_cache_must_be_a_directory(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("BRANCHGRPO_CACHE", str(file))
    with pytest.raises(OptionError, match="BRANCHGRPO_CACHE"):
        digits.pretrained_generator(TINY)


def test_the_cache_is_in_the_home_by_default(monkeypatch):
    monkeypatch.delenv("BRANCHGRPO_CACHE", raising=False)
    assert cache_directory().parts[-2:] == (".cache", "branchgrpo")
