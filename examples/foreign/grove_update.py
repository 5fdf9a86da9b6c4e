"""grove: what follows the growing of a tree: worths, advantages, pruning and the objective; plain Python on its nodes.

Written from spec/ and conformance/ADAPTERS.md alone, as grove.py was.
"""

import math

import numpy as np
import torch
from examples.foreign.grove import ask, floors, gauss

TIE = 2.0**-40
"""Relative spread up to which numbers count as equal."""

ROOT, SHARED, PRIVATE, SUBSET, WINDOW = range(5)
"""Roles of the random numbers."""


# ---- fusing ----------------------------------------------------------------------------------------------------------
def alike(numbers):
    """Whether numbers are equal to rounding."""
    return len(numbers) < 2 or max(numbers) - min(numbers) <= TIE * max(abs(n) for n in numbers)


def softmax(scores):
    """Weights that sum to 1."""
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    total = math.fsum(powers)
    return [p / total for p in powers]


def path_scores(node):
    """Log-probabilities of the paths from a node to its leaves."""
    if not node.kids:
        return [0.0]
    return [s + (0.0 if kid.lp is None else float(kid.lp)) for kid in node.kids for s in path_scores(kid)]


def shares(node, kind, beta):
    """Weight of every leaf under a node."""
    count = len(node.leaves())
    if count == 1:
        return [1.0]
    if beta == 0.0 or kind == "uniform":
        return [1.0 / count] * count
    if kind == "child_softmax":
        own = softmax([0.0 if kid.lp is None else beta * float(kid.lp) for kid in node.kids])
        return [w * s for w, kid in zip(own, node.kids, strict=True) for s in shares(kid, kind, beta)]
    scores = path_scores(node)
    if kind == "standardised":
        if alike(scores):
            return [1.0 / count] * count
        middle = math.fsum(scores) / count
        width = math.sqrt(math.fsum((s - middle) ** 2 for s in scores) / count)
        scores = [(s - middle) / width for s in scores]
    elif kind != "path_softmax":
        raise ValueError(f"fusion = {kind!r}: must be path_softmax, child_softmax or standardised")
    return softmax([beta * s for s in scores])


def fuse(root, rewards, kind, beta):
    """A worth for every node, by one reward a leaf."""
    leaves = root.leaves()
    if len(rewards) != len(leaves):
        raise ValueError(f"rewards: {len(rewards)} numbers: must be {len(leaves)}, one a leaf")
    for i, (leaf, reward) in enumerate(zip(leaves, rewards, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward of leaf {i} = {reward}: must be finite")
        leaf.worth = float(reward)
    for floor in reversed(floors(root)):
        for node in floor:
            under = [leaf.worth for leaf in node.leaves()]
            if len(under) == 1:
                node.worth = under[0]
            else:
                node.worth = math.fsum(w * r for w, r in zip(shares(node, kind, beta), under, strict=True))


# ---- normalizing -----------------------------------------------------------------------------------------------------


def zscores(numbers, middle_of, width_of, bessel, eps):
    """Standard scores of some numbers against two groups of numbers."""
    if alike(middle_of) or alike(width_of):
        return [0.0] * len(numbers)
    middle = math.fsum(middle_of) / len(middle_of)
    centre = math.fsum(width_of) / len(width_of)
    width = math.sqrt(math.fsum((n - centre) ** 2 for n in width_of) / (len(width_of) - bool(bessel)))
    return [(n - middle) / (width + eps) for n in numbers]


def raw_advantages(table, weights, options):
    """Unclipped advantages ``[prompts][roots][nodes]`` of one depth; ``table[p][r][n]`` has one number a reward."""
    if not weights or not all(math.isfinite(w) for w in weights) or not any(weights):
        raise ValueError(f"weights = {tuple(weights)}: must be finite reals, one a reward model, not all 0")
    if any(len(cell) != len(weights) for p in table for r in p for cell in r):
        raise ValueError(f"weights = {tuple(weights)}: must be one a reward model")
    if options.order == "sum_then_normalize":
        table = [[[[math.fsum(w * c for w, c in zip(weights, n, strict=True))] for n in r] for r in p] for p in table]
        weights = [1.0]
    out = [[[0.0] * len(r) for r in p] for p in table]
    for m, w in enumerate(weights):
        layer = [[[n[m] for n in r] for r in p] for p in table]
        batch = [n for p in layer for r in p for n in r]
        for i, p in enumerate(layer):
            prompt = [n for r in p for n in r]
            for j, tree in enumerate(p):
                groups = {"tree": tree, "prompt": prompt, "batch": batch}
                zs = zscores(tree, groups[options.mean_scope], groups[options.std_scope], options.bessel, options.eps)
                out[i][j] = [a + w * z for a, z in zip(out[i][j], zs, strict=True)]
    return out


def clip(a, limit):
    """A number kept within ±limit."""
    return max(-limit, min(limit, a))


# ---- pruning ---------------------------------------------------------------------------------------------------------


def window(rule, last, iteration):
    """Child depths that a depth window drops at an iteration."""
    way = rule.direction
    stop = (last if way > 0 else 1) if rule.stop is None else rule.stop
    for name, value in (("start", rule.start), ("stop", stop)):
        if not 1 <= value <= last:
            raise ValueError(f"depth_window.{name} = {value}: must be in 1..{last}")
    if rule.size < 1 or rule.period < 1:
        raise ValueError(f"depth_window.size, period = {rule.size}, {rule.period}: must be at least 1")
    leading = rule.start + rule.size - 1 if way > 0 else rule.start
    most = way * (stop - leading)
    if most < 0:
        raise ValueError(f"depth_window.start = {rule.start}: must not lead past stop = {stop}")
    first = rule.start + way * min(iteration // rule.period, most)
    return {d for d in range(first, first + rule.size) if 1 <= d <= last}


def prune(root, keys, rules, iteration):
    """Nodes whose edge stays in the loss. ``rules`` are told apart by what they have."""
    levels = floors(root)
    last = len(levels) - 1
    leaves = root.leaves()
    if len(keys) != len(leaves):
        raise ValueError(f"keys: {len(keys)} numbers: must be {len(leaves)}, one a leaf")
    rank = {id(leaves[i]): n for n, i in enumerate(sorted(range(len(leaves)), key=lambda i: (-keys[i], i)))}
    splits = [d for d in range(last) if len(levels[d][0].kids) > 1]
    gone = set()
    for rule in rules:
        if hasattr(rule, "period"):
            gone |= {id(n) for d in window(rule, last, iteration) for n in levels[d]}
            continue
        if not splits:
            raise ValueError("pruning = a width rule: must have a plan with a split")
        if hasattr(rule, "b"):
            stay = {i for i, n in rank.items() if n < rule.b or n >= len(leaves) - rule.b}
        else:
            stay = {min((id(leaf) for leaf in node.leaves()), key=rank.get) for node in levels[splits[-1]]}
        top = splits[-1] + (1 if rule.drop_split_edges else 2)
        for leaf in leaves:
            if id(leaf) not in stay:
                gone |= {id(n) for n in leaf.ancestry() if n.depth >= top}
    return [n for level in levels[1:] for n in level if id(n) not in gone]


def dice_of_key(seed, iteration, prompt=0, root=0, role=ROOT, depth=0, node=0):
    """A NumPy generator that depends on a key alone."""
    counter = np.array([0, prompt, (role << 56) + (depth << 32) + root, node], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=np.array([seed, iteration], dtype=np.uint64)))


def subset(trainable, fraction, dice):
    """Steps that one chain trains."""
    if fraction >= 1.0:
        return set(trainable)
    size = max(1, math.floor(fraction * len(trainable)))
    return {int(s) for s in dice.choice(sorted(trainable), size, replace=False)}


# ---- updating --------------------------------------------------------------------------------------------------------


def tree_terms(tree, model, how, low, high, weight, kl, frozen):
    """(depth, surrogate, kl) of every edge in the loss; nodes carry ``lp``, ``adv`` and ``kept``."""
    root, steps, trained, condition, arith, prompt = tree
    for floor in floors(root)[:-1]:
        for node in floor:
            hop = steps[node.depth]
            kids = [kid for kid in node.kids if kid.kept]
            if node.depth not in trained or not kids:
                continue
            x = node.x.to(arith)
            where = f"step {node.depth}, node {node.slot} of prompt {prompt}"
            mu = hop.mean(x, ask(model, x, hop.s, condition, where))
            extra = None
            if kl:
                with torch.no_grad():
                    base = hop.mean(x, ask(frozen, x, hop.s, condition, where))
                gap = (mu.double() - base.double()).square()
                extra = (gap.sum() if how == "sum" else gap.mean()) / (2.0 * hop.std**2)
            for kid in kids:
                if not math.isfinite(kid.adv):
                    raise ValueError(f"advantage at depth {kid.depth}, node {kid.slot} = {kid.adv}: must be finite")
                rho = torch.exp(gauss(kid.x, mu, hop.std, how) - float(kid.lp))
                surrogate = torch.min(rho * kid.adv, rho.clamp(1 - low, 1 + high) * kid.adv)
                yield kid.depth, weight(node.depth) * surrogate, extra


def reduced(terms, way):
    """Mean over edges, or the mean of the depths' means."""
    if way == "edge_mean":
        return torch.stack([t for _, t in terms]).mean()
    if way != "depth_mean":
        raise ValueError(f"reduction = {way!r}: must be edge_mean or depth_mean")
    depths = sorted({d for d, _ in terms})
    return torch.stack([torch.stack([t for e, t in terms if e == d]).mean() for d in depths]).mean()


def objective(trees, how, low, high, way, weighting, kl, model, frozen):
    """J over trees, to be maximised.

    ``trees`` are tuples (root, hops, trained steps, condition, arithmetic dtype, prompt id).
    """
    if (kl > 0) != (frozen is not None):
        raise ValueError(f"reference_model = {frozen}: must be given if and only if kl = {kl} is positive")
    live = {}
    for root, steps, trained, *_ in trees:
        inside = {n.depth - 1 for floor in floors(root)[1:] for n in floor if n.kept and n.depth - 1 in trained}
        if not inside:
            raise ValueError("edges in the loss = 0: must be at least 1 a tree")
        live.update({i: steps[i].std for i in inside})
    if weighting not in ("uniform", "std"):
        raise ValueError(f"edge_weights = {weighting!r}: must be uniform or std")
    typical = math.fsum(live.values()) / len(live)
    weight = (lambda i: live[i] / typical) if weighting == "std" else (lambda i: 1.0)
    parts = []
    for tree in trees:
        terms = list(tree_terms(tree, model, how, low, high, weight, kl, frozen))
        j = reduced([(d, s) for d, s, _ in terms], way)
        parts.append(j - kl * reduced([(d, e) for d, _, e in terms], way) if kl else j)
    if not parts:
        raise ValueError("trees = 0: must be at least 1")
    return torch.stack(parts).mean()
