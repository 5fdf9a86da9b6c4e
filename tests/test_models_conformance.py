"""Conformance of the batched path on every backbone: the checks that judge a trace, on traces of real networks."""

from pathlib import Path

import pytest
import torch
from helpers_models import KINDS, NEGATIVE, PROMPTS, ROWS, first_frames, saved

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.capture import capture
from branchgrpo.conformance.case import Backbone, Case
from branchgrpo.conformance.runner import run_trace_checks
from branchgrpo.conformance.subjects import Distance
from branchgrpo.models.auto import load_backbone
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import ExtremeB, Objective
from branchgrpo.reference.presets import g2rpo
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Kernel, KernelKind

QUICK = [kind if kind == "flux" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
ASKED = (Prompt(5, PROMPTS[0]), Prompt(2, PROMPTS[1]))
WIDE = Objective(clip_low=1e-2, clip_high=1e-2)
PLAN = tree_plan(4, Kernel(KernelKind.SDE, 0.3), splits=(0, 2), branching=2, spread=4.0)
TREE = Method("tree", "conformance", PLAN, pruning=(ExtremeB(1),), objective=WIDE)
FAMILY = g2rpo("family", steps=4, group=3, granularities=(1, 2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("method", [TREE, pytest.param(FAMILY, marks=pytest.mark.slow)], ids=["tree", "family"])
def test_traces_of_a_backbone_pass_every_check(method: Method, kind: str, root: Path) -> None:
    row, options = ROWS[kind], LoadOptions(max_sequence_length=16)
    model = load_backbone(saved(kind, root), dtype=torch.float64, guidance=row.guidance, options=options)
    model.requires_grad_(False)
    shape = model.latent_shape(row.size[1], row.size[2], row.size[0])
    condition = model.encode([prompt.text for prompt in ASKED], negative=NEGATIVE, **first_frames(kind, row.size, 2))
    case = Case(method, (Distance(0.3),), latent=shape, backbone=Backbone(model, ASKED, condition))
    records = capture(OptimizedImplementation(chunk=5), case, KeyedNoise(case.seed))
    assert records[0].levels["states"][0].shape == (2, 1, *shape)
    results = run_trace_checks(records)
    assert not [result for result in results if result.status == "failed"]
    assert len([result for result in results if result.status == "passed"]) >= 15
