"""Tasks that worker processes can import."""

import time

import torch

from branchgrpo.reference.errors import OptionError


def double(number, on_progress):
    """Twice the number and the threads that torch uses here; a negative number is an error."""
    on_progress(1, 1)
    if number < 0:
        raise OptionError("number", number, "≥ 0")
    return 2 * number, torch.get_num_threads()


class Slow(int):
    """A number that takes its time to be sent."""

    def __reduce__(self):
        time.sleep(0.5)
        return int, (int(self),)


def say_slowly(on_progress):
    """Ends at once, with a message that may still be on its way."""
    on_progress(Slow(1), 1)
