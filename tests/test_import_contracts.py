"""The direction of imports holds, and each contract notices when it does not."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("reference", "optimized", "properties", "conformance")
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
VIOLATIONS = {
    "reference stands alone": ("reference/branchgrpo/reference", "branchgrpo.training.digits"),
    "oracle takes only the plan from the reference": ("reference/branchgrpo/oracle", "branchgrpo.reference.kernels"),
    "optimized reads data modules of the reference, never its algorithms": (
        "optimized/branchgrpo/optimized",
        "branchgrpo.reference.pruning",
    ),
    "models and rewards know the protocols only": ("optimized/branchgrpo/rewards", "branchgrpo.reference.rollout"),
    "drawings are made from data": ("optimized/branchgrpo/drawing", "branchgrpo.reference.counts"),
    "training ties the parts together and is judged from outside": (
        "optimized/branchgrpo/training",
        "branchgrpo.conformance.clauses",
    ),
    "the command line is the top": ("conformance/branchgrpo/conformance", "branchgrpo.cli.main"),
}


def lint(tree: Path) -> dict[str, str]:
    """Run the contracts on a copy of the project and return contract → KEPT or BROKEN."""
    # -S leaves out the editable install, so that only the copy is seen.
    paths = [*(str(tree / room) for room in ROOMS), sysconfig.get_path("purelib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", LINT], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    found = {}
    for line in done.stdout.splitlines():
        for verdict in ("KEPT", "BROKEN"):
            if f" {verdict}" in line:
                found[line.split(f" {verdict}")[0]] = verdict
    assert found, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def test_contracts_hold_and_each_notices_its_violation(copy: Path):
    assert lint(copy) == dict.fromkeys(VIOLATIONS, "KEPT")
    for folder, forbidden in VIOLATIONS.values():
        (copy / folder / "violation.py").write_text(f"import {forbidden}\n", encoding="utf-8")
    assert lint(copy) == dict.fromkeys(VIOLATIONS, "BROKEN")


@pytest.mark.parametrize("package", ["reference", "oracle"])
def test_the_reference_needs_four_packages_only(package: str):
    allowed = {"torch", "numpy", "einops", "jaxtyping", "branchgrpo", *sys.stdlib_module_names}
    for module in (ROOT / "reference" / "branchgrpo" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative import"
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{module} imports {name}"


def test_the_namespace_has_no_code_of_its_own():
    for room in ROOMS:
        assert [path.name for path in (ROOT / room / "branchgrpo").iterdir() if path.is_file()] == []
