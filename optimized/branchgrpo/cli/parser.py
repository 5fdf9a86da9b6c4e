"""The argument parser of every subcommand: teaching help, one-line errors, no abbreviations."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from branchgrpo.cli.errors import UsageError, unknown

STANDARD_OUTPUT = "-"


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ``UsageError`` and names the nearest option.

    Abbreviated options are refused: a script that uses one would change its meaning when an option is added.
    """

    def __init__(self, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its usage text."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything or raise: an option that is not known is an error that names the nearest one.

        Raises:
            UsageError: an unknown option, a superfluous word, or a value that does not fit.
        """
        args, rest = self.parse_known_args(argv)
        for word in rest:
            if word.startswith("-"):
                options = [name for name in self._option_string_actions if name.startswith("--")]
                raise unknown("option", word.split("=")[0], options, f"see {self.prog} --help")
            raise UsageError(f"unexpected argument {word!r} (see {self.prog} --help)")
        return args

    def add_json(self) -> None:
        """Add ``--json [FILE]``, the option that every subcommand has."""
        self.add_argument(
            "--json",
            metavar="FILE",
            nargs="?",
            const=STANDARD_OUTPUT,
            help="print the result as JSON instead of a table, or write it to FILE",
        )


def integer_from(low: int) -> Callable[[str], int]:
    """A ``type=`` that takes integers ≥ ``low``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer ≥ {low}")
        return value

    return convert
