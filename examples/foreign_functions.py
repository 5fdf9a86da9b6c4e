"""Foreign code as two functions of a training script, and the few lines that bring it to conformance.

    PYTHONPATH=. branchgrpo conformance --impl examples.foreign_functions:ScriptFunctions

run from the repository's root. What the functions do not do, fusion, advantages, pruning, is unsupported.
"""

import math

import torch

from branchgrpo.conformance.adapters.functions import FunctionsImplementation, StepFunctions


def flow_step(model_output, latents, eta, sigmas, index, prev_sample=None):
    """One SDE step of a rectified flow: the next latents, the predicted data and the mean log-probability."""
    sigma, sigma_next = float(sigmas[index]), float(sigmas[index + 1])
    step_size = sigma - sigma_next
    score = -(latents + (1.0 - sigma) * model_output) / sigma
    mean = latents - step_size * model_output + 0.5 * eta**2 * step_size * score
    denoised = latents - sigma * model_output
    if eta == 0:
        return mean, denoised, None
    std = eta * math.sqrt(step_size)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    residual = (prev_sample.double() - mean.double()) / std
    per_element = -0.5 * residual**2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    return prev_sample, denoised, per_element.flatten(1).mean(dim=1)


def mix_noise(shared, private, scale):
    """Noise of siblings: one part in common, one of their own, scaled back to unit variance."""
    if math.isinf(scale):
        return private
    length = math.hypot(1.0, scale)
    return shared.unsqueeze(1) / length + private * (scale / length)


def grpo_loss(new, old, advantages, clip_range):
    """Clipped policy loss over the edges of a tree."""
    ratio = torch.exp(new - old)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return torch.mean(torch.maximum(unclipped, clipped))


class ScriptFunctions(FunctionsImplementation):
    """The functions above behind the protocol."""

    def __init__(self):
        super().__init__(
            StepFunctions(flow_step, score="stored", branch_noise=mix_noise, loss=grpo_loss), "script functions"
        )
