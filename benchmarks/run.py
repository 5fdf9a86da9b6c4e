"""All benchmarks: ``python benchmarks/run.py [--quick]`` writes results.json and results.md beside itself."""

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

os.environ["JAXTYPING_DISABLE"] = "1"  # read when the packages below are imported: shape checks cost 0.5 ms a call

import cases
import torch
from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).parent
LIMITS = {
    "rollout_over_bare": {"64": {"fast": 1.08, "keyed": 1.12}, "1024": {"fast": 1.03, "keyed": 1.08}},
    "train_over_bare": 1.08,
    "pruned_over_full": 0.66,
    "tail_exponent": 1.15,
    "tail_share": {"64": 0.01, "1024": 0.001},
    "train_loop_over_parts": 1.03,
    "stored_over_ideal_bytes": 1.05,
}


def machine() -> dict[str, object]:
    """Where and when, for a reader who compares."""
    names = [line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_lines() -> list[str]:
    """Lines of /proc/cpuinfo, where there is one."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def measure(pairs: int, quick: bool) -> dict[str, object]:
    """Every key of the results."""
    results: dict[str, object] = {}
    sizes = [size for size in cases.SIZES if not quick or size != "1024x4"]
    tasks = {
        "rollout_over_bare": lambda: {
            size: {noise: cases.rollout_over_bare(size, noise, pairs, quick) for noise in ("fast", "keyed")}
            for size in sizes
        },
        "train_over_bare": lambda: {size: cases.train_over_bare(size, pairs, quick) for size in sizes},
        "pruned_over_full": lambda: {
            name: cases.pruned_over_full("64x1", name, pairs) for name in ("branchgrpo-widpru", "branchgrpo-deppru-5")
        },
        "speedup_over_per_node": lambda: {
            f"{tokens}x{prompts}": cases.speedup_over_per_node(tokens, prompts, pairs, quick)
            for tokens in (64, 1024)
            for prompts in (1, 4, 16)
            if not quick or tokens * prompts <= 1024
        },
        "reference_over_optimized": lambda: cases.reference_over_optimized(64, pairs, quick),
        "tail_exponent": lambda: cases.tail_exponent(pairs),
        "tail_share": lambda: {str(n): cases.tail_share(n, pairs) for n in ((64,) if quick else (64, 1024))},
        "train_loop_over_parts": lambda: cases.train_loop_over_parts(min(pairs, 8)),
        "stored_over_ideal_bytes": cases.stored_over_ideal_bytes,
        "calls": lambda: {name: cases.calls(name) for name in cases.PRESETS},
    }
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(tasks))
        for name, task in tasks.items():
            progress.update(bar, description=name)
            results[name] = task()
            progress.advance(bar)
    return results


def ratio_rows(results: dict) -> list[tuple[str, float, float | None]]:
    """(what, measured, limit) of every ratio."""
    rows: list[tuple[str, float, float | None]] = []
    for size, by_noise in results["rollout_over_bare"].items():
        for noise, entry in by_noise.items():
            limit = LIMITS["rollout_over_bare"][size.split("x")[0]][noise]  # type: ignore[index]
            rows.append((f"rollout over bare calls, {size}, {noise} noise", entry["ratio"], limit))
    for size, entry in results["train_over_bare"].items():
        rows.append((f"update over bare forward and backward, {size}", entry["ratio"], 1.08))
    for name, entry in results["pruned_over_full"].items():
        rows.append((f"pruned over full update, {name}", entry["ratio"], 0.66))
    for size, entry in results["speedup_over_per_node"].items():
        rows.append((f"per-node over batched rollout, {size} (at least)", entry["ratio"], 1.0))
    rows.append(("reference over batched rollout, 64x1", results["reference_over_optimized"]["ratio"], None))
    rows.append(("tail, exponent from 16,384 to 65,536 leaves", results["tail_exponent"]["exponent"], 1.15))
    for tokens, share in results["tail_share"].items():
        rows.append((f"tail over rollout, {tokens} tokens", share, LIMITS["tail_share"][tokens]))  # type: ignore[index]
    rows.append(("training loop over its parts, tiny FLUX", results["train_loop_over_parts"]["ratio"], 1.03))
    rows.append(("stored over ideal bytes", results["stored_over_ideal_bytes"], 1.05))
    return rows


def table(results: dict) -> str:
    """The results as Markdown."""
    where = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, {where['threads']} thread(s), "
        f"load {where['load']} at the start, torch {where['torch']}; "
        f"median CPU time of {results['pairs']} interleaved pairs"
        f"{', reduced plans' if results['quick'] else ''}.",
        "",
        "| quantity | measured | limit |",
        "|---|---|---|",
    ]
    for name, value, limit in ratio_rows(results):
        lines.append(f"| {name} | {value:.4g} | {'–' if limit is None else limit} |")
    lines += ["", "| preset | calls a prompt, public code | ours |", "|---|---|---|"]
    lines += [f"| {name} | {public or '–'} | {ours} |" for name, (public, ours) in results["calls"].items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, write, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs and smaller plans: minutes, not an hour")
    parser.add_argument("--pairs", type=int, help="interleaved pairs a ratio (15; 5 with --quick)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.md")
    options = parser.parse_args(arguments)
    pairs = options.pairs or (5 if options.quick else 15)
    torch.set_num_threads(1)
    results = {"machine": machine(), "quick": options.quick, "pairs": pairs, **measure(pairs, options.quick)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "results.md").write_text(table(results))
    Console().print(table(results), markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
