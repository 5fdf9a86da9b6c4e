"""All benchmarks: ``python benchmarks/run.py [--quick]`` writes results.json and results.md beside itself."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

os.environ["JAXTYPING_DISABLE"] = "1"  # read when the packages below are imported: shape checks cost 0.5 ms a call

import cases
import torch
from measure import Paired, keep_freed_memory
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
        "keeps_freed_memory": keep_freed_memory(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_lines() -> list[str]:
    """Lines of /proc/cpuinfo, where there is one."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def number(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


class Details:
    """The spread behind every ratio, by what was measured."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def ratio(self, name: str, found: Paired) -> float:
        """The ratio, its details noted."""
        self.rows[name] = found.summary()
        return self.rows[name]["ratio"]


def rollouts(pairs: int, quick: bool, details: Details) -> dict[str, dict[str, float]]:
    """``rollout_over_bare``: by tokens × prompts and by source of noise."""
    result = {}
    for size in cases.SIZES:
        if not quick or size != "1024x4":
            found = cases.rollout_over_bare(size, pairs, quick)
            result[size] = {noise: details.ratio(f"rollout {size} {noise}", one) for noise, one in found.items()}
    return result


def tasks(pairs: int, quick: bool, details: Details) -> dict[str, Callable[[], object]]:
    """Every key of the results and what measures it."""
    trained = ("64x1", "64x4") if quick else ("64x1", "64x4", "1024x1")
    pruned = ("branchgrpo-widpru", "branchgrpo-deppru-5")
    counts = [(tokens, prompts) for prompts in (1, 4, 16) for tokens in (64, 1024) if not quick or tokens == 64]

    def per_node() -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = {}
        for tokens, prompts in counts:
            found = cases.speedup_over_per_node(tokens, prompts, pairs)
            ratio = details.ratio(f"per node {tokens}x{prompts}", found)
            result.setdefault(str(prompts), {})[str(tokens)] = ratio
        return result

    def exponent() -> float:
        seconds = cases.tail_seconds(pairs)
        details.rows["tail"] = {f"seconds at {leaves} leaves": number(s) for leaves, s in seconds.items()}
        return number(cases.tail_exponent(seconds))

    def loop() -> float:
        found = cases.train_loop_over_parts(min(pairs, 8))
        details.rows["training loop"] = found
        return found["ratio"]

    return {
        "rollout_over_bare": lambda: rollouts(pairs, quick, details),
        "train_over_bare": lambda: {
            size: details.ratio(f"train {size}", cases.train_over_bare(size, pairs, quick)) for size in trained
        },
        "pruned_over_full": lambda: {
            name: details.ratio(f"pruned {name}", cases.pruned_over_full("64x4", name, pairs)) for name in pruned
        },
        "speedup_over_per_node": per_node,
        "reference_over_optimized": lambda: details.ratio(
            "reference 64x1", cases.reference_over_optimized(64, pairs, quick)
        ),
        "tail_exponent": exponent,
        "tail_share": lambda: {str(n): number(cases.tail_share(n, pairs)) for n in ((64,) if quick else (64, 1024))},
        "train_loop_over_parts": loop,
        "stored_over_ideal_bytes": cases.stored_over_ideal_bytes,
        "calls": lambda: {name: cases.calls(name) for name in cases.PRESETS},
    }


def measure(pairs: int, quick: bool, partial: Path) -> dict[str, object]:
    """Every key of the results; each is written down as soon as it is measured, and not measured again.

    A run that was broken off goes on where it stopped, on the same machine, the same day and with the same settings.
    """
    where = machine()
    settings = {"quick": quick, "pairs": pairs, **{name: where[name] for name in ("date", "cpu", "torch")}}
    results: dict[str, object] = {"machine": where, "quick": quick, "pairs": pairs}
    details = Details()
    if partial.exists():
        found = json.loads(partial.read_text())
        if found["settings"] == settings:
            results, details.rows = found["results"], found["results"]["details"]
    todo = {name: task for name, task in tasks(pairs, quick, details).items() if name not in results}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        for name, task in todo.items():
            progress.update(bar, description=name)
            results[name] = task()
            results["details"] = details.rows
            partial.write_text(json.dumps({"settings": settings, "results": results}))
            progress.advance(bar)
    return results


def ratio_rows(results: dict) -> list[tuple[str, float, float | None]]:
    """(what, measured, limit) of every ratio."""
    rows: list[tuple[str, float, float | None]] = []
    for size, by_noise in results["rollout_over_bare"].items():
        for noise, ratio in by_noise.items():
            limit = LIMITS["rollout_over_bare"][size.split("x")[0]][noise]  # type: ignore[index]
            rows.append((f"rollout over bare calls, {size}, {noise} noise", ratio, limit))
    for size, ratio in results["train_over_bare"].items():
        rows.append((f"update over bare forward and backward, {size}", ratio, LIMITS["train_over_bare"]))
    for name, ratio in results["pruned_over_full"].items():
        rows.append((f"pruned over full update, {name}, 64x4", ratio, LIMITS["pruned_over_full"]))
    for prompts, by_tokens in results["speedup_over_per_node"].items():
        for tokens, ratio in by_tokens.items():
            rows.append((f"per-node over batched rollout, {tokens}x{prompts} (at least)", ratio, 1.0))
    rows.append(("reference over batched rollout, 64x1", results["reference_over_optimized"], None))
    rows.append(("tail, exponent from 16,384 to 65,536 leaves", results["tail_exponent"], LIMITS["tail_exponent"]))
    for tokens, share in results["tail_share"].items():
        rows.append((f"tail over rollout, {tokens} tokens", share, LIMITS["tail_share"][tokens]))  # type: ignore[index]
    loop_limit = LIMITS["train_loop_over_parts"]
    rows.append(("training loop over its parts, tiny FLUX (wall time)", results["train_loop_over_parts"], loop_limit))
    bytes_limit = LIMITS["stored_over_ideal_bytes"]
    rows.append(("stored over ideal bytes", results["stored_over_ideal_bytes"], bytes_limit))
    return rows


def table(results: dict) -> str:
    """The results as Markdown."""
    where = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, {where['threads']} thread(s), "
        f"load {where['load']} at the start, torch {where['torch']}, freed memory "
        f"{'kept' if where['keeps_freed_memory'] else 'returned to the system'}; "
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
    parser.add_argument("--quick", action="store_true", help="fewer pairs and smaller plans")
    parser.add_argument("--pairs", type=int, help="interleaved pairs a ratio (15; 5 with --quick)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.md")
    options = parser.parse_args(arguments)
    pairs = options.pairs or (5 if options.quick else 15)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    partial = options.out / "results.partial.json"
    results = measure(pairs, options.quick, partial)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "results.md").write_text(table(results))
    partial.unlink()
    Console().print(table(results), markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
