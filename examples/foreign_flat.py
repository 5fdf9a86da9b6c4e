"""A flat GRPO loop, foreign code of its own, and the adapter that brings it to conformance.

    PYTHONPATH=. branchgrpo conformance --impl examples.foreign_flat:FlatLoop

Plans that are no flat group, and with them trees, fusion and pruning, are unsupported.
"""

import math

import torch

from branchgrpo.conformance.adapters.flat import Chains, FlatImplementation


def gaussian_log_prob(child, mean, std):
    """Mean log-density over the latent's elements."""
    residual = (child.double() - mean.double()) / std
    return (-0.5 * residual**2 - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(dim=1)


def drift(latents, velocity, sigma, sigma_next, eta):
    """Mean of an SDE step."""
    step_size = sigma - sigma_next
    return latents - step_size * velocity - (latents + (1 - sigma) * velocity) * (eta**2 * step_size / (2 * sigma))


def sample_group(velocity, latents, sigmas, etas, storage_dtype):
    """Denoise a group of latents and keep what training needs; latents that are all equal are evaluated once."""
    states, means, stds, log_probs = [latents], [], [], []
    for i, eta in enumerate(etas):
        shared = bool((states[-1] == states[-1][:1]).all())
        v = velocity(states[-1][:1] if shared else states[-1], sigmas[i]).expand(states[-1].shape)
        x = states[-1].to(v.dtype)
        mean = drift(x, v, sigmas[i], sigmas[i + 1], eta)
        std = eta * math.sqrt(sigmas[i] - sigmas[i + 1])
        child = (mean + std * torch.randn_like(mean) if std > 0 else mean).to(storage_dtype)
        states.append(child)
        means.append(mean)
        stds.append(std)
        log_probs.append(gaussian_log_prob(child, mean, std) if std > 0 else None)
    return states, means, stds, log_probs


def group_advantages(rewards, eps=1e-8, clip=5.0):
    """Z-scores of a group; a group of equal rewards teaches nothing."""
    if rewards.max() - rewards.min() <= 2.0**-40 * rewards.abs().max():
        return torch.zeros_like(rewards)
    return ((rewards - rewards.mean()) / (rewards.std() + eps)).clamp(-clip, clip)


def policy_loss(new, old, advantages, clip_range):
    """PPO's loss."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()


class FlatLoop(FlatImplementation):
    """The loop above behind the protocol."""

    name = "flat loop"

    def sample(self, velocity, latents, plan, storage_dtype):
        """One group."""
        etas = [kernel.eta for kernel in plan.effective_kernels]
        return Chains(*sample_group(velocity, latents, plan.sigmas, etas, storage_dtype))

    def group_advantages(self, rewards):
        """One group's advantages."""
        return group_advantages(rewards)

    def score(self, plan, step, x, velocity, child):
        """New log-probabilities."""
        eta = plan.effective_kernels[step].eta
        mean = drift(x, velocity, plan.sigmas[step], plan.sigmas[step + 1], eta)
        return gaussian_log_prob(child, mean, eta * math.sqrt(plan.deltas[step]))

    def loss(self, new, old, advantages, clip):
        """The loop's loss."""
        return policy_loss(new, old, advantages, clip)
