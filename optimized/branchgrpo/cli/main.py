"""Entry point of the ``branchgrpo`` command."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from branchgrpo.cli.commands import COMMANDS
from branchgrpo.cli.errors import UsageError, unknown
from branchgrpo.reference.errors import BranchGRPOError

PROGRAM = "branchgrpo"
EXAMPLES = """\
  branchgrpo plan                              the methods, and what one prompt costs with each
  branchgrpo plan --preset branchgrpo          nodes, edges and denoiser calls of one method
  branchgrpo plan --preset g2rpo --draw t.svg  draw what it samples
  branchgrpo demo                              train on handwritten digits, about five minutes
"""


def top_help() -> str:
    """The text of ``branchgrpo --help``."""
    width = max(len(command.name) for command in COMMANDS)
    lines = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return (
        f"usage: {PROGRAM} COMMAND [options]\n\n"
        "Tree-structured GRPO for diffusion and flow models: a group of samples is one tree, whose branches share\n"
        "their first denoising steps, and every edge of the tree gets its own advantage.\n\n"
        f"commands:\n{lines}\n\n"
        f"examples:\n{EXAMPLES}\n"
        f"`{PROGRAM} COMMAND --help` explains a command. Every command takes --json [FILE].\n"
        f"`{PROGRAM} --version` prints the version.\n"
    )


def dispatch(argv: Sequence[str]) -> int:
    """Run the subcommand that ``argv`` names.

    Raises:
        UsageError: an unknown subcommand or option.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(top_help(), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"{PROGRAM} {version(PROGRAM)}")
        return 0
    by_name = {command.name: command for command in COMMANDS}
    if argv[0] in by_name:
        return by_name[argv[0]].run(argv[1:])
    if argv[0].startswith("-"):
        raise unknown("option", argv[0], ("--help", "--version"), f"see {PROGRAM} --help")
    raise unknown("command", argv[0], by_name, f"one of {', '.join(by_name)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, or 1 for a failed check, or 2 for bad input.

    Args:
        argv: the words after ``branchgrpo``; None takes them from the process.
    """
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except (UsageError, BranchGRPOError) as error:
        return complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return complain("interrupted", code=130)


def complain(message: str, code: int = 2) -> int:
    """Print one line to standard error and hand back the exit code."""
    print(f"{PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":  # torchrun -m branchgrpo.cli.main
    sys.exit(main())
