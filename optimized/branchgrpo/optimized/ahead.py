"""The noise of one rollout, asked for range by range and drawn ahead of need (spec: noise)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.optimized.growth import Growth, Step
from branchgrpo.optimized.noise import NoiseInBulk, Places, branch_noise
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole

LOOKAHEAD = 2**20
"""Numbers that may be drawn ahead of the call that needs them: 4 MiB in float32, and below that a draw's overhead
costs more than its numbers."""


class Draws:
    """The draws of all levels of a growth; what is small is drawn ahead of the calls that need it.

    Args:
        growth: which draws there are, and in which order they are needed.
        places: where the nodes of a level are.
        sampling: source, shape, dtype and device of the draws.
        whole: False where a rank grows some sub-trees only: then no more is drawn than is asked for.
    """

    def __init__(self, growth: Growth, places: Places, sampling: Sampling, *, whole: bool = True) -> None:
        self.growth, self.places, self.sampling = growth, places, sampling
        self.sizes = [len(places.prompt_ids) * growth.roots * level.width for level in growth.levels]
        self.room = LOOKAHEAD // math.prod(sampling.latent_shape) if whole else 0
        self.bulk = sampling.noise if isinstance(sampling.noise, NoiseInBulk) else None
        self.ahead: dict[tuple[NoiseRole, int], tuple[int, Tensor]] = {}
        self.drawn: set[tuple[NoiseRole, int]] = set()

    def take(self, role: NoiseRole, level: int, first: int, last: int) -> Float[Tensor, "items *latent"]:
        """The draws of one role for the flat range first … last − 1 of a level.  Clause: NOISE-3, NOISE-4."""
        start, rows = self.ahead.get((role, level), (0, None))
        if rows is None or first < start or last - start > len(rows):
            start, rows = first, self.draw(role, level, first, last)
            self.ahead[role, level] = (start, rows)
        if last == self.sizes[level]:
            del self.ahead[role, level]
        if last - first == len(rows):
            return rows
        return rows[first - start : last - start]

    def children(self, step: Step, first: int, last: int) -> Float[Tensor, "children *latent"]:
        """ξ of all children of the parents first … last − 1.  Clause: NOISE-1, NOISE-3."""
        factor = step.branching
        private = self.take(NoiseRole.PRIVATE, step.target, first * factor, last * factor)
        if not step.shares_noise:
            return private
        shared = self.take(NoiseRole.SHARED, step.source, first, last)
        siblings = torch.unflatten(private, 0, (last - first, factor))
        return branch_noise(shared, siblings, step.plan.spreads[step.index]).flatten(0, 1)

    def draw(self, role: NoiseRole, level: int, first: int, last: int) -> Tensor:
        """The draws of a range, and of what comes after it in its level as far as ``LOOKAHEAD`` goes.

        A source that makes draws in bulk is asked for later levels too, which are kept.
        """
        s, end = self.sampling, min(max(last, first + self.room), self.sizes[level])
        wanted = [(role, level, first, end), *self.later(role, level, first, end)]
        self.drawn |= {place[:2] for place in wanted}
        keys = [self.keys(*place) for place in wanted]
        if self.bulk is None:
            return s.noise.draw(keys[0], s.latent_shape, s.dtype, s.device)
        found = self.bulk.draw_all(keys, s.latent_shape, s.dtype, s.device)
        for place, rows in zip(wanted[1:], found[1:], strict=True):
            self.ahead[place[0], place[1]] = (0, rows)
        return found[0]

    def later(self, role: NoiseRole, level: int, first: int, end: int) -> list[tuple[NoiseRole, int, int, int]]:
        """Whole levels that are needed next and fit into the room that a whole level leaves."""
        if self.bulk is None or first > 0 or (role, level) not in self.growth.draws:
            return []
        taken, places = end, []
        for later in self.growth.draws[self.growth.draws.index((role, level)) + 1 :]:
            taken += self.sizes[later[1]]
            if taken > self.room:
                break
            if later not in self.drawn:
                places.append((*later, 0, self.sizes[later[1]]))
        return places

    def keys(self, role: NoiseRole, level: int, first: int, last: int) -> NoiseKeys:
        """The keys of one role for a flat range of a level.  Clause: NOISE-3, NOISE-4."""
        spec = self.growth.levels[level]
        return self.places.keys(self.sampling.iteration, role, spec.depth, spec.width, first, last)
