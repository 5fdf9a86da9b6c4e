"""Malformed trace files: one clear line and exit code 2, nothing executed, nothing allocated beyond the files."""

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from branchgrpo.cli.main import main
from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.capture import capture
from branchgrpo.conformance.case import Case
from branchgrpo.conformance.cases import ONE, method, tree
from branchgrpo.conformance.record_io import JSON_LIMIT, read_trace, write_trace
from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import DepthWindow, ParentTop1


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace that is right, with pruning rules."""
    case = Case(method("trace", tree(steps=4), pruning=(ParentTop1(), DepthWindow(3, 1))), ONE, prompts=1, latent=(2,))
    path = tmp_path_factory.mktemp("trace") / "run.safetensors"
    write_trace(path, capture(OptimizedImplementation(), case, KeyedNoise(1)), "test", "1")
    return path


@pytest.fixture
def trace(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for suffix in (".safetensors", ".json"):
        shutil.copy(original.with_suffix(suffix), tmp_path / f"run{suffix}")
    return tmp_path / "run.safetensors"


def refused(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The command answers with one line on standard error and exit code 2."""
    code = main(["conformance", "--trace", str(path)])
    found = capsys.readouterr()
    assert code == 2, found.err
    assert found.out == ""
    assert found.err.startswith("branchgrpo: error: ")
    assert found.err.count("\n") == 1
    for word in words:
        assert word in found.err
    assert len(found.err) < 5000


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON."""
    document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    change(document)
    path.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")


def rearray(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the arrays."""
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


def test_the_original_is_read_and_passes(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_trace(original)[0] == "test 1"
    assert main(["conformance", "--trace", str(original), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clauses"]["LOGP-1"]["status"] == "passed"


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4, 8, 9, 100, -1])
def test_a_truncated_file(trace: Path, capsys: pytest.CaptureFixture[str], left: int) -> None:
    content = trace.read_bytes()
    trace.write_bytes(content[:left])
    refused(trace, capsys, "run.safetensors")


class Payload:
    """What a pickle would run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_not_opened(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: str) -> None:
    marker = tmp_path / "executed"
    if writer == "pickle":
        trace.write_bytes(pickle.dumps(Payload(marker)))
    else:
        torch.save({"0/node.state": Payload(marker)}, trace)
    refused(trace, capsys, "run.safetensors", "a safetensors file")
    assert not marker.exists()


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b"{" * 50_000,
        b'{"a": ' * 20_000,
        b'{"__metadata__": {"x": 1}}',
    ],
)
def test_a_header_that_lies(trace: Path, capsys: pytest.CaptureFixture[str], header: bytes) -> None:
    trace.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(trace, capsys)


def test_a_header_length_beyond_the_file(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(struct.pack("<Q", 2**62) + b"{" + bytes(100))
    refused(trace, capsys, "truncated")


ARRAY_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "nan": (lambda a: a["0/node.state"].view(-1)[3:4].fill_(float("nan")), "node.state"),
    "inf": (lambda a: a["0/edge.mean"].view(-1)[-1:].fill_(float("inf")), "edge.mean"),
    "missing": (lambda a: a.pop("0/edge.log_prob"), "edge.log_prob"),
    "structure": (lambda a: a.pop("0/node.parent"), "node.parent"),
    "integers": (lambda a: a.update({"0/node.state": a["0/node.state"].to(torch.int32)}), "dtype"),
    "eight bits": (lambda a: a.update({"0/node.state": a["0/node.state"].to(torch.float8_e4m3fn)}), "dtype"),
    "float32 log-probabilities": (lambda a: a.update({"0/edge.log_prob": a["0/edge.log_prob"].float()}), "dtype"),
    "shape": (lambda a: a.update({"0/node.state": a["0/node.state"][:, :-1].contiguous()}), "node.state"),
    "scalar": (lambda a: a.update({"0/node.state": torch.zeros(())}), "node.state"),
    "empty": (lambda a: a.update({"0/node.depth": torch.zeros(0, dtype=torch.int64)}), "node.depth"),
    "another tree": (lambda a: a["0/node.parent"][-1:].zero_(), "node.parent"),
    "another level": (lambda a: a["0/edge.sigma"][-1:].fill_(0.123), "edge.sigma"),
    "unknown": (lambda a: a.update({"0/node.colour": torch.zeros(1)}), "node.colour"),
    "path up": (lambda a: a.update({"../../etc/passwd": torch.zeros(1)}), "../../etc/passwd"),
    "absolute path": (lambda a: a.update({"/tmp/x": torch.zeros(1)}), "/tmp/x"),
    "record out of range": (lambda a: a.update({"7/node.state": torch.zeros(1)}), "7/node.state"),
    "leading zero": (lambda a: a.update({"00/node.state": torch.zeros(1)}), "00/node.state"),
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_faults_in_arrays(trace: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    change, word = ARRAY_FAULTS[fault]
    rearray(trace, change)
    refused(trace, capsys, word)


# ---- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"schema": NaN}',
        '{"schema": Infinity}',
        "[" * 200_000,
        '{"a":' * 100_000,
        "1" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\xff\xfe\x00",
        '{"schema": "branchgrpo-trace", "version": 2}',
        '{"schema": "other", "version": 1}',
        '{"schema": "branchgrpo-trace", "version": "1"}',
    ],
    ids=str,
)
def test_json_that_is_none(trace: Path, capsys: pytest.CaptureFixture[str], text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    trace.with_suffix(".json").write_bytes(content)
    refused(trace, capsys)


def test_an_unknown_version_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(trace, lambda document: document.update(version=99))
    refused(trace, capsys, "99", "branchgrpo-trace")


def test_huge_json_is_not_read(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse file of a gigabyte: its size is enough."""
    with trace.with_suffix(".json").open("r+b") as file:
        file.truncate(2**30)
    refused(trace, capsys, str(2**30), str(JSON_LIMIT))


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "device"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_what_is_no_file(trace: Path, capsys: pytest.CaptureFixture[str], kind: str, suffix: str) -> None:
    path = trace.with_suffix(suffix)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    refused(trace, capsys, "an existing file")


def test_another_suffix(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(trace.with_suffix(".json"), capsys, "*.safetensors")
    refused(trace.with_name("run.pt"), capsys, "*.safetensors")


def set_plan(**changed: object) -> Callable[[dict[str, Any]], object]:
    """Change keys of the first record's plan."""
    return lambda document: document["records"][0]["plan"].update(changed)


@pytest.mark.parametrize("change", [set_plan(branching=[2, 2, 2, 1], roots=10**12), set_plan(roots=10**30)])
def test_a_plan_of_absurd_size_allocates_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite(trace, change)
    refused(trace, capsys, "node.depth: shape")


def test_a_plan_of_a_thousand_splits_allocates_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 1000
    sigmas = [1 - i / steps for i in range(steps)] + [0.0]
    kernels = [{"kind": "sde", "eta": 0.3}] * steps
    branching = [9] * (steps - 1) + [1]
    rewrite(trace, set_plan(sigmas=sigmas, kernels=kernels, branching=branching, spreads=[1.0] * steps))
    refused(trace, capsys, "node.depth: shape")


ODD = (None, True, -1, 10**30, 1e308, "x", "inf", [], {}, [[]], {"rule": []}, "../../etc/passwd")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, inner ones last; of long lists only the first entry."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


@pytest.mark.slow
def test_odd_values_anywhere_are_refused_or_read(trace: Path) -> None:
    """Each place of the JSON gets each odd value: nothing but the project's own errors comes out."""
    right = json.loads(trace.with_suffix(".json").read_text(encoding="utf-8"))
    refusals = 0
    for path in places(right):
        for odd in ODD:
            document = copy.deepcopy(right)
            if not path:
                document = odd
            else:
                target = document
                for key in path[:-1]:
                    target = target[key]
                target[path[-1]] = odd
            trace.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")
            try:
                read_trace(trace)
            except BranchGRPOError:
                refusals += 1
    assert refusals > 500


@pytest.mark.slow
def test_missing_and_unknown_keys(trace: Path) -> None:
    right = json.loads(trace.with_suffix(".json").read_text(encoding="utf-8"))
    for path in places(right):
        if not path or not isinstance(path[-1], str):
            continue
        for extra in (False, True):
            document = copy.deepcopy(right)
            target = document
            for key in path[:-1]:
                target = target[key]
            if extra:
                target[f"{path[-1]}_"] = 1
            else:
                del target[path[-1]]
            trace.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")
            with pytest.raises(BranchGRPOError):
                read_trace(trace)


def test_a_plan_that_is_not_allowed_fails_its_clause(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A well-formed file of a wrong run is judged, not refused: exit code 1."""
    rewrite(trace, set_plan(spreads=[-1.0, 1.0, 1.0, 1.0]))
    assert main(["conformance", "--trace", str(trace), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["clauses"]["PLAN-3"]["status"] == "failed"
