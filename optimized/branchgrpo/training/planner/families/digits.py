"""The digits' residual network (``DigitsVelocity``)."""

from collections.abc import Mapping
from typing import Any

from branchgrpo.training.planner.network import Kept, Linear, Network, Part


def digits(config: Mapping[str, Any], image: int, text: int) -> Network:
    """The network for one item: no tokens, no attention.

    Args:
        config: width, hidden, blocks and frequencies, as in ``DigitsConfig``.
        image: elements of the image.
        text: number of labels, the null label among them.
    """
    width, hidden = config["width"], config["hidden"]
    inputs = (
        Linear("input", 1, image, width, behind=False),
        Linear("time.0", 1, 2 * config["frequencies"], width, behind=False),
        Linear("time.2", 1, width, width),
    )
    block = (
        Linear("modulation", 1, width, 3 * width),
        Linear("up", 1, width, hidden),
        Linear("down", 1, hidden, width),
    )
    read = image + 2 * config["frequencies"] + 4 * width
    return Network(
        (
            Part("embedders", inputs, other=text * width, full=Kept(read), block=False),
            # Kept: the norm's input and output, scale, the layer's input, all modulations, what is gated, hidden twice.
            Part(
                "block",
                block,
                full=Kept(6 * width + 2 * hidden, 2 * width, 2),
                boundary=2 * width,
                count=config["blocks"],
            ),
            Part("output", (Linear("output", 1, width, image),), other=2 * width, full=Kept(2 * width), block=False),
        )
    )
