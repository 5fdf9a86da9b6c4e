"""grove behind the protocol: the adapter of a tree class, and the rest of the operations as methods.

    PYTHONPATH=. branchgrpo conformance --impl examples.foreign.adapter:Grove

run from the repository's root. Written, with grove, from spec/ and conformance/ADAPTERS.md alone.
"""

import torch
from examples.foreign import grove, grove_update

from branchgrpo.conformance.adapters.functions import draw_level
from branchgrpo.conformance.adapters.per_node import PerNodeImplementation
from branchgrpo.conformance.adapters.per_node_levels import NodeNames
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.protocols import NoiseRole


class FamilyDice:
    """Draws of one root of one prompt; the layout of grove's ``dice``."""

    def __init__(self, noise, iteration, prompt, root, family, latent_shape, dtype):
        self.dtype, self.prompt = dtype, prompt
        self.level = lambda role, depth, nodes: draw_level(
            noise, iteration, role, depth, [prompt], family.roots, nodes, latent_shape, dtype
        )[0][root * nodes : (root + 1) * nodes]
        self.group = family.group

    def root(self):
        """The initial state."""
        return self.level(NoiseRole.ROOT, 0, 1)[0]

    def shared(self, depth, index):
        """Nothing: a family's spread is infinite."""
        return None

    def private(self, depth, index):
        """A child's own draw."""
        return self.level(NoiseRole.PRIVATE, depth, self.group)[index]


def nest(level, roots):
    """``[prompts, R·n, models]`` as nested lists ``[prompts][roots][nodes][models]``."""
    p, n, m = level.shape
    return level.double().reshape(p, roots, n // roots, m).tolist()


def flat(nested):
    """``[prompts, R·n]`` of nested lists ``[prompts][roots][nodes]``."""
    return torch.tensor([[a for r in p for a in r] for p in nested], dtype=torch.float64)


class Grove(PerNodeImplementation):
    """All operations of the protocol."""

    name = "grove"
    names = NodeNames(children="kids", state="x", mean="mu", log_prob="lp", value="worth", advantage="adv")

    def grow_tree(self, plan, model, condition, noise, storage_dtype, reduction):
        """One tree."""
        return grove.grow(plan, model, condition, noise, storage_dtype, reduction)

    def stds(self, plan):
        """Std of every step."""
        return [hop.std for hop in grove.hops(plan)]

    def make_node(self, parent, state, mean, log_prob, depth):
        """A node of grove's."""
        return grove.Twig(state, parent, mean, log_prob)

    def fuse_tree(self, root, rewards, options):
        """A worth for every node."""
        grove_update.fuse(root, rewards, options.kind, options.beta)

    def prune_tree(self, root, keys, rules, iteration):
        """The nodes whose edge stays."""
        return grove_update.prune(root, [float(k) for k in keys], rules, iteration)

    def transition(self, plan, step, x, velocity):
        """Mean and std of one step, for a batch."""
        hop = grove.hops(plan)[step]
        return hop.mean(x, velocity), hop.std

    def branch_noise(self, shared, private, spread):
        """Noise of siblings, one after the other."""
        rows = [torch.stack([grove.mix(s, own, spread) for own in p]) for s, p in zip(shared, private, strict=True)]
        return torch.stack(rows)

    def log_probability(self, child, mean, std, reduction):
        """Log-densities, one after the other."""
        return torch.stack([grove.gauss(c, m, float(std), reduction) for c, m in zip(child, mean, strict=True)])

    def normalize(self, plan, values, weights, options):
        """Advantages of any scopes and rewards."""
        out = []
        for level in values:
            raw = grove_update.raw_advantages(nest(level, plan.roots), list(weights), options)
            out.append(flat([[[grove_update.clip(a, options.clip) for a in r] for r in p] for p in raw]))
        return tuple(out)

    def leaf_keys(self, plan, values, weights, options):
        """What pruning orders the leaves by."""
        if values[-1].shape[-1] == 1:
            return weights[0] * values[-1][..., 0].double()
        return flat(grove_update.raw_advantages(nest(values[-1], plan.roots), list(weights), options))

    def trained_subsets(self, plan, prompts, seed, iteration):
        """Edges that their chains train."""
        masks = [torch.ones(len(prompts), plan.roots * n, dtype=torch.bool) for n in plan.level_sizes[1:]]
        for p, prompt in enumerate(prompts):
            for root in range(plan.roots):
                for leaf in range(plan.leaves):
                    dice = grove_update.dice_of_key(
                        seed, iteration, prompt.id, root, grove_update.SUBSET, plan.steps, leaf
                    )
                    mine = grove_update.subset(plan.trainable_steps, plan.trained_fraction, dice)
                    for i in set(plan.trainable_steps) - mine:
                        n = plan.level_sizes[i + 1]
                        masks[i][p, root * n + leaf * n // plan.leaves] = False
        return tuple(masks)

    def objective(self, traces, model, condition, advantages, kept, options, reduction, reference_model):
        """J over all trees of all traces."""
        trees = []
        for t, trace in enumerate(traces):
            plan = trace.plan
            if len(condition) != len(trace.prompts):
                raise ValueError(f"len(condition) = {len(condition)}: must be {len(trace.prompts)}, one item a prompt")
            steps, trained = grove.hops(plan), set(plan.trainable_steps)
            for n, tree in enumerate(self.rebuild(trace)):  # tree r of prompt p is entry p * R + r
                p, root = divmod(n, plan.roots)
                for depth, floor in enumerate(tree):
                    for slot, node in enumerate(floor):
                        place = root * plan.level_sizes[depth] + slot
                        node.adv = float(advantages[t][depth][p, place])
                        node.kept = depth == 0 or bool(kept[t][depth - 1][p, place])
                mine = condition.gather(torch.tensor([p]))
                trees.append((tree[0][0], steps, trained, mine, trace.means[0].dtype, trace.prompts[p].id))
        o = options
        return grove_update.objective(
            trees, reduction, o.clip_low, o.clip_high, o.reduction, o.edge_weights, o.kl, model, reference_model
        )

    def singular_rollout(
        self, family, model, prompts, condition, noise, *, latent_shape, dtype, storage_dtype, reduction, iteration
    ):
        """Every member of a family, by (k, λ)."""
        if len(condition) != len(prompts):
            raise ValueError(f"len(condition) = {len(condition)}: must be {len(prompts)}, one item a prompt")
        kernels = {k: (family.kernel.kind, family.kernel.eta) for k in family.ks}
        grown = []
        for p, prompt in enumerate(prompts):
            for root in range(family.roots):
                dice = FamilyDice(noise, iteration, prompt, root, family, latent_shape, dtype)
                trees = grove.grow_family(
                    family.sigmas, kernels, family.ks, family.group, family.granularities, family.stride_anchor,
                    family.output, model, condition.gather(torch.tensor([p])), dice, storage_dtype, reduction,
                )  # fmt: skip
                grown.append({key: grove.floors(tree) for key, tree in trees.items()})
        return {key: self.trace_of(family.member(*key), prompts, [g[key] for g in grown]) for key in grown[0]}

    def trace_of(self, plan, prompts, trees):
        """A trace of floors, prompts outermost and roots next."""

        def level(depth, part):
            nodes = [part(node) for tree in trees for node in tree[depth]]
            stacked = torch.stack(nodes)
            return stacked.reshape(len(prompts), -1, *stacked.shape[1:])

        stds = [hop.std for hop in grove.hops(plan)]
        return Trace(
            plan,
            tuple(prompts),
            tuple(level(d, lambda n: n.x) for d in range(plan.steps + 1)),
            tuple(level(d, lambda n: n.mu) for d in range(1, plan.steps + 1)),
            torch.tensor(stds, dtype=torch.float64),
            tuple(level(i + 1, lambda n: n.lp) if std > 0 else None for i, std in enumerate(stds)),
        )

    def granular_advantages(self, family, k, values, weights, options):
        """Scores summed over granularities, clipped once."""
        total = None
        for granularity in family.granularities:
            raw = flat(
                grove_update.raw_advantages(nest(values[granularity][k + 1], family.roots), list(weights), options)
            )
            total = raw if total is None else total + raw
        return total.clamp(-options.clip, options.clip)
