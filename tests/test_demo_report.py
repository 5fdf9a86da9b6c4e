"""The demo from end to end, and its report."""

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.demo.check import read_results
from branchgrpo.training.demo.config import LABELS, quick_config
from branchgrpo.training.demo.figures import grid_png
from branchgrpo.training.demo.run import run_demo
from branchgrpo.training.demo.tree_figure import GrownTree, node_heights, tree_svg

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Collects what a page refers to, and checks that its elements are closed."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A quick demo, made once: its directory, what it returned and what it showed."""
    out, shown = tmp_path_factory.mktemp("demo") / "runs" / "demo", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        base = quick_config()
        config = replace(base, calls=1900, samples=3, generator=replace(base.generator, steps=60, batch=64))
        console = Console(file=shown, force_terminal=True, width=100)
        results = run_demo(out, config=config, console=console)
    return out, results, shown.getvalue()


def test_the_demo_writes_its_two_files(demo):
    out, results, _ = demo
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "results.json"]
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert read_results(out / "results.json")["schema"] == 1
    assert out.joinpath("report.html").stat().st_mode & 0o044 == 0o044


def test_the_results_hold_every_run_with_every_number(demo):
    _, results, _ = demo
    assert list(results["methods"]) == list(LABELS)
    for name, entry in results["methods"].items():
        (run,) = entry["runs"]
        assert run["method"] == name
        assert run["gain"] == run["final_reward"] - run["base_reward"]
        assert run["calls"] == run["rollout_calls"] + run["update_calls"]
        assert entry["mean_gain"] == run["gain"]
        assert entry["sd_gain"] is None
        assert entry["counts"]["denoiser_calls"] > 0
        assert [set(point) for point in run["curve"]] == [{"calls", "seconds", "reward", "judge"}] * 4
        assert run["curve"][0]["calls"] == 0
        assert run["curve"][-1]["calls"] == run["calls"]
        assert run["seconds"] > 0
    assert not results["acceptance"]["passed"]
    assert len(results["acceptance"]["criteria"]) == 3 * len(LABELS) + 2
    assert set(results["seconds"]) == {"pretraining", "runs", "total", "processor"}
    assert set(results["environment"]) == {"python", "torch", "cores"}


def test_the_report_needs_nothing_but_itself(demo):
    page = Page()
    page.feed((demo[0] / "report.html").read_text())
    assert page.open == []
    assert len(page.sources) > 4
    for source in page.sources:
        assert source.startswith(("data:image/png;base64,", "#"))
    text = (demo[0] / "report.html").read_text()
    assert "<script" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_the_report_shows_the_numbers_of_the_results(demo):
    out, results, _ = demo
    page = Page()
    page.feed((out / "report.html").read_text())
    text = " ".join(" ".join(page.text).split())
    for entry in results["methods"].values():
        assert entry["label"] in text
        assert f"{entry['mean_gain']:.3f}" in text
        assert f"{entry['runs'][0]['rollout_calls']:,} + {entry['runs'][0]['update_calls']:,}" in text
    assert "not all conditions hold" in text
    for criterion in results["acceptance"]["criteria"]:
        assert criterion["name"] in text
    assert "learning rate 0.00015 for BranchGRPO, flat GRPO, G²RPO." in text
    assert "1 seed each" in text
    assert "max(−10, −20·|stroke weight − 0.30| + 0.3·log p(digit))" in text


def test_progress_is_shown_to_the_end(demo):
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", demo[2])
    assert "the demo" in shown
    for label in LABELS.values():
        assert f"{label}, seed 0" in shown
    assert "100 %" in shown.splitlines()[-1] or "100 %" in shown


def test_the_output_must_be_a_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match="out = "):
        run_demo(file, quick=True)


def test_a_grid_has_one_pixel_a_pixel_and_dark_strokes():
    samples = np.full((2, 3, 8, 8), -5.0, dtype=np.float32)
    samples[1, 2] = 5.0
    samples[0, 0] = 0.0
    data = base64.b64decode(grid_png(samples).split(",")[1])
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert pixels.shape == (17, 26)
    assert (pixels[9:17, 18:26] == 0).all()
    assert (pixels[0:8, 9:26] == 255).all()
    assert abs(int(pixels[3, 3]) - 128) <= 1


def test_a_parent_is_drawn_in_the_middle_of_its_children():
    heights = node_heights((2, 1, 3))
    assert [len(level) for level in heights] == [1, 2, 2, 6]
    assert heights[3].tolist() == [6, 5, 4, 3, 2, 1]
    assert heights[1].tolist() == heights[2].tolist() == [5, 2]
    assert heights[0].tolist() == [3.5]


def test_the_tree_is_drawn_with_its_images_edges_and_rewards():
    sizes = (1, 2, 2, 4)
    tree = GrownTree(
        prompt="3",
        sigmas=(1.0, 0.8, 0.5, 0.0),
        branching=(2, 1, 2),
        states=tuple(np.zeros((n, 8, 8), dtype=np.float32) for n in sizes),
        advantages=tuple(np.linspace(-1.0, 1.0, n) for n in sizes[1:]),
        trained=(np.array([True, True]), np.array([True, False]), np.zeros(4, dtype=bool)),
        rewards=np.array([-0.11, -0.22, -0.33, -0.44]),
    )
    svg = tree_svg(tree)
    root = ElementTree.fromstring(svg)
    tags = [element.tag.split("}")[1] for element in root.iter()]
    assert tags.count("image") == sum(sizes)
    for label in ("σ 1.00", "σ 0.80", "−0.11", "−0.44"):
        assert label in svg or label.replace("−", "-") in svg
    assert svg.count("stroke-dasharray") == 5
