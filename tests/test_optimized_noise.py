"""Noise sources: keyed numbers are the contract's, fast ones are Philox; both depend on the key alone."""

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, condition_of, preset_plan, prompts_of, shapes_unchecked
from torch import Tensor

from branchgrpo.optimized import philox as philox_module
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.philox import PhiloxNoise, host_mix, normal_rows, philox, stream_words
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.noise import KeyedNoise as ReferenceNoise
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole, NoiseSource

CPU = torch.device("cpu")
SOURCES = pytest.mark.parametrize("make", [KeyedNoise, PhiloxNoise])


def keys_of(count: int, *, iteration: int = 3, role: NoiseRole = NoiseRole.PRIVATE, depth: int = 4) -> NoiseKeys:
    at = torch.arange(count)
    return NoiseKeys(iteration, role, depth, 11 * (at // 6), at // 3 % 2, at % 3)


def test_keyed_numbers_are_the_references() -> None:
    for dtype in (torch.float64, torch.float32):
        ours = KeyedNoise(8).draw(keys_of(12), LATENT, dtype, CPU)
        assert torch.equal(ours, ReferenceNoise(8).draw(keys_of(12), LATENT, dtype, CPU))


def test_philox_gives_the_published_known_answers() -> None:
    """Vectors of Random123's ``kat_vectors`` for philox4x32-10."""
    full, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    known = {
        (0,) * 6: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (full,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for words, answer in known.items():
        assert tuple(int(w) for w in philox(*(torch.tensor([word]) for word in words))) == answer


def test_host_mix_separates_neighbouring_keys() -> None:
    values = {
        host_mix(seed, iteration, role, depth)
        for seed in range(5)
        for iteration in range(5)
        for role in range(3)
        for depth in range(5)
    }
    assert len(values) == 5 * 5 * 3 * 5
    assert all(0 <= value < 2**64 for value in values)


@SOURCES
def test_draws_depend_on_the_key_alone(make: type) -> None:
    source, keys = make(5), keys_of(12)
    whole = source.draw(keys, LATENT, torch.float64, CPU)
    back = torch.arange(11, -1, -1)
    turned = NoiseKeys(keys.iteration, keys.role, keys.depth, keys.prompts[back], keys.roots[back], keys.nodes[back])
    assert torch.equal(source.draw(turned, LATENT, torch.float64, CPU), whole[back])
    for i in range(12):
        at = slice(i, i + 1)
        one = NoiseKeys(keys.iteration, keys.role, keys.depth, keys.prompts[at], keys.roots[at], keys.nodes[at])
        assert torch.equal(make(5).draw(one, LATENT, torch.float64, CPU)[0], whole[i])


@SOURCES
def test_draws_in_bulk_are_the_draws_one_by_one(make: type) -> None:
    source = make(5)
    several = [
        keys_of(12),
        keys_of(5, depth=7),
        keys_of(3, role=NoiseRole.SHARED),
        keys_of(2, iteration=9, role=NoiseRole.ROOT, depth=0),
    ]
    for found, keys in zip(source.draw_all(several, LATENT, torch.float32, CPU), several, strict=True):
        assert torch.equal(found, source.draw(keys, LATENT, torch.float32, CPU))


def test_keyed_draws_in_bulk_are_the_references() -> None:
    several = [keys_of(12), keys_of(5, depth=7), keys_of(3, iteration=9, role=NoiseRole.SHARED)]
    for found, keys in zip(KeyedNoise(8).draw_all(several, LATENT, torch.float64, CPU), several, strict=True):
        assert torch.equal(found, ReferenceNoise(8).draw(keys, LATENT, torch.float64, CPU))
    with pytest.raises(OptionError, match=r"noise key depth = 16777216: must be an integer in 0\.\.2\^24 − 1"):
        KeyedNoise(8).draw(keys_of(2, depth=2**24), LATENT, torch.float64, CPU)


def random_streams(draws: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    start, twist = torch.randint(-(2**63), 2**63 - 1, (2, draws), generator=generator)
    return start, twist


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 100, 255, 256, 1000, 4097])
def test_fast_numbers_do_not_depend_on_their_place_in_the_batch(size: int) -> None:
    """Vectorised logarithms and cosines must give one number one result wherever it lies in the array."""
    start, twist = (
        torch.randint(-(2**63), 2**63 - 1, (37,), generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    whole = normal_rows(start, twist, size)
    assert whole.shape == (37, size)
    for first, last in ((0, 1), (1, 2), (3, 10), (36, 37), (5, 37)):
        assert torch.equal(normal_rows(start[first:last], twist[first:last], size), whole[first:last])


def test_fast_numbers_are_the_same_by_parts_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start, twist = (
        torch.randint(-(2**63), 2**63 - 1, (50,), generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    whole = normal_rows(start, twist, 130)
    for block in (1, 300, 1000, 2**30):
        monkeypatch.setattr(philox_module, "BLOCK", block)
        assert torch.equal(normal_rows(start, twist, 130), whole)


def test_stream_words_are_splitmix64() -> None:
    """Known answers of SplitMix64 with seed 1234567, whose first word is the finaliser of seed + γ."""
    found = stream_words(torch.tensor(1234567), torch.tensor(0), torch.arange(1, 6))
    known = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    assert tuple(int(word) % 2**64 for word in found) == known
    assert len(set(stream_words(torch.tensor(5), torch.tensor(77), torch.arange(2**16)).tolist())) == 2**16


@SOURCES
def test_every_part_of_the_key_counts(make: type) -> None:
    base = make(5).draw(keys_of(12), LATENT, torch.float64, CPU)
    others = [
        make(6).draw(keys_of(12), LATENT, torch.float64, CPU),
        make(5).draw(keys_of(12, iteration=4), LATENT, torch.float64, CPU),
        make(5).draw(keys_of(12, role=NoiseRole.SHARED), LATENT, torch.float64, CPU),
        make(5).draw(keys_of(12, depth=5), LATENT, torch.float64, CPU),
    ]
    every = torch.cat([base, *others])
    assert len(torch.unique(every)) == every.numel()


@SOURCES
def test_numbers_are_standard_normal_and_uncorrelated(make: type) -> None:
    rows, size = 64, 4096
    z = make(2).draw(keys_of(rows), (size,), torch.float64, CPU)
    n = rows * size
    # Five standard errors: each of the four checks fails by chance less than once in 10⁶ seeds, and the seed is fixed.
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.var()) - 1.0) < 5 * (2 / n) ** 0.5
    assert abs(float((z**4).mean()) - 3.0) < 5 * (96 / n) ** 0.5
    correlation = (z @ z.T / size).fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 6 / size**0.5


@SOURCES
@pytest.mark.parametrize("chunk", [1, 5, None])
@shapes_unchecked()
def test_chunks_and_prompt_order_change_no_number(make: type, chunk: int | None) -> None:
    plan, prompts, condition = preset_plan("branchgrpo"), prompts_of(2), condition_of(2)
    noise: NoiseSource = make(3)

    class Still(SmallModel):
        """A velocity that no batching can change."""

        def forward(self, x: Tensor, sigma: Tensor, condition: object) -> Tensor:
            return 0.25 * x

    base = rollout(plan, Still(), prompts, condition, Sampling(noise, LATENT))
    back = torch.tensor([1, 0])
    turned = rollout(plan, Still(), prompts[::-1], condition.gather(back), Sampling(noise, LATENT, chunk=chunk))
    for one, other in zip(base.states, turned.states, strict=True):
        assert torch.equal(one[back], other)
    alone = rollout(plan, Still(), prompts[1:], condition.gather(back[:1]), Sampling(noise, LATENT, chunk=chunk))
    for one, other in zip(base.states, alone.states, strict=True):
        assert torch.equal(one[1:], other)


def test_a_seed_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match=r"noise seed = -1: must be an integer in 0\.\.2\^64 − 1"):
        PhiloxNoise(-1)
