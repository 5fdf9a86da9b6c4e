"""What the benchmarks run: the FLUX architecture at test size, and a model that records what it is asked."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from branchgrpo.reference.protocols import Condition, Guidance, Prompt, TensorCondition

CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 4, 16, 32
"""Of diffusers' own test configuration. A channel is a larger share of a token's work here than in the real model
(4 of width 32 against 64 of 3,072), so everything around the denoiser weighs more here."""

SIZES = ("64x1", "64x4", "1024x1", "1024x4")
"""Tokens × prompts."""


class Flux(nn.Module):
    """A velocity model around a tiny FLUX transformer with random weights."""

    guidance = Guidance()

    def __init__(self, tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer: Any = FluxTransformer2DModel(
            patch_size=1,
            in_channels=CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=False,
        )
        side = round(tokens**0.5)
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), dim=-1).reshape(-1, 2)
        self.image_ids = torch.cat([torch.zeros(tokens, 1), grid.float()], dim=1)
        self.text_ids = torch.zeros(TEXT_TOKENS, 3)

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """One transformer call for all items."""
        assert isinstance(condition, TensorCondition)
        result: Tensor = self.transformer(
            hidden_states=x,
            encoder_hidden_states=condition.tensors["text"],
            pooled_projections=condition.tensors["pooled"],
            timestep=sigma,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]
        return result


class Recorder:
    """Passes calls on and keeps their inputs: the batches of the bare side."""

    guidance = Guidance()

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[tuple[Tensor, Tensor, Condition]] = []

    def __call__(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Record and pass on."""
        self.calls.append((x.detach().clone(), sigma.clone(), condition))
        result: Tensor = self.model(x, sigma, condition)
        return result


def prompts_and_condition(count: int) -> tuple[list[Prompt], TensorCondition]:
    """Prompts with random embeddings."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(count, TEXT_TOKENS, TEXT_WIDTH, generator=generator)
    pooled = torch.randn(count, TEXT_WIDTH, generator=generator)
    return [Prompt(i, f"prompt {i}") for i in range(count)], TensorCondition({"text": text, "pooled": pooled})
