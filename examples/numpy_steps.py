"""Steps, rollouts and the objective in NumPy, written from spec/ alone; gradients are worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy_families import family_of
from numpy_plans import Data, diffusion, need, options_of, plan_of, real

Arrays = dict[str, np.ndarray]
DTYPES = {"float64": np.float64, "float32": np.float32}


def coefficients(p: SimpleNamespace, step: int) -> tuple[float, float]:
    """The mean is cx·x + cv·v: KERN-2 … KERN-4 with KERN-1 put in."""
    kernel, sigma, after = p.effective[step], p.sigmas[step], p.sigmas[step + 1]
    delta = sigma - after
    if kernel["kind"] == "cps":
        kept = after * math.cos(kernel["eta"] * math.pi / 2)
        return (1 - after) + kept, -(1 - after) * sigma + kept * (1 - sigma)
    drift = 0.0
    if kernel["kind"] != "ode":
        drift = diffusion(kernel, sigma, p.sigmas[1]) ** 2 * delta / (2 * sigma)
    return 1 - drift, -delta - drift * (1 - sigma)


def stored(state: np.ndarray, dtype: str) -> np.ndarray:
    """A state rounded to the storage dtype (ROLL-5); bfloat16 is the upper half of a float32, to nearest even."""
    if dtype == "float64":
        return state.astype(np.float64)
    single = np.ascontiguousarray(state, dtype=np.float32)
    if dtype == "float32":
        return single.astype(np.float64)
    bits = single.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def transition(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation transition."""
    p, dtype = plan_of(a["plan"]), DTYPES[a["dtype"]]
    x, v = inputs["x"].astype(dtype), inputs["velocity"].astype(dtype)
    cx, cv = coefficients(p, a["step"])
    mean = cx * x + cv * v
    slopes = {"x_slope": np.full(x.shape, float(dtype(cx))), "velocity_slope": np.full(x.shape, float(dtype(cv)))}
    return {"mean": mean.astype(np.float64), "std": p.stds[a["step"]], "dtype": mean.dtype.name, **slopes}


def mixed(shared: np.ndarray, private: np.ndarray, spread: float) -> np.ndarray:
    """Branch noise, children along the second axis (NOISE-1, NOISE-2)."""
    if math.isinf(spread):
        return private
    h = math.hypot(1.0, spread)
    return (1 / h) * shared[:, None] + (spread / h) * private


def branch_noise(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation branch_noise."""
    dtype = DTYPES[a["dtype"]]
    found = mixed(inputs["shared"].astype(dtype), inputs["private"].astype(dtype), real(a["spread"], "spread"))
    return {"noise": found.astype(np.float64)}


def density(child: np.ndarray, mean: np.ndarray, std: float, reduction: str) -> np.ndarray:
    """Log-probability over the last axis (LOGP-1, LOGP-2, LOGP-5)."""
    z = (child.astype(np.float64) - mean.astype(np.float64)) / std
    terms = -z * z / 2 - math.log(std) - math.log(2 * math.pi) / 2
    return terms.sum(axis=-1) if reduction == "sum" else terms.mean(axis=-1)


def log_probability(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation log_probability."""
    child, mean = (inputs[name].reshape(len(inputs[name]), -1) for name in ("child", "mean"))
    return {"log_prob": density(stored(child, a["storage"]), stored(mean, a["dtype"]), a["std"], a["reduction"])}


def label_scale(a: Data) -> float:
    """Guidance on a model that is linear in the label (ROLL-4)."""
    return float(a["guidance"]["scale"]) if a["guidance"]["kind"] == "classifier_free" else 1.0


def velocity(model: Arrays, x: np.ndarray, sigma: float, labels: np.ndarray, scale: float) -> np.ndarray:
    """V = A x + b σ + c + g y d for states ``[prompts, nodes, D]``, in the dtype of the states."""
    weight, slope, bias, label = (model[name].astype(x.dtype) for name in ("weight", "sigma", "bias", "label"))
    y = labels.astype(x.dtype)[:, None, None]
    found: np.ndarray = x @ weight.T + sigma * slope + bias + scale * y * label
    need(bool(np.isfinite(found).all()), "velocity")
    return found


def model_of(inputs: Arrays, name: str) -> Arrays:
    """Weights of a linear model by their prefix."""
    return {part: inputs[f"{name}.{part}"] for part in ("weight", "sigma", "bias", "label")}


def grow(p: SimpleNamespace, a: Data, inputs: Arrays) -> Data:
    """States, means, stds and log-probabilities of all trees (ROLL-1 … ROLL-6)."""
    prompts, latent, dtype = len(a["prompts"]), a["latent"], DTYPES[a["dtype"]]
    need(len(inputs["labels"]) == prompts, "len(condition)")

    def drawn(role: str, depth: int) -> np.ndarray:
        return inputs[f"noise.{role}.{depth}"].reshape(prompts, -1, math.prod(latent)).astype(dtype)

    def shaped(level: np.ndarray) -> np.ndarray:
        return level.astype(np.float64).reshape(prompts, -1, *latent)

    states, found = stored(drawn("root", 0), a["storage"]), {"stds": np.array(p.stds)}
    found["states.0"] = shaped(states)
    for i, factor in enumerate(p.branching):
        x = states.astype(dtype)
        v = velocity(model_of(inputs, "model"), x, p.sigmas[i], inputs["labels"], label_scale(a))
        cx, cv = coefficients(p, i)
        mean = np.repeat(cx * x + cv * v, factor, axis=1)
        made = mean
        if p.stds[i] > 0:
            own = drawn("private", i + 1)
            if factor > 1:
                rows = own.reshape(-1, factor, own.shape[-1])
                own = mixed(drawn("shared", i).reshape(len(rows), -1), rows, p.spreads[i]).reshape(own.shape)
            made = mean + p.stds[i] * own
        states = stored(made, a["storage"])
        found |= {f"states.{i + 1}": shaped(states), f"means.{i + 1}": shaped(mean)}
        if p.stds[i] > 0:
            found[f"log_probs.{i + 1}"] = density(states, mean, p.stds[i], a["reduction"])
    return found


def rollout(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation rollout: one call a parent (PLAN-4)."""
    p = plan_of(a["plan"])
    return {**grow(p, a, inputs), "storage": a["storage"], "calls": len(a["prompts"]) * p.roots * sum(p.sizes[:-1])}


def singular_rollout(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation singular_rollout, each member by itself."""
    f, found, calls = family_of(a["family"]), {}, 0
    for (k, g), (_, data) in f.members.items():
        p = plan_of(data)
        calls += len(a["prompts"]) * p.roots * sum(p.sizes[:-1])
        found |= {f"{k}.{g}.{name}": array for name, array in grow(p, a, inputs).items()}
    return {**found, "members": sorted([k, g] for k, g in f.members), "calls": calls}


def trained_of(p: SimpleNamespace, inputs: Arrays, t: int, prompt: int, root: int) -> dict[int, np.ndarray]:
    """Indices, in their level, of the edges in E of one tree, by child depth (OBJ-3)."""
    found = {}
    for depth in (step + 1 for step in p.trainable):
        size = p.sizes[depth]
        mask = inputs[f"kept.{t}.{depth}"][prompt, root * size : (root + 1) * size]
        if mask.any():
            found[depth] = root * size + np.flatnonzero(mask)
    need(bool(found), "trained edges")
    return found


def policy_means(
    p: SimpleNamespace, depth: int, x: np.ndarray, model: Arrays, label: np.ndarray, scale: float
) -> np.ndarray:
    """Transition means of a policy at stored parents ``[edges, D]``."""
    cx, cv = coefficients(p, depth - 1)
    found: np.ndarray = cx * x + cv * velocity(model, x[None], p.sigmas[depth - 1], label, scale)[0]
    return found


def objective(a: Data, inputs: Arrays) -> Data:
    """J and its gradient by the model's weights (OBJ-1 … OBJ-8)."""
    o, plans = options_of("objective", a["objective"]), [plan_of(p) for p in a["plans"]]
    need(len(inputs["labels"]) == len(a["prompts"]), "len(condition)")
    need(a["frozen"] == (o.kl > 0), "reference_model")
    trees = [
        (t, p, prompt, trained_of(p, inputs, t, prompt, root))
        for t, p in enumerate(plans) for prompt in range(len(a["prompts"])) for root in range(p.roots)
    ]  # fmt: skip
    weights = edge_weights(trees, o)
    gradient = {name: np.zeros(w.shape) for name, w in model_of(inputs, "model").items()}
    value = 0.0
    for t, p, prompt, edges in trees:
        total = sum(len(rows) for rows in edges.values())
        for depth, rows in edges.items():
            share = 1 / total if o.reduction == "edge_mean" else 1 / (len(edges) * len(rows))
            tree = SimpleNamespace(t=t, p=p, prompt=prompt, depth=depth, rows=rows)
            terms, parts = edge_terms(a, o, inputs, tree, weights[p.sigmas[depth - 1], p.stds[depth - 1]])
            value += share * float(terms.sum()) / len(trees)
            for name, part in parts.items():
                gradient[name] += share * part / len(trees)
    found: Data = {"value": value, **{f"gradient.{name}": g for name, g in gradient.items()}}
    if a["frozen"]:
        found |= {f"frozen_gradient.{name}": np.zeros(g.shape) for name, g in gradient.items()}
    return found


def edge_weights(trees: list[Any], o: SimpleNamespace) -> dict[tuple[float, float], float]:
    """Weight of every distinct trained step, by its level and std (OBJ-6)."""
    steps = {(p.sigmas[depth - 1], p.stds[depth - 1]) for _, p, _, edges in trees for depth in edges}
    mean = sum(std for _, std in steps) / len(steps)
    return {step: step[1] / mean if o.edge_weights == "std" else 1.0 for step in steps}


def edge_terms(
    a: Data, o: SimpleNamespace, inputs: Arrays, tree: SimpleNamespace, weight: float
) -> tuple[np.ndarray, Arrays]:
    """Terms of one tree's edges of one depth, and the gradient of their sum."""
    p, depth, prompt, t = tree.p, tree.depth, tree.prompt, tree.t
    dtype, std, scale = DTYPES[a["dtype"]], p.stds[depth - 1], label_scale(a)
    parents = tree.rows // p.branching[depth - 1]
    x = inputs[f"states.{t}.{depth - 1}"][prompt, parents].reshape(len(parents), -1).astype(dtype)
    child = inputs[f"states.{t}.{depth}"][prompt, tree.rows].reshape(len(parents), -1)
    label = inputs["labels"][prompt : prompt + 1]
    mean = policy_means(p, depth, x, model_of(inputs, "model"), label, scale)
    advantage, old = (inputs[f"{name}.{t}.{depth}"][prompt, tree.rows] for name in ("advantages", "log_probs"))
    rho = np.exp(density(child, mean, std, a["reduction"]) - old)
    clipped = np.clip(rho, 1 - o.clip_low, 1 + o.clip_high) * advantage
    terms, open_ = weight * np.minimum(rho * advantage, clipped), rho * advantage <= clipped
    elements = 1 if a["reduction"] == "sum" else x.shape[1]
    by_mean = (weight * np.where(open_, rho * advantage, 0.0))[:, None] * (child - mean) / std**2 / elements
    if a["frozen"]:
        apart = mean - policy_means(p, depth, x, model_of(inputs, "frozen"), label, scale)
        terms = terms - o.kl * (apart**2).sum(axis=1) / (2 * std**2) / elements
        by_mean = by_mean - o.kl * apart / std**2 / elements
    by_velocity = coefficients(p, depth - 1)[1] * by_mean
    total = by_velocity.sum(axis=0)
    parts = {"weight": by_velocity.T @ x, "sigma": p.sigmas[depth - 1] * total, "bias": total}
    return terms, {**parts, "label": scale * label[0] * total}
