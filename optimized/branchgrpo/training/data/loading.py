"""The prompts of a run: those it trains on, and those held out for evaluations."""

from dataclasses import dataclass

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.training.config.policy_tables import DataConfig
from branchgrpo.training.data.prompts import read_prompts


@dataclass(frozen=True)
class RunPrompts:
    """Prompts to train on and prompts to evaluate with."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def load_prompts(data: DataConfig) -> RunPrompts:
    """Read the prompts that the table ``[data]`` names.

    The ten digits are both trained and evaluated, for there are no others; an evaluation has its own noise.

    Raises:
        InputError: a file that cannot be read.
        OptionError: fewer prompts than an iteration or an evaluation takes.
    """
    if not data.prompts:
        digits = tuple(Prompt(digit, str(digit)) for digit in range(10))
        return checked(data, digits, digits)
    train = read_prompts(data.prompts, data.column, "data.prompts")
    if data.held_out:
        return checked(data, train, read_prompts(data.held_out, data.column, "data.held_out"))
    if data.held_out_prompts >= len(train):
        legal = f"less than the {len(train)} prompts of {data.prompts}, or a file data.held_out"
        raise OptionError("data.held_out_prompts", data.held_out_prompts, legal)
    cut = len(train) - data.held_out_prompts
    return checked(data, train[:cut], train[cut:])


def checked(data: DataConfig, train: tuple[Prompt, ...], held_out: tuple[Prompt, ...]) -> RunPrompts:
    """As many held-out prompts as an evaluation takes, and enough of the others.

    Raises:
        OptionError: too few of either.
    """
    for name, wanted, found in (
        ("prompts_per_iteration", data.prompts_per_iteration, len(train)),
        ("held_out_prompts", data.held_out_prompts, len(held_out)),
    ):
        if wanted > found:
            raise OptionError(f"data.{name}", wanted, f"at most {found}, the prompts there are")
    return RunPrompts(train, held_out[: data.held_out_prompts])
