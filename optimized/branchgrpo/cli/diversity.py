"""``branchgrpo diversity``: how diverse two folders of images are, and how far they lie apart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from branchgrpo.cli.errors import UsageError, unknown
from branchgrpo.cli.output import deliver
from branchgrpo.cli.parser import Parser, integer_from

if TYPE_CHECKING:
    from branchgrpo.rewards.diversity.features import FeatureExtractor

EXAMPLES = """\
  branchgrpo diversity --a before/ --b after/
  branchgrpo diversity --a before/ --b after/ --features clip openai/clip-vit-large-patch14
  branchgrpo diversity --a before/ --b after/ --json drift.json
"""
FEATURES = ("pixels", "clip")


def build_parser() -> Parser:
    """The options of the subcommand."""
    parser = Parser(
        "branchgrpo diversity",
        "Diversity within two folders of images and the drift between them. Images in a sub-folder belong to the\n"
        "prompt that the sub-folder is named after.",
        EXAMPLES,
    )
    parser.add_argument("--a", metavar="DIR", required=True, help="first folder, e.g. before training")
    parser.add_argument("--b", metavar="DIR", required=True, help="second folder, e.g. after training")
    parser.add_argument(
        "--features",
        metavar="KIND",
        nargs="+",
        default=["pixels"],
        help="pixels (32×32, no weights needed), or clip PATH: a CLIP folder, hub id, or open_clip ViT-H-14 checkpoint",
    )
    parser.add_argument("--rank", type=integer_from(1), default=20, help="K of the truncated entropy (default 20)")
    parser.add_argument("--subsets", type=integer_from(1), default=100, help="subsets of KID (default 100)")
    parser.add_argument("--subset-size", type=integer_from(2), default=1000, help="images a subset (default 1000)")
    parser.add_argument("--pairs-of", type=integer_from(2), default=256, help="images whose pairs count (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the subsets (default 0)")
    parser.add_json()
    return parser


def extractor(words: Sequence[str]) -> "FeatureExtractor":
    """The feature extractor that ``--features`` asks for.

    Raises:
        UsageError: an unknown kind, or a path that is missing or superfluous.
    """
    kind, rest = words[0], list(words[1:])
    if kind not in FEATURES:
        raise unknown("features", kind, FEATURES, f"one of {', '.join(FEATURES)}")
    if len(rest) != (kind == "clip"):
        raise UsageError(f"--features {' '.join(words)}: pixels takes no path, clip takes one")
    if kind == "pixels":
        from branchgrpo.rewards.diversity.features import PixelFeatures

        return PixelFeatures()
    from branchgrpo.rewards.diversity.features import ClipFeatures, image_encoder

    return ClipFeatures(image_encoder(rest[0]))


def main(argv: Sequence[str]) -> int:
    """Compare two folders and print or write the result."""
    args = build_parser().parse(argv)
    features = extractor(args.features)
    import torch

    from branchgrpo.rewards.diversity.folder import extract, open_folder
    from branchgrpo.rewards.diversity.report import compare

    folders = [open_folder(args.a), open_folder(args.b)]
    generator = torch.Generator().manual_seed(args.seed)
    a, b = (extract(folder, features, generator, args.pairs_of) for folder in folders)
    report = compare(
        a, b, features.name, rank=args.rank, subsets=args.subsets, subset_size=args.subset_size, seed=args.seed
    )
    result = {"folder_a": str(args.a), "folder_b": str(args.b), **report.as_dict()}
    deliver(result, args.json, lambda: show(result))
    return 0


def show(result: dict[str, Any]) -> None:
    """Print the table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"features: {result['features']}", title_justify="left")
    table.add_column("diversity")
    table.add_column(str(result["folder_a"]), justify="right")
    table.add_column(str(result["folder_b"]), justify="right")
    rank, pairs = result["a"]["entropy_rank"], "pairwise_items"
    rows = {
        "images": "items",
        f"mean pairwise distance ({result['a'][pairs]} and {result['b'][pairs]} images)": "mean_pairwise_distance",
        f"truncated entropy (K = {rank})": "truncated_entropy",
        "Vendi score": "vendi",
        "spread within a prompt": "prompt_spread",
        "prompts with two images or more": "prompts",
    }
    for title, key in rows.items():
        table.add_row(title, number(result["a"][key]), number(result["b"][key]))
    console = Console()
    console.print(table)
    distance = result["kid"]
    console.print(f"KID {distance['mean']:.6f} ± {distance['std']:.6f} (spread over subsets)", highlight=False)
    console.print(f"MMD² {result['mmd2']:.6f} (cubic polynomial kernel, unbiased)", highlight=False)


def number(value: float | int | None) -> str:
    """A value for the table; what is not defined is a dash."""
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
