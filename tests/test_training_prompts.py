"""Prompt files of every kind, and the sampler that cuts them into batches."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.training.config.schema import DataConfig
from branchgrpo.training.data import prompts as prompt_files
from branchgrpo.training.data.loading import load_prompts
from branchgrpo.training.data.prompts import LONGEST, read_prompts
from branchgrpo.training.data.sampler import Sampler

TEXTS = ("a red cube", 'a "quoted", green bird', "ein blauer Himmel, über dem Meer", "空の青")
ROWS = [{"id": str(i), "prompt": text, "caption": f"caption {i}"} for i, text in enumerate(TEXTS)]


def parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    """A parquet file."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow reads parquet")
    from pyarrow import parquet as files

    files.write_table(arrow.table(columns), path)
    return path


def made(folder: Path, kind: str) -> Path:
    """The texts in a file of a kind."""
    path = folder / f"prompts.{kind}"
    if kind == "txt":
        path.write_text("".join(f"  {text}\r\n" for text in TEXTS) + "\n\n", encoding="utf-8-sig", newline="")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(TEXTS), encoding="utf-8")
    elif kind in ("csv", "tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        parquet(path, {name: [row[name] for row in ROWS] for name in ROWS[0]})
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "tsv", "parquet"])
def test_every_kind_of_file_holds_the_same_prompts(tmp_path: Path, kind: str) -> None:
    assert read_prompts(made(tmp_path, kind)) == tuple(Prompt(i, text) for i, text in enumerate(TEXTS))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_can_be_named(tmp_path: Path, kind: str) -> None:
    assert read_prompts(made(tmp_path, kind), "caption")[3] == Prompt(3, "caption 3")
    with pytest.raises(InputError, match=r"columns.*with 'title'"):
        read_prompts(made(tmp_path, kind), "title")


def test_a_column_is_found_by_its_usual_names(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "caption": "two"}\n"three"\n{"caption": "four"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["one", "three", "four"]


def test_a_repeated_prompt_is_read_once_and_ids_are_positions(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\none \nthree\ntwo\n", encoding="utf-8")
    assert read_prompts(path) == (Prompt(0, "one"), Prompt(1, "two"), Prompt(3, "three"))


def test_hpdv2_benchmarks_and_pairs_are_read(tmp_path: Path) -> None:
    benchmark, pairs = tmp_path / "benchmark_photo.json", tmp_path / "train.json"
    benchmark.write_text(json.dumps(["one", "two"]), encoding="utf-8")
    pairs.write_text(
        json.dumps(
            [{"prompt": text, "image_path": ["a", "b"], "human_preference": [1, 0]} for text in ("x", "x", "y")]
        ),
        encoding="utf-8",
    )
    assert [prompt.text for prompt in read_prompts(benchmark)] == ["one", "two"]
    assert read_prompts(pairs) == (Prompt(0, "x"), Prompt(2, "y"))


BAD = {
    "a.txt": [
        (b"", "no prompts"),
        (b"\n\n", "no prompts"),
        (b"one\n\ntwo\n", r"line 2 = ''.*not empty"),
        (b"one\n\xff\xfe\n", "byte 4"),
        (b"o\x00ne\n", "control characters"),
        (b"x" * (LONGEST + 1), "characters"),
    ],
    "a.jsonl": [
        (b'{"prompt": "x"}\n{"prompt"\n', "line 2"),
        (b'{"prompt": 3}\n', "text, not int"),
        (b'{"prompt": ""}\n', "not empty"),
        (b'{"promt": "x"}\n', "columns"),
        (b'"\\ud800"\n', "surrogate"),
        (b"[" * 100_000, "line 1"),
    ],
    "a.json": [(b'{"prompt": "x"}', "a list of prompts"), (b"[", "valid JSON"), (b"[null]", "text, not NoneType")],
    "a.csv": [
        (b"", "columns"),
        (b"prompt\n", "no prompts"),
        (b'prompt,x\n"one,2\n', "well-formed"),
        (b"x,prompt\n1\n", "not empty"),
        (b"prompt\na cat, asleep\n", "a.csv: line 2: fields = 2: must be 1, as the header has"),
        (b"prompt\n" + b"x" * 200_000, "well-formed"),
    ],
    "a.parquet": [(b"PAR1", "parquet"), (b"", "parquet")],
    "a.xlsx": [(b"x", "ends in one of")],
}
CASES = [pytest.param(name, data, text, id=f"{name}-{i}") for name in BAD for i, (data, text) in enumerate(BAD[name])]


@pytest.mark.parametrize(("name", "content", "message"), CASES)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(tmp_path / name)
    assert len(str(caught.value)) < 500


def test_missing_files_and_columns_of_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="existing file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(InputError, match="is no table"):
        read_prompts(made(tmp_path, "txt"), "prompt")


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "LARGEST", 3)
    with pytest.raises(InputError, match="at most 3 bytes"):
        read_prompts(made(tmp_path, "txt"))


def test_null_in_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row 1"):
        read_prompts(parquet(tmp_path / "a.parquet", {"prompt": ["x", None]}))


# ---- prompts of a run ------------------------------------------------------------------------------------------------


def test_the_ten_digits_are_trained_and_evaluated() -> None:
    found = load_prompts(DataConfig(held_out_prompts=3))
    assert [prompt.text for prompt in found.train] == list("0123456789")
    assert found.held_out == found.train[:3]


def test_held_out_prompts_are_the_last_ones_or_a_file_of_their_own(tmp_path: Path) -> None:
    path, other = made(tmp_path, "csv"), made(tmp_path, "jsonl")
    found = load_prompts(DataConfig(str(path), held_out_prompts=1, prompts_per_iteration=3))
    assert [prompt.id for prompt in found.train] == [0, 1, 2]
    assert [prompt.id for prompt in found.held_out] == [3]
    own = load_prompts(DataConfig(str(path), held_out=str(other), held_out_prompts=2, prompts_per_iteration=4))
    assert len(own.train) == 4
    assert [prompt.id for prompt in own.held_out] == [0, 1]


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    path = str(made(tmp_path, "txt"))
    with pytest.raises(OptionError, match=r"held_out_prompts = 4: must be less than the 4"):
        load_prompts(DataConfig(path, held_out_prompts=4, prompts_per_iteration=1))
    with pytest.raises(OptionError, match=r"prompts_per_iteration = 4: must be at most 3"):
        load_prompts(DataConfig(path, held_out_prompts=1, prompts_per_iteration=4))
    with pytest.raises(OptionError, match=r"held_out_prompts = 11: must be at most 10"):
        load_prompts(DataConfig(held_out_prompts=11))


# ---- sampler ---------------------------------------------------------------------------------------------------------

QUICK = settings(deadline=None, max_examples=40, derandomize=True)
SIZES = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def sampler(size: tuple[int, int], seed: int = 0, shuffle: bool = True) -> Sampler:
    """A sampler of n prompts whose ids are not their positions, and of batches of some size."""
    return Sampler(tuple(Prompt(3 * i + 1, str(i)) for i in range(size[0])), size[1], seed, shuffle)


@QUICK
@given(size=SIZES, seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_an_epoch_holds_no_prompt_twice_and_drops_less_than_a_batch(
    size: tuple[int, int], seed: int, shuffle: bool
) -> None:
    made = sampler(size, seed, shuffle)
    for epoch in range(2):
        start = epoch * made.batches
        seen = Counter(p for i in range(start, start + made.batches) for p in made.batch(i))
        assert set(seen.values()) == {1}
        assert size[0] - size[1] < len(seen) <= size[0]


@QUICK
@given(size=SIZES, seed=st.integers(0, 2**40), iteration=st.integers(0, 10**6))
def test_a_batch_is_a_function_of_seed_and_iteration(size: tuple[int, int], seed: int, iteration: int) -> None:
    made = sampler(size, seed)
    made.batch(iteration + 1)
    assert made.batch(iteration) == sampler(size, seed).batch(iteration)


@QUICK
@given(ranks=st.integers(1, 4), parts=st.integers(1, 4), width=st.integers(1, 3), iteration=st.integers(0, 99))
def test_the_parts_of_all_ranks_are_the_batch_in_order(ranks: int, parts: int, width: int, iteration: int) -> None:
    made = sampler((60, ranks * parts * width))
    batch = made.batch(iteration)
    joined = [p for rank in range(ranks) for part in range(parts) for p in made.part(batch, rank, ranks, part, parts)]
    assert joined == list(batch)


def test_epochs_and_seeds_have_their_own_order_unless_nothing_is_shuffled() -> None:
    first = sampler((20, 20))
    assert len({first.batch(0), first.batch(1), sampler((20, 20), seed=1).batch(0)}) == 3
    plain = sampler((20, 20), shuffle=False)
    assert plain.batch(0) == plain.batch(5) == plain.prompts


def test_every_prompt_is_drawn_about_equally_often() -> None:
    made = sampler((7, 3))
    counts = Counter(p.id for i in range(2 * 500) for p in made.batch(i))
    expected, deviation = 500 * 6 / 7, (500 * 6 / 49) ** 0.5
    assert all(abs(count - expected) < 5 * deviation for count in counts.values())
    assert len(counts) == 7


def test_orders_do_not_change_between_versions() -> None:
    assert "".join(prompt.text for prompt in sampler((10, 10), seed=3).batch(0)) == "5371209684"


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(OptionError, match="prompts_per_iteration = 4: must be at most 3"):
        sampler((3, 4))
    with pytest.raises(OptionError, match="prompts_per_iteration = 0"):
        sampler((3, 0))
    with pytest.raises(InputError, match="ids"):
        Sampler((Prompt(1, "a"), Prompt(1, "b")), 1, 0)
    with pytest.raises(OptionError, match=r"run\.seed = -1"):
        sampler((3, 1), seed=-1)
    with pytest.raises(InputError, match="iteration = -1"):
        sampler((3, 1)).batch(-1)
    made = sampler((12, 12))
    with pytest.raises(OptionError, match=r"a multiple of 2 processes × update\.accumulation = 4"):
        made.part(made.batch(0), 0, 2, 0, 4)
    with pytest.raises(InputError, match="rank = 2"):
        made.part(made.batch(0), 2, 2)
    with pytest.raises(InputError, match="part = 1"):
        made.part(made.batch(0), 0, 2, 1, 1)
