"""Running the command line as users do, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH_FREE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'diffusers', 'sklearn', 'rich')));"
"""Makes an import of a heavy package fail."""


def branchgrpo(*words: str, before: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``branchgrpo`` with these words; ``before`` is Python that runs first in the same process."""
    code = f"{before}\nimport sys\nfrom branchgrpo.cli.main import main\nsys.exit(main())"
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def assert_one_line_error(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The answer to a mistake: exit code 2, nothing on standard output, one line that holds all ``parts``."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("branchgrpo: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
