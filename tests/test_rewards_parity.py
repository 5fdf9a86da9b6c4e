"""The real ``hpsv2`` and ``open_clip`` packages, where they are installed: they need torchvision."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "parity" / "hpsv2_parity.py"


def test_hps_equals_the_hpsv2_package() -> None:
    missing = [name for name in ("torchvision", "open_clip", "hpsv2") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)} (see {SCRIPT.name} for an environment that has them)"
        print(reason)
        pytest.skip(reason)
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
