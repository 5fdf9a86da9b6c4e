"""Where the project keeps what it made once and can make again."""

import os
from pathlib import Path

from branchgrpo.reference.errors import OptionError


def cache_directory() -> Path:
    """``$BRANCHGRPO_CACHE``, or ``~/.cache/branchgrpo``.

    Raises:
        OptionError: the variable names something that is not a directory.
    """
    path = Path(os.environ.get("BRANCHGRPO_CACHE") or Path.home() / ".cache" / "branchgrpo").expanduser()
    if path.exists() and not path.is_dir():
        raise OptionError("BRANCHGRPO_CACHE", str(path), "a directory, or a path where one can be made")
    return path
