"""Ctrl-C and SIGTERM: the iteration is finished, the run saved and left; a second one ends it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODE = 130
"""What a shell expects of a process that was interrupted."""


class Interrupts:
    """Context manager that takes note of the first signal and lets the second one act as it always does.

    Outside the main thread Python cannot install handlers, and a signal that is ignored (``nohup``) stays so.

    Attributes:
        requested: name of the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.kept: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self.kept = {number: signal.signal(number, self.note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self.kept.items():
            signal.signal(number, handler)
        self.kept = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handler of the first signal."""
        del frame
        self.requested = signal.Signals(number).name
        self.restore()
