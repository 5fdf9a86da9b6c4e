"""The three thirds of the digits: real, disjoint, stratified, seeded."""

import pytest
import torch

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.digits_data import PARTS, SplitConfig, load_part


def test_the_thirds_are_disjoint_and_cover_all_images():
    rows = [set(load_part(part).rows.tolist()) for part in PARTS]
    assert [len(r) for r in rows] == [599, 599, 599]
    assert set.union(*rows) == set(range(1797))


def test_no_image_of_one_third_occurs_in_another():
    seen = [{image.numpy().tobytes() for image in load_part(part).images} for part in PARTS]
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            assert not one & other


def test_every_digit_is_spread_evenly():
    counts = torch.stack([torch.bincount(load_part(part).labels, minlength=10) for part in PARTS])
    assert int((counts.amax(dim=0) - counts.amin(dim=0)).max()) <= 1


def test_images_are_the_original_pixels_scaled():
    from sklearn.datasets import load_digits

    data = load_part("judge")
    assert float(data.images.min()) == -1.0
    assert float(data.images.max()) == 1.0
    original = torch.from_numpy(load_digits().images)[data.rows]
    assert torch.equal((data.images.squeeze(1).double() + 1.0) * 8.0, original)


def test_the_seed_decides_the_cut():
    first, again, other = (load_part("generator", SplitConfig(seed)) for seed in (0, 0, 1))
    assert torch.equal(first.rows, again.rows)
    assert not torch.equal(first.rows, other.rows)


def test_unknown_part_and_seed_are_refused():
    with pytest.raises(OptionError, match="part = 'test': must be one of"):
        load_part("test")
    with pytest.raises(OptionError, match=r"split\.seed = -1"):
        SplitConfig(-1)
