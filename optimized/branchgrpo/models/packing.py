"""Folding 2×2 patches of a latent into tokens, as FLUX and Qwen-Image read them."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def pack(latents: Float[Tensor, "items channels height width"]) -> Float[Tensor, "items tokens packed"]:
    """Fold 2×2 patches into tokens, as FLUX and Qwen-Image read them: a permutation of the elements."""
    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(
    tokens: Float[Tensor, "items tokens packed"], height: int, width: int
) -> Float[Tensor, "items channels height width"]:
    """The inverse of ``pack`` at a latent size."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2)
