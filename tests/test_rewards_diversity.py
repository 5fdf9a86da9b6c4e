"""Diversity and drift against scikit-learn's kernels, definitions written out, and known limits; the command line."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_rewards import pictures, tiny_clip_folder
from PIL import Image
from torch import Tensor

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.rewards.diversity.features import ClipFeatures, PixelFeatures
from branchgrpo.rewards.diversity.folder import extract, open_folder
from branchgrpo.rewards.diversity.kernel_distance import kid, polynomial_mmd2
from branchgrpo.rewards.diversity.perceptual import mean_pairwise, perceptual_distances
from branchgrpo.rewards.diversity.report import compare
from branchgrpo.rewards.diversity.spectral import truncated_entropy, vendi_score
from branchgrpo.rewards.diversity.spread import prompt_spread
from branchgrpo.rewards.images import Images

pytest.importorskip("torchmetrics")
pairwise = pytest.importorskip("sklearn.metrics.pairwise")

PARITY = 1e-6
"""Agreement asked of two independent implementations; both sum float64 values of size up to 10³."""


def normal(n: int, dim: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + shift


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mmd2_by_sklearn(a: Tensor, b: Tensor, unbiased: bool) -> float:
    n, m, dim = len(a), len(b), a.shape[1]
    x, y = a.numpy(), b.numpy()
    kernel = [pairwise.polynomial_kernel(p, q, degree=3, gamma=1 / dim, coef0=1) for p, q in ((x, x), (y, y), (x, y))]
    if not unbiased:
        return float(kernel[0].mean() + kernel[1].mean() - 2 * kernel[2].mean())
    within = [sum(k[i, j] for i in range(len(k)) for j in range(len(k)) if i != j) for k in kernel[:2]]
    return float(within[0] / (n * (n - 1)) + within[1] / (m * (m - 1)) - 2 * kernel[2].sum() / (n * m))


@pytest.mark.parametrize(("n", "m", "dim"), [(20, 20, 8), (13, 31, 5), (2, 3, 64)])
def test_mmd2_agrees_with_scikit_learn(n: int, m: int, dim: int) -> None:
    a, b = normal(n, dim, 0), normal(m, dim, 1, shift=0.7)
    assert polynomial_mmd2(a, b) == pytest.approx(mmd2_by_sklearn(a, b, True), abs=PARITY)
    assert polynomial_mmd2(a, b, estimator="biased") == pytest.approx(mmd2_by_sklearn(a, b, False), abs=PARITY)


def test_kid_agrees_with_scikit_learn_on_its_own_subsets() -> None:
    a, b = normal(40, 6, 0), normal(60, 6, 1, shift=0.5)
    found = kid(a, b, generator(5), subsets=7, subset_size=25)
    draws, again = [], generator(5)
    for _ in range(7):
        rows = [torch.randperm(len(x), generator=again)[:25] for x in (a, b)]
        draws.append(mmd2_by_sklearn(a[rows[0]], b[rows[1]], True))
    assert found.mean == pytest.approx(np.mean(draws), abs=PARITY)
    assert found.std == pytest.approx(np.std(draws), abs=PARITY)
    assert found.std > 0
    assert kid(a, b, generator(5), subsets=7, subset_size=25) == found


def test_kid_of_whole_sets_is_one_mmd2() -> None:
    a, b = normal(30, 6, 0), normal(30, 6, 1, shift=0.5)
    found = kid(a, b, generator())
    assert found.mean == pytest.approx(polynomial_mmd2(a, b), abs=PARITY)
    assert found.std == 0.0


def test_equal_sets_are_near_zero_and_disjoint_sets_are_not() -> None:
    a = normal(400, 8, 0)
    same, other = normal(400, 8, 1), normal(400, 8, 2, shift=1.0)
    # the unbiased estimate of 0 at n = 400: its spread, measured on ten pairs of sets, is 0.01
    assert abs(polynomial_mmd2(a, same)) < 0.06
    assert abs(kid(a, same, generator(), subsets=20, subset_size=300).mean) < 0.06
    assert polynomial_mmd2(a, a, estimator="biased") == pytest.approx(0.0, abs=1e-10)
    # shift by one in each of 8 dimensions: E k differs by 3·⟨μ, μ⟩/8 + 3·(…)² + … > 5
    assert polynomial_mmd2(a, other) > 4.0
    assert kid(a, other, generator(), subsets=20, subset_size=300).mean > 4.0


def test_the_set_itself_scores_below_zero_by_the_unbiased_estimate() -> None:
    """The cross term holds the diagonal, which the within terms leave out: MMD²(a, a) = −2·(mean diagonal − off)/n."""
    a = normal(50, 4, 3)
    k = pairwise.polynomial_kernel(a.numpy(), degree=3, gamma=1 / 4, coef0=1)
    off = (k.sum() - np.trace(k)) / (50 * 49)
    assert polynomial_mmd2(a, a) == pytest.approx(-2 * (np.trace(k) / 50 - off) / 50, abs=PARITY)


def test_perceptual_distance_is_its_definition() -> None:
    maps = tuple(torch.randn(4, c, r, r, generator=generator(c)) for c, r in ((3, 4), (5, 2)))
    found = perceptual_distances(maps, weights=[1.0, 0.5])
    for i in range(4):
        for j in range(4):
            total = 0.0
            for weight, level in zip((1.0, 0.5), maps, strict=True):
                places = []
                for r in range(level.shape[2]):
                    for c in range(level.shape[3]):
                        u, v = (level[item, :, r, c].double() for item in (i, j))
                        places.append(((u / u.norm() - v / v.norm()) ** 2).sum().item())
                total += weight * sum(places) / len(places)
            assert found[i, j].item() == pytest.approx(total, abs=1e-8)
    assert mean_pairwise(found) == pytest.approx(found[~torch.eye(4, dtype=torch.bool)].mean().item())
    with pytest.raises(BranchGRPOError, match="weights"):
        perceptual_distances(maps, weights=[1.0])
    with pytest.raises(BranchGRPOError, match="items"):
        mean_pairwise(found[:1, :1])


def test_equal_images_have_no_distance_and_one_effective_item() -> None:
    same = pictures(1).expand(5, 3, 30, 22)
    features = PixelFeatures(16)
    assert mean_pairwise(perceptual_distances(features.maps(Images(same)))) == pytest.approx(0.0, abs=1e-12)
    assert vendi_score(features.vectors(Images(same))) == pytest.approx(1.0, abs=1e-9)
    assert mean_pairwise(perceptual_distances(features.maps(Images(pictures(5))))) > 0.1


def test_vendi_counts_orthogonal_items_and_agrees_with_the_kernel() -> None:
    assert vendi_score(torch.eye(7).double()) == pytest.approx(7.0)
    assert vendi_score(torch.cat([torch.eye(3), 5 * torch.eye(3)]).double()) == pytest.approx(3.0)
    x = normal(12, 5, 0)
    shares = np.linalg.eigvalsh(pairwise.cosine_similarity(x.numpy()) / 12)
    shares = shares[shares > 1e-14]
    assert vendi_score(x) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), abs=PARITY)
    with pytest.raises(BranchGRPOError, match=r"vectors\[1\]"):
        vendi_score(torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())


def test_truncated_entropy_is_that_of_a_gaussian() -> None:
    stats = pytest.importorskip("scipy.stats")
    x = normal(200, 6, 0, scale=2.0) @ normal(6, 6, 1)
    covariance = np.cov(x.numpy(), rowvar=False)
    assert truncated_entropy(x, 6) == pytest.approx(stats.multivariate_normal(cov=covariance).entropy(), abs=PARITY)
    top = np.sort(np.linalg.eigvalsh(covariance))[::-1][:3]
    assert truncated_entropy(x, 3) == pytest.approx(
        sum(0.5 * math.log(2 * math.pi * math.e * v) for v in top), abs=PARITY
    )
    assert truncated_entropy(3.0 * x, 6) - truncated_entropy(x, 6) == pytest.approx(6 * math.log(3.0), abs=PARITY)
    for vectors, rank, named in ((x, 7, "rank of the covariance"), (x[:3], 3, "items"), (0 * x, 1, "rank of")):
        with pytest.raises(BranchGRPOError, match=named):
            truncated_entropy(vectors, rank)


def test_spread_is_within_prompts_only() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [100.0, 0.0], [100.0, 1.0], [100.0, 2.0], [7.0, 7.0]]).double()
    spreads = prompt_spread(x, ["cat", "cat", "dog", "dog", "dog", "lone"])
    assert spreads == {"cat": pytest.approx(25.0), "dog": pytest.approx((1 + 4 + 1) / 3)}
    covariance = np.cov(x[2:5].numpy(), rowvar=False)
    assert spreads["dog"] == pytest.approx(2 * np.trace(covariance))
    with pytest.raises(BranchGRPOError, match="two samples"):
        prompt_spread(x[:2], ["a", "b"])
    with pytest.raises(BranchGRPOError, match=r"len\(prompts\)"):
        prompt_spread(x, ["a"])


def test_few_or_faulty_vectors_are_refused() -> None:
    a = normal(5, 3, 0)
    bad = a.clone()
    bad[2, 1] = float("nan")
    for call, named in (
        (lambda: polynomial_mmd2(a[:1], a), r"len\(a\)"),
        (lambda: polynomial_mmd2(a, bad), "features of b"),
        (lambda: kid(a, a, generator(), subsets=0), "subsets"),
        (lambda: kid(a, a, generator(), subset_size=1), "subset_size"),
        (lambda: PixelFeatures(10), "multiple of 4"),
    ):
        with pytest.raises(BranchGRPOError, match=named):
            call()


def save(folder: Path, images: Tensor, prompt: str = "") -> None:
    target = folder / prompt
    target.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(target / f"{i:03}.png")


def test_folders_keep_prompts_and_sizes_may_differ(tmp_path: Path) -> None:
    save(tmp_path, pictures(2, 40, 30), "cat")
    save(tmp_path, pictures(1, 33, 57, seed=1), "dog")
    (tmp_path / "notes.txt").write_text("not an image")
    folder = open_folder(tmp_path)
    assert folder.prompts == ("cat", "cat", "dog")
    assert torch.equal(folder.read(2)[0], pictures(1, 33, 57, seed=1)[0])
    found = extract(folder, PixelFeatures(16), generator(), map_limit=2)
    assert found.vectors.shape == (3, 3 * 16 * 16)
    assert [len(level) for level in found.maps] == [2, 2, 2]
    (tmp_path / "cat" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(BranchGRPOError, match=r"broken\.png"):
        extract(open_folder(tmp_path), PixelFeatures(16), generator())
    with pytest.raises(BranchGRPOError, match="existing folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(BranchGRPOError, match="images in"):
        open_folder(tmp_path / "dog")


def test_clip_features_are_embeddings_and_patch_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from branchgrpo.rewards.clip_encoder import ClipEncoder

    folder, _ = tiny_clip_folder(tmp_path)
    encoder = ClipEncoder.from_transformers(folder, None, chunk=2)
    features, images = ClipFeatures(encoder, layers=2), Images(pictures(3))
    assert torch.equal(features.vectors(images), encoder.images(images).double())
    maps = features.maps(images)
    assert [tuple(level.shape) for level in maps] == [(3, 48, 2, 2)] * 2
    assert features.depths == (1, 3)
    hidden = encoder.model.vision_model(
        pixel_values=encoder.preprocess(images), output_hidden_states=True
    ).hidden_states
    # place (row 1, column 0) is patch 2, token 3; chunks of another size change float32 rounding only
    assert torch.allclose(maps[1][:, :, 1, 0], hidden[3][:, 3], atol=1e-4)


def test_report_compares_two_sets(tmp_path: Path) -> None:
    save(tmp_path / "a", pictures(6, seed=0), "p")
    save(tmp_path / "b", pictures(6, seed=1) * 0.3, "p")
    a, b = (extract(open_folder(tmp_path / n), PixelFeatures(8), generator()) for n in "ab")
    report = compare(a, b, "pixels 8", rank=3)
    assert report.mmd2 == pytest.approx(polynomial_mmd2(a.vectors, b.vectors))
    assert report.a.truncated_entropy is not None
    assert report.a.truncated_entropy > report.b.truncated_entropy
    assert report.a.prompt_spread > report.b.prompt_spread
    assert compare(a, b, "pixels 8", rank=20).a.truncated_entropy is None


def test_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from branchgrpo.cli.diversity import main

    save(tmp_path / "a", pictures(4, seed=0), "cat")
    save(tmp_path / "a", pictures(3, seed=1), "dog")
    save(tmp_path / "b", 0.5 * pictures(5, seed=2))
    words = ["--a", str(tmp_path / "a"), "--b", str(tmp_path / "b"), "--rank", "3", "--seed", "4"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["a"]["items"] == 7
    assert result["a"]["prompts"] == 2
    assert result["b"]["prompts"] == 1
    assert result["features"] == "pixels 32"
    assert result["seed"] == 4
    assert result["mmd2"] > 0
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert main(words) == 0
    table = capsys.readouterr().out
    for part in ("Vendi score", "KID", "MMD²", f"{result['a']['vendi']:.4f}"):
        assert part in table


def test_command_takes_a_clip_folder_and_refuses_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from branchgrpo.cli.diversity import main
    from branchgrpo.cli.errors import UsageError

    clip, _ = tiny_clip_folder(tmp_path)
    save(tmp_path / "a", pictures(4, seed=0))
    words = ["--a", str(tmp_path / "a"), "--b", str(tmp_path / "a")]
    assert main([*words, "--rank", "2", "--json", "--features", "clip", str(clip)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["features"].startswith("clip clip ")
    assert result["a"] == result["b"]
    for extra, named in (
        (["--features", "clip"], "clip takes one"),
        (["--features", "pixels", "x"], "pixels takes no path"),
        (["--features", "pixel"], "did you mean 'pixels'"),
        (["--pairs-of", "1"], "≥ 2"),
    ):
        with pytest.raises(UsageError, match=named):
            main([*words, *extra])
    with pytest.raises(UsageError, match="--b"):
        main(["--a", "x"])
