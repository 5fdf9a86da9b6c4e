"""A task that worker processes can import."""

import torch

from branchgrpo.reference.errors import OptionError


def double(number, on_progress):
    """Twice the number and the threads that torch uses here; a negative number is an error."""
    on_progress(1, 1)
    if number < 0:
        raise OptionError("number", number, "≥ 0")
    return 2 * number, torch.get_num_threads()
