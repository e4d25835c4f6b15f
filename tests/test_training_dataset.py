"""The dataset reader: shards, order, batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from experiments.training.dataset import (
    TokenDataset,
    TokenSequence,
    plan_batches,
    read_sequences,
    shard_name,
    write_meta,
    write_shard,
)
from specdec.errors import ConfigError, WeightsError


def random_sequences(count: int, seed: int, longest: int = 40) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        token_ids = rng.integers(0, 97, length, dtype=np.int32)
        num_prompt = int(rng.integers(0, length))
        sequences.append(TokenSequence(token_ids, num_prompt, 0.5, int(rng.integers(3))))
    return sequences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, count in enumerate((50, 1, 30)):
        write_shard(tmp_path / shard_name("train", index), random_sequences(count, index))
    write_shard(tmp_path / shard_name("valid", 0), random_sequences(4, 9))
    write_shard(tmp_path / shard_name("valid", 1), [])
    write_meta(tmp_path, {"sources": ["a", "b", "c"]})
    return tmp_path


def same(first: TokenSequence, second: TokenSequence) -> bool:
    return (
        first.token_ids.tolist() == second.token_ids.tolist()
        and first.num_prompt == second.num_prompt
        and first.temperature == second.temperature
        and first.source == second.source
    )


def test_folders_of_a_pattern_are_one_dataset(folder: Path) -> None:
    first, second = folder / "set-1", folder / "set-2"
    for index, own in enumerate((second, first)):
        own.mkdir()
        write_shard(own / shard_name("train", 0), random_sequences(20, index))
        write_meta(own, {"sources": ["a", "b", "c"]})
    dataset = TokenDataset(f"{folder}/set-*")
    written = random_sequences(20, 1) + random_sequences(20, 0)  # in the order of the names
    assert len(dataset) == 40
    assert all(same(dataset.sequence(i), s) for i, s in enumerate(written))
    write_meta(second, {"sources": ["a", "c"]})
    with pytest.raises(ConfigError, match="other sources than"):
        TokenDataset(f"{folder}/set-*")


def test_sequences_are_read_as_they_were_written(folder: Path) -> None:
    written = [s for index, n in enumerate((50, 1, 30)) for s in random_sequences(n, index)]
    dataset = TokenDataset(folder)
    assert len(dataset) == len(written)
    assert dataset.num_tokens == sum(map(len, written))
    assert all(same(dataset.sequence(i), s) for i, s in enumerate(written))
    assert len(TokenDataset(folder, "valid")) == 4
    assert dataset.sources == ["a", "b", "c"]
    assert dataset.sequence(0).token_ids.dtype == np.int32


def test_files_have_the_tensors_that_the_format_names(folder: Path) -> None:
    shard = load_file(folder / "train-00000.safetensors")
    assert {name: str(part.dtype) for name, part in shard.items()} == {
        "token_ids": "int32",
        "starts": "int64",
        "num_prompt": "int32",
        "temperature": "float32",
        "source": "int32",
    }
    assert shard["starts"][0] == 0
    assert shard["starts"][-1] == len(shard["token_ids"])
    assert read_sequences(folder / "valid-00001.safetensors") == []


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [40, 41, 200, 10_000])
def test_an_epoch_holds_every_sequence_once_inside_the_budget(
    folder: Path, padded: bool, max_tokens: int
) -> None:
    dataset = TokenDataset(folder)
    plan = dataset.plan(max_tokens, seed=0, padded=padded)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(dataset)))
    for indices in plan:
        lengths = dataset.lengths[indices]
        size = lengths.max() * len(lengths) if padded else lengths.sum()
        assert 0 < size <= max_tokens


def test_batches_are_filled() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 5000)
    plan = plan_batches(lengths, 20_000, seed=0, epoch=0, padded=True)
    used = lengths.sum() / (len(plan) * 20_000)
    assert used > 0.85, used


def test_order_depends_on_seed_and_epoch_alone(folder: Path) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        plan = TokenDataset(folder).plan(100, seed, epoch)
        return np.concatenate(plan).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_reading_goes_on_at_an_index(folder: Path) -> None:
    dataset = TokenDataset(folder)
    plan = dataset.plan(100, seed=3, epoch=2)
    whole = list(dataset.batches(plan))
    rest = list(TokenDataset(folder).batches(plan, first=4))
    assert len(rest) == len(whole) - 4
    for first, second in zip(whole[4:], rest, strict=True):
        assert torch.equal(first.token_ids, second.token_ids)


def test_ranks_share_an_epoch_in_equal_numbers(folder: Path) -> None:
    dataset = TokenDataset(folder)
    whole = dataset.plan(64, seed=0)
    parts = [dataset.plan(64, seed=0, rank=rank, num_ranks=4) for rank in range(4)]
    assert {len(part) for part in parts} == {len(whole) // 4}
    seen = np.concatenate([indices for part in parts for indices in part])
    assert len(np.unique(seen)) == len(seen)


def test_a_batch_tells_where_its_tokens_belong(folder: Path) -> None:
    dataset = TokenDataset(folder)
    batch = dataset.batch([3, 60, 7])
    sequences = [dataset.sequence(i) for i in (3, 60, 7)]
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
    answers = np.concatenate([np.arange(len(s)) >= s.num_prompt for s in sequences])
    assert batch.positions.tolist() == positions.tolist()
    assert batch.is_answer.tolist() == answers.tolist()
    token_ids, is_token = batch.padded(pad_token_id=96)
    assert token_ids.shape == (3, max(map(len, sequences)))
    for row, mask, sequence in zip(token_ids, is_token, sequences, strict=True):
        assert row[mask].tolist() == sequence.token_ids.tolist()
        assert (row[~mask] == 96).all()
        assert not mask[len(sequence) :].any()


def test_long_sequences_are_cut_and_lone_prompts_left_out(folder: Path) -> None:
    whole, cut = TokenDataset(folder), TokenDataset(folder, max_len=10)
    kept = [s for s in map(whole.sequence, range(len(whole))) if s.num_prompt < min(len(s), 10)]
    assert len(cut) == len(kept) < len(whole)
    for i, sequence in enumerate(kept):
        assert cut.sequence(i).token_ids.tolist() == sequence.token_ids[:10].tolist()


def test_tokens_are_counted(folder: Path) -> None:
    dataset = TokenDataset(folder)
    sequences = [dataset.sequence(i) for i in range(len(dataset))]
    everything = np.concatenate([s.token_ids for s in sequences])
    answers = np.concatenate([s.token_ids[s.num_prompt :] for s in sequences])
    assert (dataset.token_counts(97, answers_only=False) == np.bincount(everything)).all()
    expected = np.bincount(answers, minlength=97)
    assert (dataset.token_counts(97) == expected).all()


def test_mistakes_are_told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match=r"is no dataset: meta\.json"):
        TokenDataset(empty)
    write_meta(empty, {"sources": []})
    with pytest.raises(ConfigError, match="no sequence of the split 'valid'"):
        TokenDataset(empty, "valid")
    with pytest.raises(ConfigError, match="split='test' is not allowed; give train or valid"):
        TokenDataset(folder, "test")
    with pytest.raises(ConfigError, match="batch of 10 tokens cannot hold a sequence of"):
        TokenDataset(folder).plan(10, seed=0)


def test_damaged_shards_are_told(folder: Path) -> None:
    path = folder / "train-00000.safetensors"
    shard = load_file(path)
    save_file(shard | {"starts": shard["starts"] + 1}, path)
    with pytest.raises(WeightsError, match="starts do not divide its tokens"):
        TokenDataset(folder)
    save_file(shard | {"temperature": shard["temperature"].astype(np.float64)}, path)
    with pytest.raises(WeightsError, match="is no shard of a dataset: temperature"):
        TokenDataset(folder)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WeightsError, match="cannot be read"):
        TokenDataset(folder)
    (folder / "meta.json").write_text(json.dumps([])[:1])
    with pytest.raises(ConfigError, match="is no dataset"):
        TokenDataset(folder)
