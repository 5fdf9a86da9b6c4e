"""grove: tree GRPO for flow models, one node at a time; plain torch. This file grows trees, grove_update trains on them.

Written from spec/ and conformance/ADAPTERS.md alone, by somebody who had read nothing else of this project.
"""

import math

import torch


class Twig:
    """One latent state; the edge that leads to it is stored with it."""

    __slots__ = ("adv", "depth", "kept", "kids", "lp", "mu", "slot", "up", "worth", "x")

    def __init__(self, x=None, up=None, mu=None, lp=None):
        self.x, self.up, self.mu, self.lp = x, up, mu, lp
        self.kids, self.depth, self.slot = [], 0, 0
        self.worth = self.adv = None
        self.kept = True
        if up is not None:
            self.depth = up.depth + 1
            up.kids.append(self)

    def leaves(self):
        """The ends of all chains through this node."""
        return [self] if not self.kids else [leaf for kid in self.kids for leaf in kid.leaves()]

    def ancestry(self):
        """The node and its ancestors but the root."""
        node = self
        while node.up is not None:
            yield node
            node = node.up


def floors(root):
    """Nodes by depth, siblings together, and every node's place on its floor."""
    out = [[root]]
    while out[-1][0].kids:
        out.append([kid for node in out[-1] for kid in node.kids])
    for floor in out:
        for slot, node in enumerate(floor):
            node.slot = slot
    return out


# ---- one step --------------------------------------------------------------------------------------------------------


class Hop:
    """The Gaussian transition from sigma to sigma_next; ``first`` is the schedule's level 1."""

    def __init__(self, kind, eta, sigma, sigma_next, first):
        self.kind, self.s, self.t = str(kind), float(sigma), float(sigma_next)
        delta = self.s - self.t
        self.delta, self.drift, self.std = delta, 0.0, 0.0
        eta = float(eta)
        if self.kind == "sde" or self.kind == "flow_sde":
            below = 1.0 - (self.s if self.s < 1.0 else float(first))
            g = eta if self.kind == "sde" else eta * math.sqrt(self.s / below)
            self.drift, self.std = g * g * delta / (2.0 * self.s), g * math.sqrt(delta)
        elif self.kind == "cps":
            turn = 0.5 * math.pi * eta
            self.cos, self.std = math.cos(turn), self.t * math.sin(turn)
        elif self.kind != "ode":
            raise ValueError(f"kernel = {kind!r}: must be ode, sde, flow_sde or cps")

    def noisy(self):
        """Whether the step draws noise."""
        return self.std > 0.0

    def mean(self, x, v):
        """Mean of the next state."""
        noise = x + (1.0 - self.s) * v
        if self.kind == "cps":
            return (1.0 - self.t) * (x - self.s * v) + (self.t * self.cos) * noise
        out = x - self.delta * v
        return out - self.drift * noise if self.drift else out


def hops(plan):
    """The transitions of a plan as it is rolled out."""
    levels = [float(s) for s in plan.sigmas]
    return [
        Hop(getattr(k.kind, "value", k.kind), k.eta, levels[i], levels[i + 1], levels[1])
        for i, k in enumerate(plan.effective_kernels)
    ]


def gauss(child, mean, std, how):
    """Log-density of a child ``[*latent]`` as kept, reduced by "sum" or "mean"."""
    z = (child.double() - mean.double()) / std
    terms = -0.5 * z * z - (math.log(std) + 0.5 * math.log(2.0 * math.pi))
    return terms.sum() if how == "sum" else terms.mean()


def mix(shared, own, spread):
    """Noise of one child from its parent's shared draw and its own."""
    if math.isinf(spread):
        return own
    h = math.hypot(1.0, spread)
    return (1.0 / h) * shared + (spread / h) * own


# ---- growing ---------------------------------------------------------------------------------------------------------


def ask(model, x, sigma, condition, where):
    """One velocity at one state, checked."""
    v = model(x[None], torch.full((1,), sigma, dtype=x.dtype, device=x.device), condition)
    if tuple(v.shape) != (1, *x.shape):
        raise ValueError(f"velocity at {where}: shape = {tuple(v.shape)}: must be {(1, *x.shape)}")
    if not v.dtype.is_floating_point:
        raise ValueError(f"velocity at {where}: dtype = {v.dtype}: must be a floating dtype")
    if not torch.isfinite(v).all():
        raise ValueError(f"velocity at {where} = NaN or inf: must be finite")
    return v[0].to(x.dtype)


def one(condition):
    """The condition, if it is of one item."""
    if len(condition) != 1:
        raise ValueError(f"len(condition) = {len(condition)}: must be 1, one item a prompt")
    return condition


def sprout(node, hop, v, arith, keep, count, dice, spread, how):
    """The children of one node, all from one velocity."""
    mu = hop.mean(node.x.to(arith), v)
    common = dice.shared(node.depth, node.slot) if count > 1 else None
    for b in range(count):
        if not hop.noisy():
            Twig(mu.to(keep), node, mu).slot = node.slot * count + b
            continue
        xi = dice.private(node.depth + 1, node.slot * count + b)
        if count > 1:
            xi = mix(common, xi, spread)
        x = (mu + hop.std * xi).to(keep)
        Twig(x, node, mu, gauss(x, mu, hop.std, how)).slot = node.slot * count + b


@torch.no_grad()
def grow(plan, model, condition, dice, keep, how):
    """A whole tree, breadth first, one model call a parent."""
    one(condition)
    root = Twig(dice.root().to(keep))
    floor = [root]
    for i, hop in enumerate(hops(plan)):
        for node in floor:
            where = f"step {i}, node {node.slot} of prompt {dice.prompt.id}"
            v = ask(model, node.x.to(dice.dtype), float(plan.sigmas[i]), condition, where)
            sprout(node, hop, v, dice.dtype, keep, plan.branching[i], dice, float(plan.spreads[i]), how)
        floor = [kid for node in floor for kid in node.kids]
    return root


def stops(k, stride, last, anchor):
    """Indices of the full schedule that a continuation from k + 1 visits."""
    if anchor == "end":
        return [k + 1] + [i for i in range(k + 2, last + 1) if (last - i) % stride == 0]
    if anchor != "start":
        raise ValueError(f"anchor = {anchor!r}: must be start or end")
    return [i for i in [k + 1, *range(k + 2, last, stride)] if i < last] + [last]


@torch.no_grad()
def grow_family(sigmas, kernels, ks, group, strides, anchor, output, model, condition, dice, keep, how):
    """Trees by (k, stride): the anchor is walked once, children of k are finished by ODE at every stride.

    ``kernels[k]`` is (kind, eta) of step k. States and calls that agree are computed once.
    """
    one(condition)
    last, arith = len(sigmas) - 1, dice.dtype
    anchor_states, anchor_v, anchor_mu = [dice.root().to(keep)], [], [None]
    for i in range(max(ks) + 1):
        x = anchor_states[i].to(arith)
        anchor_v.append(ask(model, x, sigmas[i], condition, f"step {i} of the anchor of prompt {dice.prompt.id}"))
        mu = Hop("ode", 0, sigmas[i], sigmas[i + 1], sigmas[1]).mean(x, anchor_v[i])
        anchor_states.append(mu.to(keep))
        anchor_mu.append(mu)
    trees = {}
    for k in ks:
        hop = Hop(*kernels[k], sigmas[k], sigmas[k + 1], sigmas[1])
        memo = {}
        for stride in strides:
            root = tip = Twig(anchor_states[0])
            for i in range(1, k + 1):
                tip = Twig(anchor_states[i], tip, anchor_mu[i])
            if not memo:
                first = tip
                sprout(tip, hop, anchor_v[k], arith, keep, group, dice, math.inf, how)
            else:
                for kid in first.kids:
                    Twig(kid.x, tip, kid.mu, kid.lp)
            path = stops(k, stride, last, anchor)
            for b, node in enumerate(list(tip.kids)):
                for n in range(1, len(path)):
                    seen = (b, *path[:n])
                    a, z = sigmas[path[n - 1]], sigmas[path[n]]
                    if seen not in memo:
                        where = f"step {path[n - 1]}, child {b} of step {k} of prompt {dice.prompt.id}"
                        memo[seen] = ask(model, node.x.to(arith), a, condition, where)
                    mu = Hop("ode", 0, a, z, sigmas[1]).mean(node.x.to(arith), memo[seen])
                    node = Twig(mu.to(keep), node, mu)
            memo.setdefault("used", True)
            trees[k, stride] = root
    return trees
