"""The command line as a whole: help, speed, mistakes."""

import re
import subprocess
import sys
import time
from importlib.metadata import entry_points, version

import pytest
from helpers_cli import TORCH_FREE, assert_one_line_error, branchgrpo

from branchgrpo.cli import main as cli
from branchgrpo.cli.commands import COMMANDS
from branchgrpo.cli.errors import nearest
from branchgrpo.reference.errors import PlanError

NAMES = [command.name for command in COMMANDS]


def test_help_names_every_command_and_gives_examples():
    done = branchgrpo("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"\n  {command.name} +{re.escape(command.summary)}\n", done.stdout)
    assert "examples:\n  branchgrpo plan " in done.stdout


def test_help_answers_within_a_second():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        branchgrpo("--help")
        seconds.append(time.perf_counter() - start)
    # The fastest of three: the others may have waited for a busy machine.
    assert min(seconds) <= 1.0


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in NAMES)], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]):
    done = branchgrpo(*words, before=TORCH_FREE)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_guard_against_heavy_imports_bites():
    done = branchgrpo("plan", "--preset", "branchgrpo", before=TORCH_FREE)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_command_teaches(name: str):
    text = branchgrpo(name, "--help").stdout
    assert f"usage: branchgrpo {name}" in text
    assert "--json [FILE]" in text
    assert f"examples:\n  branchgrpo {name}" in text


def test_version_is_the_installed_one():
    assert branchgrpo("--version").stdout == f"branchgrpo {version('branchgrpo')}\n"


def test_without_a_command_help_is_printed_and_nothing_done():
    done = branchgrpo()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: branchgrpo COMMAND")


def test_console_script_is_installed():
    (script,) = [point for point in entry_points(group="console_scripts") if point.name == "branchgrpo"]
    assert script.load() is cli.main


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plann"], ["unknown command 'plann'", "did you mean 'plan'?"]),
        (["zzz"], ["unknown command 'zzz'", f"one of {', '.join(NAMES)}"]),
        (["--versoin"], ["unknown option '--versoin'", "did you mean '--version'?"]),
        (["plan", "--prest", "branchgrpo"], ["unknown option '--prest'", "did you mean '--preset'?"]),
        (["plan", "--pres", "branchgrpo"], ["unknown option '--pres'", "did you mean '--preset'?"]),
        (["plan", "--itration=3"], ["unknown option '--itration'", "did you mean '--iteration'?"]),
        (["plan", "branchgrpo"], ["unexpected argument 'branchgrpo'", "branchgrpo plan --help"]),
        (["plan", "--preset"], ["--preset", "expected one argument"]),
        (["plan", "--iteration", "-1"], ["--iteration", "'-1'", "must be an integer ≥ 0"]),
        (["plan", "--iteration", "soon"], ["--iteration", "'soon'", "must be an integer ≥ 0"]),
        (["plan", "--preset", "branchgrpo-widpu"], ["unknown preset", "did you mean 'branchgrpo-widpru'?"]),
        (["plan", "--preset", "G2RPO "], ["unknown preset", "did you mean 'g2rpo'?"]),
        (["plan", "--preset", "xyz"], ["unknown preset 'xyz'", "`branchgrpo plan` lists them"]),
        (["plan", "--draw", "t.svg"], ["--draw needs --preset NAME"]),
        (["demo", "--sedes", "3"], ["unknown option '--sedes'", "did you mean '--seeds'?"]),
        (["demo", "--seeds", "0"], ["--seeds", "'0'", "must be an integer ≥ 1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_line_and_the_nearest_name(words: list[str], parts: list[str]):
    assert_one_line_error(branchgrpo(*words), *parts)


def test_bad_input_found_below_the_command_line_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(argv: list[str]) -> int:
        raise PlanError("splits[2]", 99, "an integer in 0..19")

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main(["plan"]) == 2
    assert capsys.readouterr().err == "branchgrpo: error: splits[2] = 99: must be an integer in 0..19\n"


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "dispatch", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan"])


def test_interruption_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "branchgrpo: error: interrupted\n"


def test_a_reader_that_stops_early_is_no_error():
    code = "import sys; from branchgrpo.cli.main import main; sys.exit(main(['plan', '--json']))"
    script = f'"$0" -c "{code}" | head -c 1'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


def test_nearest_ignores_case_and_gives_up_on_strangers():
    assert nearest("BRANCHGRPO", ["branchgrpo", "g2rpo"]) == "branchgrpo"
    assert nearest("zzz", ["branchgrpo", "g2rpo"]) is None
