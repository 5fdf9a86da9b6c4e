"""The subcommands, by name. Their modules are imported when they are called, so that ``--help`` answers at once."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, one line on what it does, and the module whose ``main(argv)`` does it."""

    name: str
    summary: str
    module: str

    def run(self, argv: Sequence[str]) -> int:
        """Import the module and hand it the arguments that follow the subcommand's name."""
        code: int = importlib.import_module(self.module).main(argv)
        return code


COMMANDS: tuple[Command, ...] = (
    Command("plan", "count, list and draw the trees that the methods grow", "branchgrpo.cli.plan"),
    Command("train", "train a model with any of the methods, on one machine or many", "branchgrpo.cli.train"),
    Command("report", "make one HTML file of a training run, finished or not", "branchgrpo.cli.report"),
    Command("demo", "train on handwritten digits with three methods and report", "branchgrpo.cli.demo"),
    Command("audit", "audit an implementation or a run: one report, one verdict", "branchgrpo.cli.audit"),
    Command("conformance", "judge an implementation or a trace clause by clause", "branchgrpo.cli.conformance"),
    Command("mutants", "judge the judge: faulty implementations that the checks must kill", "branchgrpo.cli.mutants"),
    Command("diversity", "measure how diverse two folders of images are and how far apart", "branchgrpo.cli.diversity"),
)
