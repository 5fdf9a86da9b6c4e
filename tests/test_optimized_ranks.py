"""Two processes: prompts or sub-trees over ranks, DDP and FSDP2, one verdict for all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers_ranks
import pytest
import torch
from helpers_optimized import (
    SmallModel,
    accumulated,
    close,
    condition_of,
    prompts_of,
    rewards_of,
    shapes_unchecked,
)
from helpers_ranks import PLAN, SAMPLING, moved_model, own_part, update

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.pruning import leaf_keys, prune
from branchgrpo.optimized.ranks import Share
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sharing import owned_edges, owned_leaves
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion, Normalization, ParentTop1

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two gloo processes computed."""
    folder = tmp_path_factory.mktemp("ranks")
    script = str(Path(helpers_ranks.__file__))
    environment = {**os.environ, "PYTHONPATH": str(Path(script).parent), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", str(folder)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        errors = [worker.communicate(timeout=240)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    result: dict[str, Any] = torch.load(folder / "result.pt", weights_only=False)
    return result


@shapes_unchecked()
def test_prompts_over_ranks_are_one_process_with_padded_calls_bit_by_bit(found: dict[str, Any]) -> None:
    tree, _, advantages, _ = own_part(0, 1, None)
    for one, two in zip(tree.states, found["prompts"]["states"], strict=True):
        assert torch.equal(one, two)
    for one, two in zip(advantages, found["prompts"]["advantages"], strict=True):
        assert torch.equal(one, two)


@shapes_unchecked()
def test_gradients_over_ranks_are_one_processes(found: dict[str, Any]) -> None:
    """Summed by hand, averaged by DDP and by FSDP2; the ranks have three prompts and one: idle rounds are needed."""
    model = moved_model()
    stats = update(model, own_part(0, 1, None), None)
    for gradient in found["prompts"]["gradients"]:
        assert close(gradient, accumulated(model))
    two = found["prompts"]["stats"]
    assert (two.edges, two.parents) == (stats.edges, stats.parents)
    for name in ("objective", "clip_fraction", "ratio_mean", "ratio_min", "ratio_max"):
        assert getattr(two, name) == pytest.approx(getattr(stats, name), rel=1e-9, abs=1e-12)


@shapes_unchecked()
def test_sub_trees_over_ranks_are_one_process(found: dict[str, Any]) -> None:
    prompts, condition, one = prompts_of(2), condition_of(2), SmallModel(1)
    tree = rollout(PLAN, one, prompts, condition, SAMPLING)
    for whole, shared in zip(tree.log_probs, found["trees"]["log_probs"], strict=True):
        assert (whole is None and shared is None) or torch.equal(whole, shared)  # type: ignore[arg-type]
    values = fuse(tree, rewards_of(PLAN, 2, 1, 4), Fusion())
    advantages = normalize(PLAN, values, [1.0], Normalization())
    for whole, shared in zip(advantages, found["trees"]["advantages"], strict=True):
        assert torch.equal(whole, shared)
    kept = prune(PLAN, leaf_keys(PLAN, values, [1.0], Normalization()), [ParentTop1()], 0)
    model = moved_model()
    stats = update(model, (tree, condition, advantages, kept), None)
    assert close(found["trees"]["gradient"], accumulated(model))
    assert (found["trees"]["stats"].edges, found["trees"]["stats"].parents) == (stats.edges, stats.parents)
    # Half of the calls, and the common part above depth 4, all counted with their padding.
    assert max(found["trees"]["items"]) < 0.7 * sum(one.calls)


def test_no_rank_is_left_waiting_when_another_fails(found: dict[str, Any]) -> None:
    expected = {
        "rollout": "ModelError: velocity at step 0, node 0 of prompt",
        "update": "ModelError: velocity at step 0, node 0 of prompt",
        "nothing to train": "PlanError: trained edges = 0",
    }
    for fault, start in expected.items():
        first, second = found[fault]
        assert first == second
        assert first.startswith(start)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [0, 1, 4, 12])
def test_every_edge_and_leaf_has_one_owner(size: int, depth: int) -> None:
    shares = [Share(rank, size, depth) for rank in range(size)]
    masks = [owned_edges(PLAN, 2, share) for share in shares]
    for level in zip(*masks, strict=True):
        assert torch.equal(torch.stack(level).sum(0), torch.ones_like(level[0], dtype=torch.int64))
    leaves = [leaf for share in shares for leaf in owned_leaves(PLAN, 2, share)]
    assert leaves == list(range(2 * PLAN.leaves))


def test_wrong_shares_are_refused() -> None:
    with pytest.raises(InputError, match=r"share\.rank = 2: must be an integer in 0\.\.1"):
        Share(2, 2, 1)
    with pytest.raises(InputError, match=r"share\.size = 0"):
        Share(0, 0, 1)
    with pytest.raises(InputError, match=r"share\.depth = 20: must be an integer in 0\.\.19"):
        rollout(PLAN, SmallModel(1), prompts_of(1), condition_of(1), SAMPLING, share=Share(0, 2, 20))
