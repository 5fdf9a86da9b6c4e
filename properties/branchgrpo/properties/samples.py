"""Samples out of traces: the noise that was really used, and standardised pairs."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.properties.exact import as_array
from branchgrpo.reference.implementation import Trace

Array = Float64[np.ndarray, "..."]


def realised_noise(trace: Trace, depth: int) -> Array:
    """ξ = (state − mean)/std of the edges that end at a depth, ``[prompts, nodes, *latent]`` in float64."""
    state, mean = as_array(trace.states[depth]), as_array(trace.means[depth - 1])
    return np.asarray((state - mean) / float(trace.stds[depth - 1]))


def leaves(trace: Trace) -> Array:
    """Leaf states, ``[prompts, leaves, *latent]`` in float64."""
    return as_array(trace.states[-1])


def standardised(x: Array, mean: float, variance: float) -> Float64[np.ndarray, "n"]:
    """(x − μ)/σ as one row."""
    return np.asarray((x - mean) / np.sqrt(variance)).reshape(-1)
