"""Every number that spec/findings.md quotes is the one that a study, or a count, has."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from branchgrpo.reference.counts import count
from branchgrpo.reference.presets import preset

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "spec" / "findings.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## (?=F-\d+ )", PAGE, flags=re.MULTILINE)[1:]
NAMES = [section.split(" ", 1)[0] for section in SECTIONS]


def studies() -> dict[str, list[dict[str, Any]]]:
    """Rows of all stored studies by name."""
    oracle = json.loads((ROOT / "spec" / "studies" / "oracle.json").read_text(encoding="utf-8"))
    own = json.loads((ROOT / "spec" / "studies" / "findings.json").read_text(encoding="utf-8"))
    return {study["name"]: study["rows"] for study in oracle["studies"]} | own["studies"]


STUDIES = studies()


def quotes(section: str) -> list[dict[str, Any]]:
    """The block at a finding's end."""
    (block,) = re.findall(r"```toml\n(.*?)```", section, flags=re.DOTALL)
    return tomllib.loads(block)["quote"]


def stored(quote: dict[str, Any]) -> float:
    """The value that a quote stands for."""
    if "count" in quote:
        return float(getattr(count(preset(quote["count"])), quote["key"]))
    (row,) = [r for r in STUDIES[quote["study"]] if all(r[key] == value for key, value in quote["row"].items())]
    if quote["key"].startswith("beyond."):
        return float(row["beyond"][quote["key"].removeprefix("beyond.")])
    over, _, key = quote["key"].rpartition("/")
    return float(over) / row[key] if over else float(row[key])


def agrees(text: str, value: float) -> bool:
    """Whether a quoted number is the value rounded to the digits that are quoted."""
    digits = text.replace(",", "").removesuffix(" %")
    scaled = 100 * value if text.endswith("%") else value
    places = len(digits.partition(".")[2])
    return f"{scaled:.{places}f}" == digits


CASES = [(name, quote) for name, section in zip(NAMES, SECTIONS, strict=True) for quote in quotes(section)]


@pytest.mark.parametrize(
    ("name", "quote"), CASES, ids=[f"{name}-{quote['text']}-{i}" for i, (name, quote) in enumerate(CASES)]
)
def test_quoted_numbers_are_the_stored_ones(name: str, quote: dict[str, Any]) -> None:
    section = SECTIONS[NAMES.index(name)]
    prose = section.split("```toml")[0].replace("{,}", ",")
    assert re.search(rf"(?<![\d.,]){re.escape(quote['text'])}(?![\d])", prose), "not in the text"
    assert agrees(quote["text"], stored(quote)), stored(quote)


def test_a_wrong_digit_is_found() -> None:
    assert agrees("1.137", 1.13701)
    assert not agrees("1.138", 1.13701)
    assert agrees("96 %", 0.9627)
    assert not agrees("97 %", 0.9627)


def test_findings_are_numbered_and_say_what_to_do() -> None:
    assert [f"F-{i}" for i in range(1, 13)] == NAMES
    for section in SECTIONS:
        assert "**Do:**" in section
        assert "**Command:** `" in section


def test_exact_studies_are_current() -> None:
    """All but the simulation are made again and compared."""
    spec = importlib.util.spec_from_file_location("finding_studies", ROOT / "benchmarks" / "finding_studies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.STUDIES) == {
        "scaled_branch_noise",
        "leaf_correlations",
        "advantage_bound",
        "levels_left",
        "rounding",
    }
    for name, make in module.STUDIES.items():
        if name == "rounding":
            continue
        for found, wanted in zip([module.tidy(row) for row in make()], STUDIES[name], strict=True):
            for key, value in wanted.items():
                # Another BLAS may round the last digits of a product of twenty coefficients.
                assert found[key] == (pytest.approx(value, rel=1e-8) if isinstance(value, float) else value)


def test_commands_exist() -> None:
    """Scripts that are named are there, and presets are known."""
    for script in set(re.findall(r"python (benchmarks/\w+\.py)", PAGE)):
        assert (ROOT / script).is_file()
    for name in set(re.findall(r"--preset ([\w-]+)", PAGE)):
        assert preset(name).name == name
