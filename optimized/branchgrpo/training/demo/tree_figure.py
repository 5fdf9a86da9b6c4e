"""A drawing of one tree that the demo really grew: every state an image, every edge coloured by its advantage."""

from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from branchgrpo.training.demo.figures import svg_of

THUMB = 0.40
"""Half the edge of an image, in units of the distance between neighbouring leaves."""


@dataclass(frozen=True, eq=False)
class GrownTree:
    """One tree as level-order arrays, a level an entry.

    Attributes:
        prompt: text of its prompt.
        sigmas: T + 1 noise levels.
        branching: T branching factors.
        states: depth 0 … T, ``[nodes, 8, 8]``; the last level as the reward saw it.
        advantages: depth 1 … T, ``[nodes]``.
        trained: depth 1 … T, ``[nodes]``: whether the edge that ends there entered the update.
        rewards: ``[leaves]``.
    """

    prompt: str
    sigmas: tuple[float, ...]
    branching: tuple[int, ...]
    states: tuple[NDArray[np.float32], ...]
    advantages: tuple[NDArray[np.float64], ...]
    trained: tuple[NDArray[np.bool_], ...]
    rewards: NDArray[np.float64]


def node_heights(branching: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """Vertical places of every level's nodes: leaves one apart, a parent in the middle of its children."""
    leaves = int(np.prod(branching))
    levels = [np.arange(leaves, 0, -1, dtype=np.float64)]
    for factor in reversed(branching):
        levels.insert(0, levels[0].reshape(-1, factor).mean(axis=1))
    return levels


def draw_edges(axes: Axes, tree: GrownTree, heights: list[NDArray[np.float64]], spacing: float) -> None:
    """Edges between levels: colour by advantage, grey and dashed where not trained."""
    colour, scale = colormaps["coolwarm_r"], Normalize(-2.0, 2.0)
    for depth, (advantages, trained) in enumerate(zip(tree.advantages, tree.trained, strict=True), start=1):
        factor = tree.branching[depth - 1]
        for node, (advantage, used) in enumerate(zip(advantages, trained, strict=True)):
            ends = (
                [(depth - 1) * spacing, depth * spacing],
                [heights[depth - 1][node // factor], heights[depth][node]],
            )
            if used:
                axes.plot(*ends, color=colour(scale(advantage)), linewidth=2.4, zorder=1, solid_capstyle="round")
            else:
                axes.plot(*ends, color="#999999", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)


def draw_states(axes: Axes, tree: GrownTree, heights: list[NDArray[np.float64]], spacing: float) -> None:
    """Every state as an image at its place."""
    for depth, states in enumerate(tree.states):
        for place, image in zip(heights[depth], states, strict=True):
            x = depth * spacing
            box = (x - THUMB, x + THUMB, place - THUMB, place + THUMB)
            axes.imshow(image, cmap="gray_r", vmin=-1.0, vmax=1.0, extent=box, interpolation="none", zorder=2)


def tree_svg(tree: GrownTree) -> str:
    """The drawing as an ``<svg>`` element: noise on the left, finished digits and their rewards on the right."""
    steps, heights, spacing = len(tree.branching), node_heights(tree.branching), 1.35
    leaves = len(tree.rewards)
    figure = Figure(figsize=(14.0, 14.0 * (leaves + 1.6) / (spacing * steps + 3.0)))
    axes = figure.subplots()
    draw_edges(axes, tree, heights, spacing)
    draw_states(axes, tree, heights, spacing)
    for place, reward in zip(heights[-1], tree.rewards, strict=True):
        axes.text(steps * spacing + 0.6, place, f"{reward:.2f}", va="center", fontsize=9)
    axes.text(steps * spacing + 0.6, leaves + 0.9, "reward", va="center", fontsize=9, fontweight="bold")
    for depth, sigma in enumerate(tree.sigmas):
        split = depth < steps and tree.branching[depth] > 1
        weight = "bold" if split else "normal"
        axes.text(
            depth * spacing, leaves + 0.9, f"σ {sigma:.2f}", ha="center", va="center", fontsize=8, fontweight=weight
        )
        if split:
            axes.axvline(depth * spacing, color="#0072B2", linewidth=0.8, alpha=0.35, zorder=0)
    axes.set_xlim(-1.0, steps * spacing + 2.0)
    axes.set_ylim(0.3, leaves + 1.4)
    axes.set_aspect("equal")
    axes.axis("off")
    return svg_of(figure, "tree")
