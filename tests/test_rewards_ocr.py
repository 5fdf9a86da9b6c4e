"""OCR accuracy: its formula, its errors, and a real reader on rendered text where one is installed."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.missing import MissingScores
from branchgrpo.rewards.ocr import OCRAccuracy, accuracy, edit_distance, target_text


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0)],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance
    assert edit_distance(b, a) == distance


def test_edit_distance_against_its_recursion() -> None:
    def recursive(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return recursive(a[1:], b[1:])
        return 1 + min(recursive(a[1:], b), recursive(a, b[1:]), recursive(a[1:], b[1:]))

    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = ("".join(rng.choice(list("ab"), size=rng.integers(0, 6))) for _ in range(2))
        assert edit_distance(a, b) == recursive(a, b)


@pytest.mark.parametrize(
    ("target", "found", "value"),
    [
        ("Hello World", "HELLO\nWORLD!", 1.0),
        ("HELLO", "HELL0", 0.8),
        ("HELLO", "", 0.0),
        ("HI", "something else entirely", 0.0),
        ("ABCD", "AB", 0.5),
    ],
)
def test_accuracy(target: str, found: str, value: float) -> None:
    assert accuracy(target, found) == pytest.approx(value)


def test_target_is_what_the_prompt_quotes() -> None:
    assert target_text(Prompt(0, 'A sign that says "OPEN" and “24 hours”')) == "OPEN 24 hours"
    assert target_text(Prompt(0, "A sign")) is None
    assert target_text(Prompt(0, 'A sign that says "…"')) is None


def test_scores_prompts_without_text_and_failing_readers() -> None:
    def read(picture: np.ndarray) -> list[str]:
        if picture[0, 0, 0] == 0:
            raise ValueError("cannot read")
        return ["OPEN"] if picture[0, 0, 0] > 100 else ["OPE"]

    reward = OCRAccuracy(read, "test")
    images = torch.zeros(3, 3, 4, 4)
    images[0], images[2] = 1.0, 0.2
    asked = [Prompt(i, 'a sign "OPEN"') for i in range(3)]
    assert reward(images[[0, 2]], asked[:2]).tolist() == [1.0, 0.75]
    with pytest.raises(MissingScores, match=r"item 1, prompt 1.*ValueError: cannot read") as caught:
        reward(images, asked)
    assert caught.value.scores[[0, 2]].tolist() == [1.0, 0.75]
    with pytest.raises(InputError, match=r"prompts\[1\]\.text"):
        reward(images, [asked[0], Prompt(5, "no quote"), asked[2]])


def rendered(text: str) -> torch.Tensor:
    image = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(image).text((20, 20), text, fill="black", font=ImageFont.load_default(size=44))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255.0


@pytest.mark.slow
def test_a_real_reader_reads_rendered_text() -> None:
    try:
        reward = OCRAccuracy.rapidocr()
    except InputError as error:
        # Not installed, or without the system's libGL that its OpenCV wants.
        print(error)
        pytest.skip(str(error))
    images = torch.stack([rendered("HELLO 42"), rendered("BRANCH"), torch.ones(3, 96, 320)])
    asked = [Prompt(0, 'a sign "Hello 42"'), Prompt(1, 'a sign "HELLO 42"'), Prompt(2, 'a sign "HELLO"')]
    right, wrong, blank = reward(images, asked).tolist()
    assert right == 1.0
    assert wrong < 0.5
    assert blank == 0.0
    assert reward.version.startswith("rapidocr-onnxruntime 1.")


def test_the_absent_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(InputError, match=r"branchgrpo\[ocr\]"):
        OCRAccuracy.rapidocr()
