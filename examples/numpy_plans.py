"""Plans, options and keys in NumPy, written from spec/ alone: the first half of a second implementation.

Everything here takes the plain data of a test vector and answers with plain data, or refuses by the field at fault.
"""

import math
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

Data = dict[str, Any]
ODE = {"kind": "ode", "eta": 0.0}
LARGEST_ETA = {"ode": 0.0, "sde": math.inf, "flow_sde": math.inf, "cps": 1.0}
ROLES = {"root": 0, "shared": 1, "private": 2, "subset": 3, "window": 4}


class Refused(Exception):
    """Bad input, by the field at fault (ERR-1)."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(field)


def refuse(field: str) -> NoReturn:
    """Refuse bad input."""
    raise Refused(field)


def need(holds: bool, field: str) -> None:
    """Refuse bad input unless it holds."""
    if not holds:
        refuse(field)


def whole(value: Any, least: int, field: str, most: float = math.inf) -> int:
    """An integer in a range."""
    need(type(value) is int and least <= value <= most, field)
    return int(value)


def real(value: Any, field: str) -> float:
    """A number, or the string inf."""
    need(value == "inf" or type(value) in (int, float), field)
    return math.inf if value == "inf" else float(value)


def kernel_of(data: Data, where: str = "kernel") -> Data:
    """A kernel whose η is in its range (KERN-2 … KERN-4)."""
    need(data["kind"] in LARGEST_ETA, f"{where}.kind")
    eta = real(data["eta"], f"{where}.eta")
    need(math.isfinite(eta) and 0 <= eta <= LARGEST_ETA[data["kind"]], "kernel.eta")
    return {"kind": data["kind"], "eta": eta}


def check_sigmas(sigmas: list[float]) -> None:
    """SCHED-1."""
    need(len(sigmas) >= 2, "sigmas")
    need(sigmas[0] == 1.0, "sigmas[0]")
    need(sigmas[-1] == 0.0, f"sigmas[{len(sigmas) - 1}]")
    for i in range(1, len(sigmas)):
        need(sigmas[i] < sigmas[i - 1], f"sigmas[{i}]")


def std_of(kernel: Data, sigma: float, after: float, second: float) -> float:
    """The std of a step (KERN-3 … KERN-5)."""
    if kernel["eta"] == 0.0:
        return 0.0
    if kernel["kind"] == "cps":
        return after * math.sin(kernel["eta"] * math.pi / 2)
    return diffusion(kernel, sigma, second) * math.sqrt(sigma - after)


def diffusion(kernel: Data, sigma: float, second: float) -> float:
    """G of KERN-3."""
    if kernel["kind"] == "sde":
        return float(kernel["eta"])
    return float(kernel["eta"]) * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))


def plan_of(data: Data) -> SimpleNamespace:
    """A plan with what follows from it (PLAN-1 … PLAN-7)."""
    p = SimpleNamespace(**data)
    p.sigmas = [real(s, f"sigmas[{i}]") for i, s in enumerate(p.sigmas)]
    p.spreads = [real(s, f"spreads[{i}]") for i, s in enumerate(p.spreads)]
    check_sigmas(p.sigmas)
    p.steps = len(p.sigmas) - 1
    for name in ("kernels", "branching", "spreads"):
        need(len(data[name]) == p.steps, f"len({name})")
    p.kernels = [kernel_of(k, f"kernels[{i}]") for i, k in enumerate(p.kernels)]
    need(p.output in ("sample", "denoised"), "output")
    whole(p.roots, 1, "roots")
    p.effective = [*p.kernels[:-1], ODE] if p.output == "denoised" else p.kernels
    p.stds = [std_of(k, a, b, p.sigmas[1]) for k, a, b in zip(p.effective, p.sigmas, p.sigmas[1:], strict=False)]
    p.stochastic = [i for i in range(p.steps) if p.stds[i] > 0]
    p.sizes = [1]
    for i, factor in enumerate(p.branching):
        whole(factor, 1, f"branching[{i}]")
        need(factor == 1 or i in p.stochastic, f"branching[{i}]")
        need(p.spreads[i] >= 0, f"spreads[{i}]")
        p.sizes.append(p.sizes[-1] * factor)
    p.leaves, p.splits = p.sizes[-1], [i for i, k in enumerate(p.branching) if k > 1]
    named = p.stochastic if p.trained_steps is None else p.trained_steps
    for i, step in enumerate(named):
        need(step in p.stochastic and step not in named[:i], f"trained_steps[{i}]")
    p.trainable = [i for i in p.stochastic if i in named]
    shared = any(p.sizes[i + 1] < p.leaves for i in p.trainable)
    need(0 < p.trained_fraction <= 1, "trained_fraction")
    need(p.trained_fraction == 1 or (bool(p.trainable) and not shared), "trained_fraction")
    return p


def plan(a: Data) -> Data:
    """Answer of the operation plan."""
    p = plan_of(a["plan"])
    return {
        "deltas": [x - y for x, y in zip(p.sigmas, p.sigmas[1:], strict=False)],
        "level_sizes": p.sizes,
        "kernels": [k["kind"] for k in p.effective],
        "stds": p.stds,
        "splits": p.splits,
        "stochastic_steps": p.stochastic,
        "trainable_steps": p.trainable,
    }


def schedule(a: Data) -> Data:
    """SCHED-2."""
    steps, s = whole(a["steps"], 1, "steps"), real(a["shift"], "shift")
    need(math.isfinite(s) and s > 0, "shift")
    levels = [(steps - i) / steps for i in range(steps + 1)]
    return {"sigmas": [s * u / (1 + (s - 1) * u) for u in levels]}


def splits(a: Data) -> Data:
    """PLAN-2."""
    for i, step in enumerate(a["splits"]):
        whole(step, 0, f"splits[{i}]", a["steps"] - 1)
        need(step not in a["splits"][:i], f"splits[{i}]")
    return {"branching": [a["factor"] if i in a["splits"] else 1 for i in range(a["steps"])]}


def one_of(*values: Any) -> Any:
    """A test that a value is one of some."""
    return lambda v: v in values


def at_least(low: float, *, open_low: bool = False) -> Any:
    """A test that a number is finite and in a range."""
    return lambda v: v != "inf" and (v > low if open_low else v >= low)


def count(v: Any) -> bool:
    """An integer of at least one."""
    return type(v) is int and v >= 1


RULES: dict[str, dict[str, Any]] = {
    "kernel": {"kind": one_of(*LARGEST_ETA), "eta": at_least(0)},
    "fusion": {"kind": one_of("path_softmax", "child_softmax", "standardised"), "beta": at_least(0)},
    "normalization": {
        "mean_scope": one_of("tree", "prompt"),
        "std_scope": one_of("tree", "prompt", "batch"),
        "bessel": one_of(True, False),
        "eps": at_least(0),
        "clip": lambda v: v == "inf" or v > 0,
        "order": one_of("normalize_then_sum", "sum_then_normalize"),
    },
    "objective": {
        "clip_low": at_least(0, open_low=True),
        "clip_high": at_least(0, open_low=True),
        "reduction": one_of("edge_mean", "depth_mean"),
        "edge_weights": one_of("uniform", "std"),
        "kl": at_least(0),
    },
    "parent_top1": {"drop_split_edges": one_of(True, False)},
    "extreme_b": {"b": count, "drop_split_edges": one_of(True, False)},
    "depth_window": {
        "start": count,
        "size": count,
        "period": count,
        "direction": one_of(1, -1),
        "stop": lambda v: v is None or count(v),
    },
    "window": {
        "size": count,
        "last": lambda v: type(v) is int,
        "stride": count,
        "period": count,
        "order": one_of("progressive", "random"),
        "decay": one_of("constant", "linear", "exponential"),
        "rate": at_least(0),
        "threshold": lambda v: type(v) is int,
        "end": one_of("stay", "stop", "wrap"),
    },
}
"""Kind of options → name → what is allowed (PLAN-8, ERR-5)."""


def options_of(kind: str, data: Data) -> SimpleNamespace:
    """Options, each in its range, none unknown."""
    for name in data.keys() ^ RULES[kind].keys():
        refuse(f"{kind}.{name}")
    for name, value in data.items():
        need(bool(RULES[kind][name](value)), f"{kind}.{name}")
    if kind == "window":
        need(data["stride"] <= data["size"], "window.stride")
        need(data["last"] >= data["size"] - 1, "window.last")
    return SimpleNamespace(**{name: math.inf if value == "inf" else value for name, value in data.items()})


def options(a: Data) -> Data:
    """Answer of the operation options: what was accepted."""
    options_of(a["kind"], a["options"])
    return {"options": a["options"]}


def depth_window_at(rule: SimpleNamespace, steps: int, iteration: int) -> range:
    """PRUNE-5."""
    whole(iteration, 0, "iteration")
    stop = rule.stop or (steps if rule.direction == 1 else 1)
    need(rule.start <= steps, "depth_window.start")
    need(stop <= steps, "depth_window.stop")
    leading = rule.start + rule.size - 1 if rule.direction == 1 else rule.start
    room = rule.direction * (stop - leading)
    need(room >= 0, "depth_window.stop")
    first = rule.start + rule.direction * min(iteration // rule.period, room)
    return range(max(first, 1), min(first + rule.size - 1, steps) + 1)


def depth_window(a: Data) -> Data:
    """Answer of the operation depth_window."""
    return {"depths": list(depth_window_at(options_of("depth_window", a["rule"]), a["steps"], a["iteration"]))}


def generator_of(
    seed: int, iteration: int, role: str, prompt: int = 0, root: int = 0, depth: int = 0, node: int = 0
) -> np.random.Generator:
    """The generator of a key (NOISE-4)."""
    parts = {"seed": (seed, 64), "iteration": (iteration, 64), "prompt": (prompt, 63), "root": (root, 32),
             "depth": (depth, 24), "node": (node, 63)}  # fmt: skip
    for name, (value, bits) in parts.items():
        whole(value, 0, f"noise key {name}", 2**bits - 1)
    counter = np.array([0, prompt, ROLES[role] * 2**56 + depth * 2**32 + root, node], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, iteration], dtype=np.uint64), counter=counter))


def noise(a: Data) -> Data:
    """Words and numbers of a key."""
    key = [int(a[name]) for name in ("seed", "iteration")]
    place = [int(a[name]) for name in ("prompt", "root", "depth", "node")]
    words = generator_of(key[0], key[1], a["role"], *place).bit_generator.random_raw(4)
    draw = generator_of(key[0], key[1], a["role"], *place).standard_normal(a["shape"])
    return {"words": [str(word) for word in words.tolist()], "draw": draw}


def window_at(w: SimpleNamespace, iteration: int, seed: int) -> tuple[list[int], list[int]]:
    """First steps of the positions, and the window of an iteration (WIN-2, WIN-4 … WIN-6)."""
    whole(iteration, 0, "iteration")
    final = w.last - w.size + 1
    starts = [*range(0, final, w.stride), final]
    if w.order == "random":
        drawn = generator_of(seed, iteration // w.period, "window").integers(len(starts))
        return starts, list(range(starts[drawn], starts[drawn] + w.size))
    linear = {l: w.period * (1 - l / (w.last + 1)) for l in starts}  # noqa: E741 - the specification's letter
    falling = {l: w.period * math.exp(-w.rate * max(0, l - w.threshold)) for l in starts}  # noqa: E741
    by_decay = {"constant": dict.fromkeys(starts, w.period), "linear": linear, "exponential": falling}[w.decay]
    spent = [start for start in starts for _ in range(max(1, round(by_decay[start])))]
    if iteration >= len(spent) and w.end == "stop":
        return starts, []
    start = spent[iteration % len(spent) if w.end == "wrap" else min(iteration, len(spent) - 1)]
    return starts, list(range(start, start + w.size))


def window(a: Data) -> Data:
    """Answer of the operation window."""
    starts, steps = window_at(options_of("window", a["window"]), a["iteration"], a["seed"])
    return {"starts": starts, "steps": steps}


def windowed_plan(a: Data) -> Data:
    """The plan of an iteration (WIN-1, WIN-3)."""
    p, w = plan_of(a["plan"]), options_of("window", a["window"])
    need(a["group"] == 1 or not p.splits, "group")
    need(w.last == max(p.trainable, default=-1), "window.last")
    inside = window_at(w, a["iteration"], a["seed"])[1]
    noisy = {*inside, *p.splits}
    need(any(i in noisy for i in p.stochastic), "window")
    found = {**a["plan"], "kernels": [k if i in noisy else ODE for i, k in enumerate(a["plan"]["kernels"])]}
    if p.trained_steps is not None:
        found["trained_steps"] = [i for i in p.trained_steps if i in noisy]
    if a["group"] > 1:
        found["branching"] = [a["group"] if i == inside[0] else 1 for i in range(p.steps)]
        found["spreads"] = ["inf"] * p.steps
    return {"plan": found}


def step_weights(a: Data) -> Data:
    """OBJ-6."""
    mean = sum(a["stds"]) / len(a["stds"])
    return {"weights": [std / mean if a["weighting"] == "std" else 1.0 for std in a["stds"]]}
