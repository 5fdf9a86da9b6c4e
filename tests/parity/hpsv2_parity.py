"""HPS v2.1 against the ``hpsv2`` package and against ``open_clip``, on the same random tiny checkpoint.

Both packages need torchvision, which this project's own environment does without.  In an environment of their own::

    pip install torch torchvision open_clip_torch transformers einops jaxtyping
    pip install --no-deps hpsv2x==1.2.0 && pip install clint ftfy regex requests timm
    pip install --no-deps --editable .
    python tests/parity/hpsv2_parity.py

Prints one line a check and exits with 1 if one fails, with 0 and a reason if a package is absent.
"""

import importlib.util
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.clip_rewards import HPSv21
from branchgrpo.rewards.hpsv2_package import HPSv2Package
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.open_clip_keys import VIT_H_14, OpenClipShape, open_clip_shapes
from branchgrpo.rewards.preprocess import Preprocess
from branchgrpo.rewards.tokenizer import load_tokenizer

FEATURE_TOLERANCE = 1e-6
"""Largest difference of a unit feature: two float32 computations of two layers, rounding about 1e-7 a layer."""

PIXEL_TOLERANCE = 1e-5
"""Largest difference of a normalised pixel: the same float32 interpolation, divided by a std of 0.26."""

TINY = OpenClipShape(
    embed_dim=32,
    image_size=28,
    patch_size=14,
    vision_width=64,
    vision_layers=2,
    vision_heads=2,
    text_width=32,
    text_layers=2,
    text_heads=2,
)
CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 28, "layers": 2, "width": 64, "head_width": 32, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PROMPTS = [
    "a photo of a cat",
    "An Astronaut riding a HORSE, 8k!!",
    "it’s a “quoted” sign that says: HELLO & goodbye",
    "caf&eacute; &amp;amp; cr\u00e8me br\u00fbl\u00e9e 123 4567",
    "  many   spaces\n and\ttabs  ",
    "\u6c34\u58a8\u753b \u65e5\u672c\u8a9e \U0001f642 emoji",
    "don't we'll they've I'm <|endoftext|> in the middle",
    "open_clip's own marks, <end_of_text> and <start_of_text>, too",
    "long " * 120,
    "",
]
SIZES = [(28, 28), (31, 17), (17, 31), (64, 48), (101, 100), (20, 9), (300, 37), (28, 27), (720, 720), (1, 28)]


def pictures(generator: np.random.Generator) -> list[np.ndarray]:
    """Random 8-bit pictures of odd sizes and aspect ratios."""
    return [generator.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]


def as_images(picture: np.ndarray) -> Images:
    """A picture as rewards take it."""
    return Images(torch.from_numpy(picture).permute(2, 0, 1).float().div(255.0).unsqueeze(0))


class Report:
    """Prints a line a check and remembers failures."""

    def __init__(self) -> None:
        self.failures = 0

    def line(self, name: str, ok: bool, detail: str) -> None:
        """One check."""
        self.failures += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}")


def check_preprocessing(report: Report, package: Any) -> None:
    """Our resize and padding against the package's, for odd sizes and aspect ratios."""
    for size in (28, 224):
        transform = package.transform.image_transform(size, is_train=False, resize_longest_max=True)
        ours = Preprocess(size, "longest_pad")
        for picture in pictures(np.random.default_rng(0)):
            theirs = transform(Image.fromarray(picture))
            mine = ours(as_images(picture))[0]
            name = f"preprocessing {picture.shape[1]}x{picture.shape[0]} to {size}"
            if theirs.shape != mine.shape:
                known = max(picture.shape[:2]) == size
                report.line(
                    name, known, f"package leaves {tuple(theirs.shape[1:])} unpadded, we pad (longest side = size)"
                )
            else:
                gap = (theirs - mine).abs().max().item()
                report.line(name, gap <= PIXEL_TOLERANCE, f"largest difference {gap:.2e}")


def check_tokens(report: Report, package: Any, merges: Path) -> None:
    """Our token ids up to the end token against the package's."""
    ours = load_tokenizer(merges, 77, "open_clip")
    theirs = package.get_tokenizer("ViT-H-14")(PROMPTS)
    mine = ours(PROMPTS)
    for text, a, b in zip(PROMPTS, theirs, mine, strict=True):
        first = [row[: row.tolist().index(ours.end) + 1].tolist() for row in (a, b)]
        report.line(f"tokens of {text[:32]!r}", first[0] == first[1], f"{len(first[0])} ids")


def check_features(report: Report, name: str, model: Any, package: Any, folder: Path, merges: Path) -> None:
    """Features and scores of our loader against those of ``model``, on the checkpoint that it saves."""
    checkpoint = folder / f"{name}.pt"
    torch.save({"state_dict": model.state_dict()}, checkpoint)
    ours = HPSv21.load(checkpoint, merges, shape=TINY)
    tokens = package.get_tokenizer("ViT-H-14")(PROMPTS)
    texts = [Prompt(i, text) for i, text in enumerate(PROMPTS)]
    shown = [as_images(p) for p in pictures(np.random.default_rng(1))[: len(PROMPTS)]]
    pixels = torch.cat([ours.encoder.preprocess(image) for image in shown])
    with torch.no_grad():
        theirs_image, theirs_text = (
            torch.nn.functional.normalize(f, dim=-1) for f in (model.encode_image(pixels), model.encode_text(tokens))
        )
        mine_image = torch.cat([ours.encoder.images(image) for image in shown])
        mine_text = ours.encoder.texts(PROMPTS)
    for kind, a, b in (("image", theirs_image, mine_image), ("text", theirs_text, mine_text)):
        gap = (a - b).abs().max().item()
        report.line(f"{name}: {kind} features", gap <= FEATURE_TOLERANCE, f"largest difference {gap:.2e}")
    scores = torch.cat([ours(image.pixels, [text]) for image, text in zip(shown, texts, strict=True)])
    gap = (scores - (theirs_image * theirs_text).sum(dim=-1)).abs().max().item()
    report.line(f"{name}: scores", gap <= FEATURE_TOLERANCE, f"largest difference {gap:.2e}")


def check_package_backend(report: Report, folder: Path, merges: Path) -> None:
    """The package as a backend, against our loader and against the package's own ``score``."""
    from hpsv2 import img_score

    checkpoint = folder / "hpsv2.pt"
    backend, ours = HPSv2Package(checkpoint, architecture="tiny"), HPSv21.load(checkpoint, merges, shape=TINY)
    img_score.model_dict.update(model=backend.model, preprocess_val=backend.transform)
    img_score.device = "cpu"
    for i, picture in enumerate(pictures(np.random.default_rng(2))[1:7]):
        prompt = Prompt(i, PROMPTS[i])
        image = as_images(picture)
        ours_score, backend_score = ours(image, [prompt]).item(), backend(image, [prompt]).item()
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="PNG")
        theirs = float(img_score.score(Image.open(buffer), prompt.text, cp=str(checkpoint))[0])
        gap = max(abs(ours_score - theirs), abs(backend_score - theirs))
        report.line(
            f"hpsv2.img_score.score, item {i}",
            gap <= FEATURE_TOLERANCE,
            f"package {theirs:.7f}, backend {backend_score:.7f}, ours {ours_score:.7f}",
        )


def check_full_size(report: Report, open_clip: Any) -> None:
    """Names and shapes of the full ViT-H-14, without weights."""
    with torch.device("meta"):
        model = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14"))
    theirs = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    ours = open_clip_shapes(VIT_H_14)
    parameters = sum(int(np.prod(shape)) for shape in ours.values())
    report.line(
        "ViT-H-14: names and shapes", theirs == ours, f"{len(ours)} tensors, {parameters / 1e6:.1f} M parameters"
    )


def main() -> int:
    """Run all checks."""
    missing = [name for name in ("torchvision", "open_clip", "hpsv2") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not installed")
        return 0
    warnings.filterwarnings("ignore")
    import open_clip
    from hpsv2.src import open_clip as package

    report = Report()
    torch.manual_seed(0)
    merges = Path(package.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.json").write_text(json.dumps(CONFIG))
        package.add_model_config(folder / "tiny.json")
        open_clip.add_model_config(folder / "tiny.json")
        check_preprocessing(report, package)
        check_tokens(report, package, merges)
        check_features(report, "open_clip", open_clip.create_model("tiny").eval(), package, folder, merges)
        model, _, _ = package.create_model_and_transforms("tiny", precision="fp32", output_dict=True)
        check_features(report, "hpsv2", model.eval(), package, folder, merges)
        check_package_backend(report, folder, merges)
        check_full_size(report, open_clip)
    print("all equal" if report.failures == 0 else f"{report.failures} checks failed")
    return int(report.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
