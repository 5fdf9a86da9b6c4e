"""A tree class in one file, with some of the method, and the adapter that brings it to conformance.

    PYTHONPATH=. branchgrpo conformance --impl examples.foreign_tree:TreeCode

run from the repository's root. ``TreeNode`` and the functions beside it know nothing of the project; ``TreeCode`` below
them is the adapter. What they do not do is unsupported. The whole method, by a stranger, is in examples/foreign.
"""

import math

import torch

from branchgrpo.conformance.adapters.partial import require
from branchgrpo.conformance.adapters.per_node import PerNodeImplementation

# ---- the foreign code ------------------------------------------------------------------------------------------------


class TreeNode:
    """A latent with its past and its future."""

    def __init__(self, parent, state, mean=None, log_prob=None):
        self.parent, self.children = parent, []
        self.state, self.mean, self.log_prob = state, mean, log_prob
        self.depth = 0 if parent is None else parent.depth + 1
        self.value = self.advantage = None
        if parent is not None:
            parent.children.append(self)

    def leaves(self):
        """The ends of all chains through this node."""
        return [leaf for child in self.children for leaf in child.leaves()] if self.children else [self]

    def everything(self):
        """This node and all below it."""
        return [self] + [node for child in self.children for node in child.everything()]

    def path_log_prob(self, ancestor):
        """Log-probability of the way down from an ancestor."""
        total, node = 0.0, self
        while node is not ancestor:
            total += 0.0 if node.log_prob is None else float(node.log_prob)
            node = node.parent
        return total


def sde_mean(x, v, sigma, sigma_next, g):
    """Euler–Maruyama with score −(x + (1 − σ) v)/σ."""
    step = sigma - sigma_next
    return x - step * v - 0.5 * g * g * step / sigma * (x + (1 - sigma) * v)


def cps_mean(x, v, sigma, sigma_next, eta):
    """Coefficient-preserving sampling."""
    data, noise = x - sigma * v, x + (1 - sigma) * v
    return (1 - sigma_next) * data + sigma_next * math.cos(eta * math.pi / 2) * noise


def flow_strength(eta, sigma, second):
    """η √(σ/(1 − σ)), finite at σ = 1."""
    return eta * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))


def mixed_noise(shared, private, scale):
    """Siblings' noise of unit variance."""
    if math.isinf(scale):
        return private
    length = math.hypot(1.0, scale)
    return shared / length + private * (scale / length)


def log_density(child, mean, std, average):
    """Log of the normal density, summed or averaged over all but the first dimension."""
    residual = (child.double() - mean.double()) / std
    terms = (-0.5 * residual**2 - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1)
    return terms.mean(dim=1) if average else terms.sum(dim=1)


def path_weights(node, beta):
    """Softmax over the leaves under a node."""
    scores = torch.tensor([beta * leaf.path_log_prob(node) for leaf in node.leaves()], dtype=torch.float64)
    return torch.softmax(scores, dim=0)


def z_scores(nodes, bessel, eps, limit):
    """Advantages among the nodes of one depth."""
    values = torch.tensor([node.value for node in nodes], dtype=torch.float64)
    spread = float(values.max() - values.min())
    if len(values) < 2 or spread <= 2.0**-40 * float(values.abs().max()):
        return torch.zeros_like(values)
    return ((values - values.mean()) / (values.std(correction=int(bessel)) + eps)).clamp(-limit, limit)


def better_leaves(root, scores):
    """Of each last-branching node's leaves the one with the best score, the first among equals."""
    by_leaf = dict(zip(root.leaves(), scores, strict=True))
    last = max((node for node in root.everything() if len(node.children) > 1), key=lambda node: node.depth).depth
    parents = [node for node in root.everything() if node.depth == last]
    return {max(parent.leaves(), key=lambda leaf: by_leaf[leaf]) for parent in parents}, last + 1


def extreme_leaves(root, scores, count):
    """The best and the worst leaves."""
    leaves = root.leaves()
    order = sorted(range(len(leaves)), key=lambda i: (-scores[i], i))
    last = max((node for node in root.everything() if len(node.children) > 1), key=lambda node: node.depth).depth
    return {leaves[i] for i in (*order[:count], *order[-count:])}, last + 1


def clipped(ratio, advantages, low, high):
    """Pessimistic surrogate."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


# ---- the adapter -----------------------------------------------------------------------------------------------------


class TreeCode(PerNodeImplementation):
    """The code above behind the protocol; plan families and trained fractions it does not have."""

    name = "tree code"

    def transition(self, plan, step, x, velocity):
        """Mean and std of one step."""
        kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
        if kernel.kind == "ode" or kernel.eta == 0:
            return x - (sigma - after) * velocity, 0.0
        if kernel.kind == "cps":
            return cps_mean(x, velocity, sigma, after, kernel.eta), after * math.sin(kernel.eta * math.pi / 2)
        g = kernel.eta if kernel.kind == "sde" else flow_strength(kernel.eta, sigma, plan.sigmas[1])
        return sde_mean(x, velocity, sigma, after, g), g * math.sqrt(sigma - after)

    def branch_noise(self, shared, private, spread):
        """Siblings' noise."""
        return mixed_noise(shared.unsqueeze(1), private, spread)

    def log_probability(self, child, mean, std, reduction):
        """Log-density."""
        return log_density(child, mean, std, reduction == "mean")

    def stds(self, plan):
        """Std of every step."""
        empty = torch.zeros(1, dtype=torch.float64)
        return [self.transition(plan, step, empty, empty)[1] for step in range(plan.steps)]

    def make_node(self, parent, state, mean, log_prob, depth):
        """A node."""
        return TreeNode(parent, state, mean, log_prob)

    def velocity(self, model, x, sigma, condition):
        """The model's answer, refused where it is broken."""
        level = torch.full((len(x),), sigma, dtype=x.dtype)
        v = model(x, level, condition)
        if v.shape != x.shape or not bool(torch.isfinite(v).all()):
            raise ValueError("the model's velocity has another shape or is not finite")
        return v

    def grow_tree(self, plan, model, condition, noise, storage_dtype, reduction):
        """One tree, level by level."""
        root = TreeNode(None, noise.root().to(storage_dtype))
        level = [root]
        for step, factor in enumerate(plan.branching):
            below = []
            for index, node in enumerate(level):
                x = node.state.to(noise.dtype).unsqueeze(0)
                v = self.velocity(model, x, plan.sigmas[step], condition)
                mean, std = self.transition(plan, step, x, v)
                for branch in range(factor):
                    child = mean
                    if std > 0:
                        xi = noise.private(step + 1, index * factor + branch)
                        if factor > 1:
                            xi = mixed_noise(noise.shared(step, index), xi, plan.spreads[step])
                        child = mean + std * xi
                    child = child.to(storage_dtype)
                    log_prob = self.log_probability(child, mean, std, reduction)[0] if std > 0 else None
                    below.append(TreeNode(node, child[0], mean[0], log_prob))
            level = below
        return root

    def fuse_tree(self, root, rewards, options):
        """Values of all nodes."""
        require(options.kind == "path_softmax", "path softmax only")
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError("a reward is not finite")
        by_leaf = dict(zip(root.leaves(), rewards, strict=True))
        for node in root.everything():
            own = torch.tensor([by_leaf[leaf] for leaf in node.leaves()], dtype=torch.float64)
            node.value = (path_weights(node, options.beta) * own).sum() if node.children else own[0]

    def score_tree(self, root, options):
        """Advantages depth by depth."""
        nodes = root.everything()
        for depth in range(max(node.depth for node in nodes) + 1):
            level = [node for node in nodes if node.depth == depth]
            scores = z_scores(level, options.bessel, options.eps, options.clip)
            for node, advantage in zip(level, scores, strict=True):
                node.advantage = advantage

    def prune_tree(self, root, keys, rules, iteration):
        """Nodes whose edge stays."""
        nodes = root.everything()
        kept = set(nodes)
        for rule in rules:
            kind = type(rule).__name__
            require(kind in ("ParentTop1", "ExtremeB"), f"no pruning {kind}")
            if not any(len(node.children) > 1 for node in nodes):
                raise ValueError("nothing to choose from: the tree does not branch")
            stays, split = better_leaves(root, keys) if kind == "ParentTop1" else extreme_leaves(root, keys, rule.b)
            first = split if rule.drop_split_edges else split + 1
            kept -= {node for node in nodes if node.depth >= first and not stays.intersection(node.leaves())}
        return kept

    def objective(self, traces, model, condition, advantages, kept, options, reduction, reference_model):
        """Mean surrogate over the edges of a tree, then over trees."""
        require(options.edge_weights == "uniform", "edges are weighted alike")
        if (reference_model is None) != (options.kl == 0):
            raise ValueError("a frozen policy goes with a KL, and a KL with a frozen policy")
        if len(condition) != len(traces[0].prompts):
            raise ValueError("one condition a prompt")
        trees = [
            self.tree_objective(
                trace, (prompt, root), model, condition, own, masks, options, reduction, reference_model
            )
            for trace, own, masks in zip(traces, advantages, kept, strict=True)
            for prompt in range(len(trace.prompts))
            for root in range(trace.plan.roots)
        ]
        return torch.stack(trees).mean()

    def tree_objective(self, trace, at, model, condition, advantages, kept, options, reduction, frozen):
        """Surrogate of one tree."""
        (prompt, root), plan, levels = at, trace.plan, []
        for step in plan.trainable_steps:
            size, above = plan.level_sizes[step + 1], plan.level_sizes[step]
            columns = root * size + kept[step][prompt, root * size : (root + 1) * size].nonzero().flatten()
            if not len(columns):
                continue
            dtype = trace.means[step].dtype
            parents = root * above + (columns - root * size) // plan.branching[step]
            x, child = trace.states[step][prompt, parents].to(dtype), trace.states[step + 1][prompt, columns].to(dtype)
            own = condition.gather(torch.full((len(x),), prompt))
            mean, std = self.transition(plan, step, x, self.velocity(model, x, plan.sigmas[step], own))
            new = self.log_probability(child, mean, std, reduction)
            ratio = torch.exp(new - trace.log_probs[step][prompt, columns])
            term = clipped(ratio, advantages[step + 1][prompt, columns], options.clip_low, options.clip_high)
            if frozen is not None:
                with torch.no_grad():
                    other, _ = self.transition(plan, step, x, self.velocity(frozen, x, plan.sigmas[step], own))
                distance = ((mean - other).double() ** 2 / (2 * std**2)).flatten(1)
                term = term - options.kl * (distance.mean(dim=1) if reduction == "mean" else distance.sum(dim=1))
            levels.append(term)
        if not levels:
            raise ValueError("nothing is left to train")
        if options.reduction == "depth_mean":
            return torch.stack([level.mean() for level in levels]).mean()
        return torch.cat(levels).mean()
