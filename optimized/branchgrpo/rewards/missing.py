"""A score that is missing: who it belongs to, why, and the scores that were obtained all the same."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.protocols import Prompt


class Words(str):
    """A text that an error shows as it is, without quotes and escapes around it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class MissingScores(RewardError):
    """Some items of a call have no score; the others' scores travel with the error (REW-2).

    Attributes:
        model: name of the reward model.
        prompts: the prompt of every item of the call.
        scores: one an item of the call, NaN where there is none.
        reasons: why, by item.
    """

    def __init__(
        self,
        model: str,
        prompts: Sequence[Prompt],
        scores: Float64[Tensor, "items"],
        reasons: Mapping[int, str],
    ) -> None:
        self.model = model
        self.prompts = tuple(prompts)
        self.scores = scores
        self.reasons = dict(reasons)
        names = "; ".join(
            f"item {i}, prompt {self.prompts[i].id} ({self.prompts[i].text!r}): {reason}"
            for i, reason in sorted(self.reasons.items())
        )
        super().__init__(f"scores of {model}", Words(names), f"one finite real for each of {len(self.prompts)} items")

    def __reduce__(self) -> tuple[type, tuple[str, tuple[Prompt, ...], Tensor, dict[int, str]]]:  # type: ignore[override]
        """Rebuild from the parts, so that the error crosses process boundaries."""
        return type(self), (self.model, self.prompts, self.scores, self.reasons)


def complete(
    model: str, prompts: Sequence[Prompt], scores: Sequence[float | None], reasons: Mapping[int, str]
) -> Float64[Tensor, "items"]:
    """The scores as a tensor, if there is one for every item.  Clause: REW-2.

    Raises:
        MissingScores: names every item without a score and carries the others' scores.
    """
    values = torch.tensor([float("nan") if s is None else s for s in scores], dtype=torch.float64)
    found = {
        i: reasons.get(i, f"score is {scores[i]}") for i in torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    }
    if found:
        raise MissingScores(model, prompts, values, found)
    return values
