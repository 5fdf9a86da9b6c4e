"""What is built, installed and promised: wheel, pins, Makefile, types at run time."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.types import Reduction

ROOT = Path(__file__).parents[1]
ROOMS = ("reference", "optimized", "properties", "conformance")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def portions() -> dict[str, Path]:
    """Every package of ours that holds code, by its full name."""
    found = [path for room in ROOMS for path in (ROOT / room / "branchgrpo").iterdir() if path.is_dir()]
    return {f"branchgrpo.{path.name}": path for path in found if any(path.rglob("*.py"))}


def modules(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("branchgrpo-*.whl")
    return zipfile.ZipFile(built)


def test_wheel_holds_every_module_and_nothing_else_on_top(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    for package in portions().values():
        for module in modules(package):
            assert f"branchgrpo/{module.relative_to(package.parent)}" in names
    assert {name.split("/")[0] for name in names} == {
        "branchgrpo",
        f"branchgrpo-{PROJECT['project']['version']}.dist-info",
    }
    assert "branchgrpo/__init__.py" not in names


def test_wheel_holds_types_license_template_and_command(wheel: zipfile.ZipFile):
    names = wheel.namelist()
    for name in portions():
        assert f"{name.replace('.', '/')}/py.typed" in names
    assert "branchgrpo/training/demo/report.html.j2" in names
    (license_file,) = [name for name in names if name.endswith("/licenses/LICENSE")]
    assert "Apache License" in wheel.read(license_file).decode()
    (scripts,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "branchgrpo = branchgrpo.cli.main:main" in wheel.read(scripts).decode()


def test_wheel_holds_the_specification(wheel: zipfile.ZipFile):
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "spec").rglob("*") if path.is_file()}
    assert {name.removeprefix("branchgrpo/") for name in wheel.namelist() if "/spec/" in name} == own


@pytest.mark.slow
def test_an_installed_wheel_judges_without_a_checkout(wheel: zipfile.ZipFile, tmp_path: Path):
    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*command, str(wheel.filename)], check=True, capture_output=True)
    # -S: the folders of the editable installation are not on the path.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *packages]), "OMP_NUM_THREADS": "1"}
    code = "import sys\nfrom branchgrpo.cli.main import main\nsys.exit(main(sys.argv[1:]))"

    def installed(*words: str, code: str = code) -> str:
        command = [sys.executable, "-S", "-c", code, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import branchgrpo.conformance.clauses as c, branchgrpo.reference.plan as p; print(c.__file__, p.__file__)"
    assert all(path.startswith(str(target)) for path in installed(code=where).split())
    assert "219" in installed("plan", "--preset", "branchgrpo")
    judged = json.loads(installed("conformance", "--impl", "optimized", "--vectors", "--json"))["clauses"]
    assert len(judged) > 60
    assert {row["status"] for row in judged.values()} == {"passed"}
    assert "adopt" in installed("audit", "--out", str(tmp_path / "audit"))


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [found for found in map(Requirement, lines) if found.name != "branchgrpo"]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in found}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_has_a_tested_lower_bound_and_a_pin_above_it(requirement: Requirement):
    (bound,) = requirement.specifier
    assert bound.operator in (">=", "==")
    pin = pins()[requirement.name.lower().replace("_", "-")]
    assert pin in requirement.specifier
    # The bound is the pinned release itself, not an older one that nobody ran: 1.9 for the pin 1.9.1.
    assert pin.release[: len(Version(bound.version).release)] == Version(bound.version).release


def dry_run(target: str) -> list[str]:
    done = subprocess.run(["make", "-n", "-W", "pyproject.toml", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


def test_quick_start_of_the_readme_is_two_commands_of_the_makefile():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```[a-z]*\n(.*?)```", section, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in block.strip().splitlines()]
    assert commands == ["make audit", "make test"]


@pytest.mark.parametrize("target", ["venv", "audit", "demo", "test", "check"])
def test_every_target_makes_its_environment_from_nothing(target: str):
    lines = dry_run(target)
    made = [i for i, line in enumerate(lines) if re.search(r" -m venv \.venv$", line)]
    torch_first = [i for i, line in enumerate(lines) if line.endswith("-c constraints.txt torch==2.13.0")]
    project = [i for i, line in enumerate(lines) if line.endswith('-c constraints.txt -e ".[dev]"')]
    assert len(made) == len(torch_first) == len(project) == 1
    assert made[0] < torch_first[0] < project[0]


def test_check_is_everything_and_ends_with_pytest():
    lines = dry_run("check")
    commands = ("branchgrpo audit --out", "branchgrpo demo --check")
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", *commands):
        assert any(f"/{tool}" in line for line in lines), tool
    assert pytest_runs("check") == {"tests": None, "properties": None}
    assert lines[-1].startswith(".venv/bin/pytest ")


def pytest_runs(target: str) -> dict[str, str | None]:
    """Folder → the marker expression with which a target runs it."""
    found = [re.match(r"\.venv/bin/pytest (\w+)(?:.* -m (\"[^\"]+\"|\w+))?", line) for line in dry_run(target)]
    return {match[1]: match[2] for match in found if match}


def test_test_is_what_takes_seconds():
    assert pytest_runs("test") == {"tests": '"not slow"', "properties": "quick"}
    assert dry_run("test")[-1].startswith(".venv/bin/pytest ")


def test_ci_runs_both():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text(encoding="utf-8").splitlines() if "make" in line] == [
        "make test",
        "exec make check",
    ]


def test_pre_commit_configuration_is_valid():
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def hooked() -> list[str]:
    (option,) = [
        o for o in PROJECT["tool"]["pytest"]["ini_options"]["addopts"] if o.startswith("--jaxtyping-packages=")
    ]
    *names, checker = option.removeprefix("--jaxtyping-packages=").split(",")
    assert checker == "typeguard.typechecked"
    return names


def checked_portions() -> list[str]:
    """All but the pytest plugin, which pytest loads before any hook can be installed; it may hold no tensor code."""
    return [name for name in portions() if name != "branchgrpo.pytest_plugin"]


def test_types_are_checked_in_every_package_of_ours():
    assert set(checked_portions()) <= set(hooked())


def test_the_pytest_plugin_loads_nothing_that_is_to_be_checked():
    code = (
        "import sys, branchgrpo.pytest_plugin.plugin\n"
        f"print([name for name in sys.modules if name.startswith({tuple(f'{name}.' for name in hooked())!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", checked_portions())
def test_the_hook_loads_the_modules_of(package: str):
    path = portions()[package]
    first = min(modules(path), key=lambda module: module.stat().st_size)
    name = ".".join((package, *first.relative_to(path).with_suffix("").parts))
    assert type(importlib.import_module(name).__loader__).__name__ == "_JaxtypingLoader"


@pytest.mark.parametrize(
    ("child", "mean"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)),
    ],
    ids=["shape", "dtype"],
)
def test_a_wrong_tensor_is_caught_at_run_time(child: torch.Tensor, mean: torch.Tensor):
    assert gaussian_log_density(torch.zeros(2, 3), torch.zeros(2, 3), 1.0, Reduction.MEAN) < 0
    with pytest.raises(Exception, match="gaussian_log_density") as caught:
        gaussian_log_density(child, mean, 1.0, Reduction.MEAN)
    assert type(caught.value).__module__.startswith("jaxtyping")


def test_no_module_postpones_its_annotations():
    # Postponed annotations are strings: at run time they would be checked against nothing.
    for package in portions().values():
        for module in modules(package):
            assert "from __future__ import annotations" not in module.read_text(encoding="utf-8"), module


def test_gpu_tests_are_skipped_with_a_reason_without_a_gpu(tmp_path: Path):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    import torch\n    assert torch.cuda.is_available()\n",
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout
    if torch.cuda.is_available():
        assert "1 passed" in done.stdout
    else:
        assert "1 skipped" in done.stdout
        assert "needs a CUDA device" in done.stdout
