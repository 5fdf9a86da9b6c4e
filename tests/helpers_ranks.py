"""One of two gloo processes: ``python helpers_ranks.py RANK SIZE FOLDER``; rank 0 saves what the test compares."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers_optimized import LATENT, SmallModel, accumulated, condition_of, preset_plan, prompts_of, rewards_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.ranks import Ranks, Share
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.sharing import gather_levels, gather_log_probs, owned_edges, owned_leaves
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import Parallel, UpdateStats, accumulate_gradients
from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.reference.options import Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.protocols import TensorCondition

PROMPTS = 4
BATCH = Normalization(std_scope="batch")
WIDE = Objective(clip_low=0.2, clip_high=0.2, edge_weights="std")
PLAN = preset_plan("branchgrpo-widpru")
SAMPLING = Sampling(PhiloxNoise(3), LATENT, chunk=16, pad=True)


def rows_of(rank: int, size: int) -> Tensor:
    """Uneven: the last rank has one prompt, the others share the rest."""
    if size == 1:
        return torch.arange(PROMPTS)
    return torch.arange(PROMPTS - 1) if rank == 0 else torch.tensor([PROMPTS - 1])


def moved_model() -> SmallModel:
    model = SmallModel(1)
    with torch.no_grad():
        model.weight.mul_(1.05)
    return model


def own_part(rank: int, size: int, ranks: Ranks | None) -> tuple[Tree, TensorCondition, Levels, Masks]:
    """Rollout and tail of this rank's prompts."""
    rows = rows_of(rank, size)
    prompts, condition = [prompts_of(PROMPTS)[i] for i in rows.tolist()], condition_of(PROMPTS).gather(rows)
    tree = rollout(PLAN, SmallModel(1), prompts, condition, SAMPLING, ranks=ranks)
    values = fuse(tree, rewards_of(PLAN, PROMPTS, 1, 4)[rows], Fusion())
    whole, mine = (values, slice(None)) if ranks is None else gather_levels(values, ranks)
    advantages = tuple(level[mine] for level in normalize(PLAN, whole, [1.0], BATCH))
    kept = prune(PLAN, leaf_keys(PLAN, values, [1.0], BATCH), [ParentTop1()], 0)
    return tree, condition, advantages, kept


def update(
    model: nn.Module, part: tuple[Tree, TensorCondition, Levels, Masks], parallel: Parallel | None
) -> UpdateStats:
    tree, condition, advantages, kept = part
    return accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=64, parallel=parallel)


def summed(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def full(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters() if isinstance(p.grad, DTensor)])


def prompts_over_ranks(rank: int, size: int) -> dict[str, object]:
    ranks, plain = Ranks.of_group(), Ranks.of_group(averaged=False)
    part = own_part(rank, size, ranks)
    model = moved_model()
    stats = update(model, part, Parallel(plain))
    wrapped = DistributedDataParallel(moved_model())
    update(wrapped, part, Parallel(ranks, no_sync=wrapped.no_sync))
    sharded = moved_model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
    update(sharded, part, Parallel(ranks))
    return {
        "stats": stats,
        "states": [ranks.rows(state) for state in part[0].states],
        "advantages": [ranks.rows(level) for level in part[2]],
        "gradients": [summed(accumulated(model)), accumulated(wrapped.module), full(sharded)],
    }


def trees_over_ranks(rank: int, size: int) -> dict[str, object]:
    """Two prompts' trees, the nodes at depth 4 (four a tree) dealt out."""
    ranks, share = Ranks.of_group(averaged=False), Share(rank, size, 4)
    prompts, condition = prompts_of(2), condition_of(2)
    model = SmallModel(1)
    tree = rollout(PLAN, model, prompts, condition, SAMPLING, ranks=ranks, share=share)
    tree = gather_log_probs(tree, share, ranks)
    scores = rewards_of(PLAN, 2, 1, 4).flatten(0, 1)
    local, mine = torch.zeros_like(scores), owned_leaves(PLAN, 2, share)
    local[mine.start : mine.stop] = scores[mine.start : mine.stop]
    values = fuse(tree, ranks.summed(local).unflatten(0, (2, -1)), Fusion())
    advantages = normalize(PLAN, values, [1.0], Normalization())
    kept = prune(PLAN, leaf_keys(PLAN, values, [1.0], Normalization()), [ParentTop1()], 0)
    policy = moved_model()
    stats = update(policy, (tree, condition, advantages, kept), Parallel(ranks, [owned_edges(PLAN, 2, share)]))
    return {
        "items": ranks.everyone(sum(model.calls)),
        "log_probs": list(tree.log_probs),
        "advantages": list(advantages),
        "stats": stats,
        "gradient": summed(accumulated(policy)),
    }


def message(rank: int, failing: int, fault: str) -> str:
    """The error that this rank sees when another fails."""
    ranks = Ranks.of_group()
    part = own_part(rank, ranks.size, ranks)
    tree, condition, advantages, kept = part
    model = moved_model()
    try:
        if fault == "rollout" or fault == "update":
            if rank == failing:
                with torch.no_grad():
                    model.bias.fill_(torch.nan)
            if fault == "rollout":
                rollout(PLAN, model, tree.prompts, condition, SAMPLING, ranks=ranks)
            else:
                update(model, part, Parallel(ranks))
        else:
            none = tuple(torch.zeros_like(mask) for mask in kept)
            update(model, (tree, condition, advantages, none if rank == failing else kept), Parallel(ranks))
    except BranchGRPOError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    result = {"prompts": prompts_over_ranks(rank, size), "trees": trees_over_ranks(rank, size)}
    ranks = Ranks.of_group()
    for fault in ("rollout", "update", "nothing to train"):
        result[fault] = ranks.everyone(message(rank, size - 1, fault))  # type: ignore[assignment]
    if rank == 0:
        torch.save(result, folder / "result.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
