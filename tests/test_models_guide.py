"""What the guide of the models shows: its example runs, and a new class is found."""

import re
from pathlib import Path

import pytest
import torch
from helpers_models import KINDS, ROWS, saved

from branchgrpo.models import auto
from branchgrpo.models.backbone import REGISTRY
from branchgrpo.models.backbones.stable_diffusion_3 import StableDiffusion3

GUIDE = Path(__file__).parents[1] / "optimized/branchgrpo/models/README.md"


def test_the_example_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert '"black-forest-labs/FLUX.1-dev"' in example
    monkeypatch.chdir(tmp_path)
    example = example.replace("black-forest-labs/FLUX.1-dev", str(saved("flux", tmp_path)))
    names: dict[str, object] = {}
    exec(compile(example, str(GUIDE), "exec"), names)
    assert names["images"].shape == (2, 3, 64, 96)
    assert names["v"].shape == names["x"].shape
    assert names["parameters"]
    assert names["frozen"].guidance == names["model"].guidance
    assert list((tmp_path / "prompts").rglob("*.safetensors"))
    assert list((tmp_path / "adapter").rglob("*.safetensors"))


def test_every_file_of_the_backbones_has_a_row_and_is_named_in_the_guide() -> None:
    auto.import_backbones()
    text = GUIDE.read_text()
    classes = set(REGISTRY.values())
    built = {REGISTRY[type(row.build()).__name__] for kind, row in ROWS.items() if kind in KINDS}
    assert classes == built
    assert all(f"`{cls.__name__}`" in text for cls in classes)


def test_a_new_class_is_found_by_its_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "StableDiffusion3Pipeline", StableDiffusion3)  # put back afterwards

    class Other(StableDiffusion3):
        family = "other"
        pipeline_classes = ("StableDiffusion3Pipeline",)

    model = auto.load_backbone(saved("sd3", tmp_path))
    assert isinstance(model, Other)
    assert model.encode(["a"]).family == "other"
    assert model.dtype == torch.float32
