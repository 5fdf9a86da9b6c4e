"""``branchgrpo plan --draw``: the drawing shows every edge as what it is."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers_cli import ROOT, branchgrpo

from branchgrpo.cli.main import main
from branchgrpo.drawing.family import draw_family
from branchgrpo.drawing.svg import Svg, number
from branchgrpo.drawing.tree import draw_tree
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

SVG = "{http://www.w3.org/2000/svg}"
CASES = [(name, iteration) for name in PRESETS if name != "branchgrpo-k4" for iteration in (0, 45)]
TREES = [(name, t) for name, t in CASES if not isinstance(preset(name).sampler, PlanFamily)]
FAMILIES = [name for name, t in CASES if t == 0 and (name, t) not in TREES]
DRAW_ALL = """
import sys
from branchgrpo.cli.main import main
for case in sys.argv[1:]:
    name, iteration = case.split(":")
    assert main(["plan", "--preset", name, "--iteration", iteration, "--draw", f"{case}.svg", "--json", case]) == 0
sys.exit(0)
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the drawing and the counts of every case, made in one process."""
    folder = tmp_path_factory.mktemp("drawings")
    done = branchgrpo(*(f"{name}:{t}" for name, t in CASES), before=DRAW_ALL, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def edges(svg: str) -> Counter[str]:
    """How many edges of each class the drawing has; the legend's samples are no edges."""
    groups = [g for g in ElementTree.fromstring(svg) if g.tag == f"{SVG}g" and g.get("class") != "legend"]
    return Counter(g.get("class", "") for g in groups for _ in g.findall(f"{SVG}path"))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(("name", "iteration"), TREES)
def test_a_tree_has_the_edges_that_are_counted(drawn: Path, name: str, iteration: int):
    counts = json.loads((drawn / f"{name}:{iteration}").read_text(encoding="utf-8"))
    found = edges((drawn / f"{name}:{iteration}.svg").read_text(encoding="utf-8"))
    plan = preset(name).plan_at(iteration)
    assert not isinstance(plan, PlanFamily)
    assert found.total() == counts["edges"]
    assert found["sde trained"] == counts["trained_edges"]
    assert found["sde pruned"] + found["ode pruned"] == counts["edges"] - counts["kept_edges"]
    sizes = plan.level_sizes
    noisy = plan.roots * sum(sizes[step + 1] for step in plan.stochastic_steps)
    assert sum(n for kind, n in found.items() if kind.startswith("sde")) == noisy


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_edges_that_are_counted(drawn: Path, name: str):
    counts = json.loads((drawn / f"{name}:0").read_text(encoding="utf-8"))
    found, family = edges((drawn / f"{name}:0.svg").read_text(encoding="utf-8")), preset(name).sampler
    assert isinstance(family, PlanFamily)
    assert found["sde trained"] * family.roots == counts["trained_edges"]
    assert found["ode anchor"] == family.ks[-1]
    assert found.total() * family.roots == counts["edges"]


def test_a_family_shares_until_granularities_part():
    # T = 4, k = 0: λ = 1 visits 1 2 3 4, λ = 2 visits 1 2 4: both share 1 → 2, then part.
    family = PlanFamily(shifted_schedule(4), Kernel(KernelKind.FLOW_SDE, 0.7), (0,), group=2, granularities=(1, 2))
    found = edges(draw_family(family, "family"))
    assert found == {"sde trained": 2, "ode shared": 2, "ode lambda-1": 4, "ode lambda-2": 2}


def test_a_family_that_ends_with_its_child():
    family = PlanFamily(shifted_schedule(3), Kernel(KernelKind.FLOW_SDE, 0.7), (2,), group=2, output=LeafOutput.SAMPLE)
    assert edges(draw_family(family, "family")) == {"sde trained": 2, "ode anchor": 2}


def test_legend_holds_what_is_drawn_and_nothing_else(drawn: Path):
    assert "SDE, pruned from the update" in texts((drawn / "branchgrpo-widpru:0.svg").read_text(encoding="utf-8"))
    plain = texts((drawn / "branchgrpo:0.svg").read_text(encoding="utf-8"))
    assert not [text for text in plain if "pruned" in text]
    assert {"SDE, trained", "ODE: no noise, never trained"} <= set(plain)


def test_splits_carry_their_factor_and_spread(drawn: Path):
    found = Counter(texts((drawn / "branchgrpo:0.svg").read_text(encoding="utf-8")))
    assert (found["K = 2"], found["s = 4"]) == (4, 4)
    assert "s = ∞" in texts((drawn / "dancegrpo:0.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_everything_is_inside_the_page(drawn: Path, name: str):
    svg = ElementTree.fromstring((drawn / f"{name}:0.svg").read_text(encoding="utf-8"))
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for element in svg.iter():
        for across, down in (("x", "y"), ("cx", "cy")):
            if across in element.attrib:
                assert 0 <= float(element.attrib[across]) <= width
                assert 0 <= float(element.attrib[down]) <= height
    for parent in svg.iter():
        for text in parent.findall(f"{SVG}text"):
            inherited = {**parent.attrib, **text.attrib}
            if inherited.get("text-anchor", "start") == "start":
                # 0.56 em is the mean advance of the sans-serif fonts that browsers use for such text.
                length = 0.56 * float(inherited["font-size"]) * len(text.text or "")
                assert float(text.attrib["x"]) + length <= width, text.text


def test_rows_do_not_touch_with_16_leaves_and_20_steps(drawn: Path):
    svg = ElementTree.fromstring((drawn / "branchgrpo:0.svg").read_text(encoding="utf-8"))
    (rewards,) = [g for g in svg if g.get("class") == "rewards"]
    ys = [float(text.get("y", "nan")) for text in rewards]
    assert len(ys) == 16
    assert min(b - a for a, b in itertools.pairwise(ys)) >= 20


def test_the_same_drawing_every_time(drawn: Path, tmp_path: Path):
    again = tmp_path / "again.svg"
    assert main(["plan", "--preset", "branchgrpo-late", "--draw", str(again), "--json", str(tmp_path / "json")]) == 0
    assert again.read_bytes() == (drawn / "branchgrpo-late:0.svg").read_bytes()


def test_the_picture_of_the_readme_is_what_the_command_draws(drawn: Path):
    stored = (ROOT / "docs" / "tree.svg").read_bytes()
    assert stored == (drawn / "branchgrpo-widpru:0.svg").read_bytes()
    assert "](docs/tree.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_text_is_escaped():
    svg = Svg("a < b & c")
    svg.add("text", "<script>&\"'", x=1, y=2, class_='"<&')
    root = ElementTree.fromstring(svg.render(10, 10))
    assert root.findtext(f"{SVG}title") == "a < b & c"
    (text,) = root.iter(f"{SVG}text")
    assert (text.text, text.get("class")) == ("<script>&\"'", '"<&')


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (-0.001, "0"), (2.5, "2.5"), (1 / 3, "0.33"), (100.0, "100")])
def test_numbers_are_short(value: float, text: str):
    assert number(value) == text


def test_a_mask_of_another_plan_is_refused():
    plan = tree_plan(3, Kernel(KernelKind.SDE, 0.3), splits=(0,), branching=2)
    good = [[True] * 2] * 3
    with pytest.raises(InputError, match=re.escape("trained edges a depth = [2, 2]: must be [2, 2, 2]")):
        draw_tree(plan, good, good[:2], "t")
