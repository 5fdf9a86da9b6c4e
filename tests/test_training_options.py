"""Every option of a run is tried: it changes what it says it changes, and nothing else.

Two short runs an option, without and with it. Compared are the weights and averages (numbers), the names and contents
of the files (files), and the log's numbers, findings and the console (logs).
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_optimized import shapes_unchecked
from helpers_training import largest_difference, numbers, weights_of
from torch import Tensor

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.config.effects import EFFECTS, FILES
from branchgrpo.training.config.leaves import leaves
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.engine.loop import train
from branchgrpo.training.monitors.limits import MONITORS, MonitorStop, judge

pytestmark = pytest.mark.slow

RATE = 2e-4
"""AdamW's first steps move a weight by about this much each, whatever its gradient."""
BASE = (
    "run.iterations=2",
    "data.prompts_per_iteration=2",
    "data.held_out_prompts=2",
    "optimizer.learning_rate=2e-4",
    "evaluation.every=2",
    "evaluation.samples=3",
    "evaluation.grid=1",
)
TINY = ("method.settings={steps=4, splits=[0, 1]}",)
"""Added where the model is a pipeline, whose steps cost more than the digits'."""

REFUSED: dict[str, str] = {"rollout.pad": "rollout.chunk", "model.guidance_scale": "guidance"}
"""Options that mean nothing without another one; alone they are refused, and the message names the other."""


@dataclass(frozen=True)
class Outcome:
    """What is compared.

    Attributes:
        weights: of the newest checkpoint.
        names: of all files, with what changes from process to process left out.
        contents: hashes of the pictures, scores, exports and boards.
        log: numbers and findings of the log.
        console: what was printed, without times.
    """

    weights: dict[str, Tensor]
    names: frozenset[str]
    contents: dict[str, str]
    log: list[Any]
    console: str


def stable(name: str) -> str:
    """A file's name without the host, process and time that boards put into it."""
    name = re.sub(r"events\.out\.tfevents.*", "events", name)
    name = re.sub(r"prompt-cache/.*", "prompt-cache", name)
    return re.sub(r"wandb/.*", "wandb", name)


def said(folder: Path) -> list[Any]:
    """Numbers and findings of the log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [[finding["key"], finding["level"]] for line in lines for finding in line.get("findings", [])]
    ends = [line["reason"] for line in lines if line["kind"] == "end"]
    return [*numbers(folder), found, ends]


class Walk:
    """Runs, each done once, in folders of their own."""

    def __init__(self, root: Path) -> None:
        self.root, self.done = root, {}  # type: ignore[var-annotated]
        self.files = root / "files"
        self.files.mkdir()
        for name, text in FILES.items():
            (self.files / name).write_text(text)

    def overrides(self, options: Sequence[str]) -> tuple[str, ...]:
        """Overrides of a run with these options."""
        tiny = TINY if any(option.startswith("model.source=tiny") for option in options) else ()
        given = (*BASE, *tiny, *options)
        return tuple(option.replace("{files}", str(self.files)) for option in given)

    def run(self, options: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Outcome:
        """What a run with these options leaves behind."""
        key = tuple(options)
        if key not in self.done:
            folder = self.root / f"run-{len(self.done):03d}"
            config = read_config(overrides=(f"run.folder={folder}", *self.overrides(options)))
            capsys.readouterr()
            try:
                with shapes_unchecked():
                    train(config)
            except MonitorStop:
                pass
            console = re.sub(r"\d+:\d\d", "", "".join(capsys.readouterr()))
            self.done[key] = outcome(Path(config.run.folder), console)
        return self.done[key]


def outcome(folder: Path, console: str) -> Outcome:
    """See ``Outcome``."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    shown = [path for path in files if path.suffix in (".png", ".gif") or path.name == "scores.jsonl"]
    hashes = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in shown}
    names = frozenset(stable(str(path.relative_to(folder))) for path in files)
    return Outcome(weights_of(folder), names, hashes, said(folder), console)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return Walk(tmp_path_factory.mktemp("walk"))


def same_weights(one: Outcome, two: Outcome) -> bool:
    """Bit for bit, the same tensors among them."""
    if one.weights.keys() != two.weights.keys():
        return False
    pairs = [(one.weights[name], two.weights[name]) for name in one.weights]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_every_option_says_what_it_changes() -> None:
    assert set(EFFECTS) == set(leaves())


PROBES = (-1.0, 0.0, 0.005, 0.02, 0.2, 0.7, 1.5, 5.0, 150.0, 2e9)
"""Values of a monitored number, on either side of every threshold that the alternatives set."""
LIMITS = [name for name in EFFECTS if name.startswith("monitors.") and name != "monitors.costly_every"]


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_changes_what_is_said_about_some_value(name: str, walk: Walk) -> None:
    """What a finding does to a run is tested with the loop; a run cannot be made to have every value."""
    effect = EFFECTS[name]
    both = (effect.given, (*effect.given, *effect.alternative))
    given, alternative = (read_config(overrides=walk.overrides(options)).monitors for options in both)
    key = MONITORS[name.split(".")[1]].keys[0]
    found = [[[f.level for f in judge({key: value}, limits)] for value in PROBES] for limits in (given, alternative)]
    assert found[0] != found[1]


PACKAGES = {"logging.wandb": "wandb", "logging.wandb_project": "wandb"}
"""Options that need a package which may be missing: then they are refused, and the message names it."""


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in LIMITS])
def test_an_option_changes_what_it_says(name: str, walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    effect = EFFECTS[name]
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        with pytest.raises(OptionError, match=f"pip install {PACKAGES[name]}"):
            walk.run((*effect.given, *effect.alternative), capsys)
        return
    without = walk.run(effect.given, capsys)
    present = walk.run((*effect.given, *effect.alternative), capsys)
    if "numbers" in effect.changes:
        differ = not same_weights(without, present) or without.log != present.log
        assert differ, f"{name} changes no number"
    elif "rounding" in effect.changes:
        mean = sum(float((without.weights[n].double() - t.double()).abs().sum()) for n, t in present.weights.items())
        assert mean / sum(t.numel() for t in present.weights.values()) < 0.01 * 2 * RATE
        assert largest_difference(without.weights, present.weights) <= 2 * 2 * RATE
    elif name != "run.iterations":
        assert same_weights(without, present) or present.log[-1] == ["stopped"], f"{name} changes weights"
    changed = without.names != present.names or without.contents != present.contents
    if "files" in effect.changes:
        assert changed or name == "run.folder", f"{name} changes no file"
    elif not {"numbers", "rounding"} & effect.changes and present.log[-1] != ["stopped"]:
        assert not changed, f"{name} changes files"
    told = without.log != present.log or without.console != present.console
    if effect.changes == {"logs"}:
        assert told, f"{name} changes nothing in the logs"
    elif not effect.changes or effect.changes == {"files"}:
        assert without.log == present.log, f"{name} changes the log"


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_use_is_refused(name: str, walk: Walk) -> None:
    with pytest.raises(OptionError, match=REFUSED[name]):
        train(read_config(overrides=(*walk.overrides(EFFECTS[name].alternative), f"run.folder={walk.root / 'never'}")))
    assert not (walk.root / "never").exists()
