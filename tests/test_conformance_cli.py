"""``branchgrpo conformance`` and ``branchgrpo audit`` from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from branchgrpo.cli.main import main

ROOT = Path(__file__).resolve().parents[1]

ADAPTER = """
from branchgrpo.conformance.adapters.partial import PartialImplementation


class Right(PartialImplementation):
    name = "right"

    def branch_noise(self, shared, private, spread):
        length = (1.0 + spread * spread) ** 0.5 if spread < 1e100 else spread
        a, c = (0.0, 1.0) if spread == float("inf") else (1.0 / length, spread / length)
        return a * shared.unsqueeze(1) + c * private


class Wrong(Right):
    name = "wrong"

    def branch_noise(self, shared, private, spread):
        return super().branch_noise(shared, private, spread) * 4.0


class Strange:
    name, spec_version, capabilities = "strange", "1.0", frozenset({"rollout", "levitate"})
"""


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody else's, importable."""
    (tmp_path / "somebody.py").write_text(ADAPTER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("somebody", None)
    return "somebody"


def test_a_right_partial_implementation_exits_with_0(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--impl", f"{adapter}:Right", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["implementation"] == "right"
    statuses = {clause: row["status"] for clause, row in data["clauses"].items()}
    assert [clause for clause, status in statuses.items() if status == "passed"] == ["NOISE-2"]
    assert set(statuses.values()) == {"passed", "unsupported"}


def test_a_wrong_one_exits_with_1_and_says_where(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "junit.xml"
    assert main(["conformance", "--impl", f"{adapter}:Wrong", "--junit", str(report)]) == 1
    shown = capsys.readouterr().out
    assert "failed NOISE-2 branch_noise_has_a_value_at_every_spread" in shown
    assert "branch noise at s = 0" in shown
    suite = ElementTree.parse(report).getroot()
    assert suite.attrib["failures"] == "1"
    assert int(suite.attrib["tests"]) == len(suite)


def test_an_expected_failure_is_no_failure(adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.txt"
    known.write_text("# ours\nNOISE-2  # scaled on purpose\n", encoding="utf-8")
    assert main(["conformance", "--impl", f"{adapter}:Wrong", "--xfails", str(known), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["clauses"]["NOISE-2"]
    assert row["status"] == "xfailed"
    assert any("scaled on purpose" in check.get("detail", "") for check in row["checks"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["conformance", "--impl", "nowhere:Thing"], "importable"),
        (["conformance", "--impl", "nonsense"], "module:Object"),
        (["conformance", "--impl", "somebody:Missing"], "importable"),
        (["conformance", "--impl", "somebody:Strange"], "levitate"),
        (["conformance", "--device", "warp"], "device"),
        (["conformance", "--xfails", "none.txt"], "an existing file"),
        (["conformance", "--trace", "none.safetensors"], "an existing file"),
        (["conformance", "--impl", "reference", "--trace", "x.safetensors"], "not allowed"),
        (["conformance", "--impl", "optimized", "--trace", "x.safetensors"], "not allowed"),
        (["conformance", "--trace", "x.safetensors", "--vectors"], "--vectors goes with --impl"),
        (["conformance", "--jason"], "--json"),
        (["audit", "--impl", "nowhere:Thing"], "importable"),
        (["audit", "--config", "none.toml"], "an existing TOML file"),
        (["audit", "--confg", "x"], "--config"),
        (["audit", "--device", "warp"], "device"),
        (["audit", "extra"], "unexpected argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    adapter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("branchgrpo: error: ")
    assert found.err.count("\n") == 1
    assert message in found.err


def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["conformance", "--device", "cuda"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "branchgrpo: error: device = 'cuda': must be present: this machine has no CUDA device\n"


@pytest.mark.slow
def test_vectors_judge_what_cases_do_not_reach(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    def statuses(name: str) -> list[str]:
        main(["conformance", "--impl", f"{adapter}:{name}", "--vectors", "--json"])
        rows = json.loads(capsys.readouterr().out)["clauses"].values()
        return [check["status"] for row in rows for check in row["checks"] if check["check"].startswith("vector_")]

    right = statuses("Right")
    assert len(right) >= 10
    assert set(right) == {"passed"}
    assert "failed" in statuses("Wrong")


def test_vectors_are_counted_not_listed() -> None:
    from branchgrpo.cli.conformance import check_names

    checks = ["leaves_fit", "vector_a", "vector_b", "case_c"]
    assert check_names(checks) == ["leaves fit", "1 case", "2 vectors"]


def test_an_xfail_file_of_another_form_is_refused(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "known.txt"
    for text, message in (("NOISE-2\n", "CLAUSE # reason"), ("NOISE-77  # x\n", "a clause of the specification")):
        known.write_text(text, encoding="utf-8")
        assert main(["conformance", "--impl", f"{adapter}:Right", "--xfails", str(known)]) == 2
        assert message in capsys.readouterr().err


def test_audit_help_names_every_key() -> None:
    from branchgrpo.cli.audit import parser
    from branchgrpo.conformance.audit.config import AuditConfig

    text = parser().format_help()
    for key in AuditConfig.__dataclass_fields__:
        assert f"  {key} = " in text


@pytest.mark.slow
def test_audit_of_a_wrong_implementation_is_rejected_and_stored(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[audit]\nprompts = 1\nlatent = [2, 4]\nbackbone = "network"\n', encoding="utf-8")
    out = tmp_path / "deep" / "audit"
    words = ["audit", "--impl", f"{adapter}:Wrong", "--config", str(config), "--out", str(out)]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "wrong: reject" in shown
    assert "NOISE-2 fails" in shown
    assert {path.name for path in out.iterdir()} == {"report.html", "audit.json", "junit.xml", "stages"}
    times = {path.name: path.stat().st_mtime_ns for path in (out / "stages").iterdir()}
    assert main([*words, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["decision"] == "reject"
    assert times == {path.name: path.stat().st_mtime_ns for path in (out / "stages").iterdir()}


@pytest.mark.slow
def test_audit_of_the_projects_own_implementation(tmp_path: Path) -> None:
    """As a process of its own, without type checks at run time; every plot is in the page."""
    code = "import sys; from branchgrpo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "audit", "--out", str(tmp_path / "audit")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "audit" / "audit.json").read_text(encoding="utf-8"))
    assert "reject" not in {found["grade"] for found in document["verdict"]["reasons"]}
    assert document["verdict"]["decision"].startswith("adopt")
    page = (tmp_path / "audit" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 6
