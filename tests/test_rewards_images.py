"""What rewards accept: images, videos and prompts, each refused in the place of another."""

import jaxtyping
import pytest
import torch
from helpers_rewards import pictures, prompts

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.images import Images, Videos, as_images, as_prompts, as_videos


def test_images_are_accepted_and_wrapped_once() -> None:
    images = as_images(pictures(3))
    assert len(images) == 3
    assert as_images(images) is images


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (["a cat"], "samples = 'list'"),
        (Prompt(0, "a cat"), "samples = 'Prompt'"),
        (torch.zeros(2, 4, 8, 8), "samples: shape"),
        (torch.zeros(3, 8, 8), "samples: shape"),
        (torch.zeros(2, 8, 8, 3), "samples: shape"),
        (torch.zeros(2, 3, 0, 8), "samples: shape"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "samples: dtype"),
    ],
)
def test_other_things_than_images_are_refused(value: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        as_images(value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.01, 1.01])
def test_a_value_outside_the_unit_interval_names_its_image(bad: float) -> None:
    value = pictures(4)
    value[2, 1, 3, 4] = bad
    with pytest.raises(InputError, match=r"samples\[2\]"):
        as_images(value)


def test_prompts_are_checked_by_type_and_number() -> None:
    assert as_prompts(prompts(["a", "b"]), 2)[1].text == "b"
    for value, named in (
        (pictures(2), "prompts = 'Tensor'"),
        ("a cat", "prompts = 'str'"),
        (["a", "b"], r"prompts\[0\] = 'str'"),
        (prompts(["a"]), r"len\(prompts\) = 1: must be 2"),
    ):
        with pytest.raises(InputError, match=named):
            as_prompts(value, 2)


class Brightness:
    """A reward on the shared base class, defined late so that the base is imported as users import it."""

    @staticmethod
    def build() -> object:
        from branchgrpo.rewards.base import ImageScorer

        class Mean(ImageScorer):
            name, version, range = "brightness", "1", (0.0, 1.0)

            def score(self, images: Images, prompts: tuple[Prompt, ...]) -> torch.Tensor:
                return images.pixels.flatten(1).mean(dim=1).half()

        return Mean()


def test_swapped_image_and_prompt_are_refused_by_a_reward() -> None:
    reward = Brightness.build()
    images, texts = pictures(2), prompts(["a", "b"])
    assert reward(images, texts).dtype == torch.float64
    with pytest.raises(Exception, match=r"(?i)samples|type"):  # the type checker of the test run comes first
        reward(texts, images)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(InputError, match="samples = 'list': must be a float tensor"):
            reward(texts, images)
        with pytest.raises(InputError, match="prompts = 'Tensor': must be a sequence of Prompt"):
            reward(images, images)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_no_images_give_no_scores() -> None:
    assert Brightness.build()(pictures(0), []).shape == (0,)


def test_videos_show_frames_from_first_to_last() -> None:
    video = torch.linspace(0, 1, 10).view(1, 10, 1, 1, 1).expand(2, 10, 3, 4, 4)
    videos = as_videos(video)
    assert as_videos(videos) is videos
    assert isinstance(videos, Videos)
    shown = videos.frames(4)[0, :, 0, 0, 0]
    assert shown.tolist() == pytest.approx([0.0, 3 / 9, 6 / 9, 1.0])
    assert videos.frames(99).shape[1] == 10
    with pytest.raises(InputError, match="frames"):
        as_videos(pictures(2))
