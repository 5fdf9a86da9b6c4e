"""Vision-language judges on an OpenAI-compatible endpoint: Unified Reward and others, on images or videos."""

import base64
import hashlib
import io
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.endpoint import Endpoint, EndpointFailure
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images, Videos, as_images, as_prompts, as_videos
from branchgrpo.rewards.missing import complete
from branchgrpo.rewards.retry import Retry, Sleep
from branchgrpo.rewards.score_parser import ScoreParser, UnreadableScore

ALIGNMENT = """You see an image that was generated for this caption: "{prompt}".
Judge how well it shows what the caption asks for, and how good it looks.
Give your reasons in a few sentences, then end with one line: Final Score: X
where X is a number from 1 (worst) to 5 (best)."""

MOTION = """You see {frames} frames, in order, of a video that was generated for this caption: "{prompt}".
Judge the quality of its motion only: is it smooth, physically plausible, free of flicker and of jumps, and is
there motion at all where the caption asks for it?
Give your reasons in a few sentences, then end with one line: Final Score: X
where X is a number from 1 (worst) to 5 (best)."""

DEFAULT_PARSER = ScoreParser()
DEFAULT_RETRY = Retry()


@dataclass(frozen=True)
class JudgeOptions:
    """How a judge is asked.

    Attributes:
        template: the question; ``{prompt}`` stands for the prompt's text, ``{frames}`` for the number of pictures.
        parser: finds the score in the answer.
        retry: attempts and waits; an unreadable answer is a failed attempt like any other.
        concurrency: requests in flight at a time, ≥ 1.
        max_tokens: longest answer.
        temperature: 0 for the judge's most likely answer.
        seed: of the jitter, per item, so that it does not depend on the order of threads.
    """

    template: str = ALIGNMENT
    parser: ScoreParser = DEFAULT_PARSER
    retry: Retry = DEFAULT_RETRY
    concurrency: int = 8
    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise OptionError("judge.template", self.template, "a text with {prompt}")
        for name in ("concurrency", "max_tokens"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise OptionError(f"judge.{name}", getattr(self, name), "an integer ≥ 1")
        if not self.temperature >= 0.0:
            raise OptionError("judge.temperature", self.temperature, "≥ 0")

    def question(self, prompt: Prompt, frames: int) -> str:
        """The template filled in; braces of the prompt's text are left alone."""
        return self.template.replace("{frames}", str(frames)).replace("{prompt}", prompt.text)

    @property
    def version(self) -> str:
        """Changes with whatever can change a score."""
        decisive = repr((self.template, self.parser, self.max_tokens, self.temperature))
        return hashlib.sha256(decisive.encode()).hexdigest()[:12]


class RemoteJudge(ABC):
    """Scores by asking; a score that cannot be obtained is an error with its item's name, never a guess (REW-2)."""

    def __init__(
        self, name: str, endpoint: Endpoint, options: JudgeOptions | None = None, sleep: Sleep = time.sleep
    ) -> None:
        self.endpoint = endpoint
        self.options = JudgeOptions() if options is None else options
        self.sleep = sleep
        self.name = name
        self.version = f"{endpoint.model} asked {self.options.version}"
        self.range = (self.options.parser.low, self.options.parser.high)

    @abstractmethod
    def pictures(self, samples: Any) -> list[Float[Tensor, "frames 3 height width"]]:
        """The pictures to show for every item, after checking the samples."""

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One score an item, all items asked even if some fail.

        Raises:
            InputError: swapped or mismatched arguments.
            MissingScores: the items without a score, by name, with the scores of the others.
        """
        shown = self.pictures(samples)
        checked = as_prompts(prompts, len(shown))
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            results = list(pool.map(self.ask, range(len(shown)), shown, checked))
        reasons = {i: result for i, result in enumerate(results) if isinstance(result, str)}
        scores = [None if isinstance(result, str) else result for result in results]
        return complete(self.name, checked, scores, reasons)

    def ask(self, item: int, pictures: Float[Tensor, "frames 3 height width"], prompt: Prompt) -> float | str:
        """The score of one item, or the reason why there is none."""
        payload = {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": self.content(pictures, prompt)}],
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }
        rng = random.Random(f"{self.options.seed}:{prompt.id}:{item}")
        try:
            return self.options.retry.run(lambda: self.attempt(payload), rng, self.sleep)
        except EndpointFailure as failure:
            return failure.reason

    def content(self, pictures: Float[Tensor, "frames 3 height width"], prompt: Prompt) -> list[dict[str, Any]]:
        """The message: pictures, then the question."""
        urls = [{"type": "image_url", "image_url": {"url": png_url(picture)}} for picture in pictures]
        return [*urls, {"type": "text", "text": self.options.question(prompt, len(pictures))}]

    def attempt(self, payload: dict[str, Any]) -> float:
        """One request and the score in its answer.

        Raises:
            EndpointFailure: no usable answer, or an unreadable one.
        """
        answer = answer_text(self.endpoint.post("/chat/completions", payload))
        try:
            return self.options.parser(answer)
        except UnreadableScore as error:
            raise EndpointFailure(error.reason, retryable=True) from error


class ImageJudge(RemoteJudge):
    """A judge of images, e.g. Unified Reward (arXiv 2503.05236), 1 … 5.

    The question is this project's own.  For numbers that compare with published tables give the template, label and
    model that the judge was trained with.
    """

    def pictures(self, samples: Tensor | Images) -> list[Float[Tensor, "frames 3 height width"]]:
        """One picture an item."""
        return list(as_images(samples).pixels.unsqueeze(1))


class MotionJudge(RemoteJudge):
    """A judge of the motion of videos, in the manner of VideoAlign's motion quality, 1 … 5."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        options: JudgeOptions | None = None,
        sleep: Sleep = time.sleep,
        frames: int = 8,
    ) -> None:
        """As ``RemoteJudge``; ``frames`` ≥ 2 frames, spread evenly over the video, are shown."""
        if not is_integer(frames) or frames < 2:
            raise OptionError("judge.frames", frames, "an integer ≥ 2")
        super().__init__(name, endpoint, JudgeOptions(template=MOTION) if options is None else options, sleep)
        self.frames = frames
        self.version = f"{self.version}, {frames} frames"

    def pictures(self, samples: Tensor | Videos) -> list[Float[Tensor, "frames 3 height width"]]:
        """The frames of every item."""
        return list(as_videos(samples).frames(self.frames))


def png_url(picture: Float[Tensor, "3 height width"]) -> str:
    """A picture as a data URL, rounded to 8 bits."""
    levels = (picture.float() * 255.0).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    require("PIL.Image", "rewards").fromarray(levels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def answer_text(answer: dict[str, Any]) -> str:
    """The judge's words.

    Raises:
        EndpointFailure: no choice, no text, or an answer that was cut at the token limit (its number may be half).
    """
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointFailure(f"answer without choices[0].message.content ({error!r})", retryable=True) from error
    if choice.get("finish_reason") == "length":
        raise EndpointFailure("answer cut at max_tokens", retryable=True)
    if not isinstance(text, str) or not text.strip():
        raise EndpointFailure(f"answer without text: {text!r}", retryable=True)
    return text
