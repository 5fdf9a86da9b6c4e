"""Where in somebody's code an exception comes from, in one line."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from branchgrpo.reference.implementation import CAPABILITIES

LIBRARIES = frozenset(
    {"branchgrpo", "torch", "numpy", "scipy", "jaxtyping", "typeguard", "pytest", "_pytest", "pluggy"}
)
"""Top-level modules that are nobody's adapter; those of the standard library are not either."""


def is_foreign(frame: FrameType) -> bool:
    """Whether a frame runs code of the subject: none of ours, of the libraries' or of the standard library's."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module not in LIBRARIES and module not in sys.stdlib_module_names and Path(frame.f_code.co_filename).exists()


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback with their lines, outermost first."""
    return traceback.walk_tb(error.__traceback__)


def describe(error: BaseException) -> str:
    """Kind and message of an exception, the innermost line of the subject's own code, and the operation it was in."""
    seen = list(frames(error))
    own = [(frame, line) for frame, line in seen if is_foreign(frame)]
    operations = [frame.f_code.co_name for frame, _ in seen if frame.f_code.co_name in CAPABILITIES]
    parts = []
    if own:
        frame, line = own[-1]
        parts.append(f"{Path(frame.f_code.co_filename).name}:{line}")
    if operations:
        parts.append(f"in the operation {operations[0]}")
    where = f" ({', '.join(parts)})" if parts else ""
    return f"{type(error).__name__}: {error}{where}"
