"""TensorBoard event files in the run's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import OptionError

FOLDER = "tensorboard"


def require_tensorboard() -> None:
    """Raise ``OptionError`` unless TensorBoard is installed."""
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        legal = "false, or TensorBoard installed: pip install 'branchgrpo[training]'"
        raise OptionError("logging.tensorboard", True, legal)


class TensorBoard:
    """Numbers, and sample grids as images, by iterations done; a resumed run hides what came after its checkpoint."""

    def __init__(self, folder: Path, start: int = 0) -> None:
        """Open new event files in ``folder/tensorboard``.

        Args:
            folder: of the run.
            start: iterations that are done; later points of earlier processes are hidden, and of a run that begins
                all of them.

        Raises:
            OptionError: TensorBoard is not installed.
        """
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / FOLDER), purge_step=start + 1 if start else 0)

    def numbers(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write scalars; NaN and ±∞ are shown as they are."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, iteration)

    def grid(self, iteration: int, path: Path) -> None:
        """Write a sample grid."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            self.writer.add_image("samples", np.asarray(picture.convert("RGB")), iteration, dataformats="HWC")

    def close(self) -> None:
        """Write everything and close."""
        self.writer.close()
