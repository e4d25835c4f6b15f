"""Token sequences on disk, and the batches that a trainer reads from them.

A dataset is a folder of shards beside `meta.json`:

    train-00000.safetensors, ..., valid-00000.safetensors, ...
        token_ids    [T] int32, all sequences of the shard end to end
        starts       [S + 1] int64, where each sequence begins in them
        num_prompt   [S] int32, tokens before the answer; 0 = learn from all of them
        temperature  [S] float32, at which the answer was drawn
        source       [S] int32, index into the sources of meta.json

A batch is a pure function of (seed, epoch, index), so a reader that was stopped goes on where it
was. Needs torch, safetensors and numpy.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from specdec.errors import ConfigError, WeightsError

META_NAME = "meta.json"
SPLITS = ("train", "valid")
# Sequences that are sorted by length together: enough for batches of like lengths, few enough for
# batches that differ from epoch to epoch.
_WINDOW = 4096
_DTYPES = {
    "token_ids": np.int32,
    "starts": np.int64,
    "num_prompt": np.int32,
    "temperature": np.float32,
    "source": np.int32,
}


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its answer."""

    token_ids: np.ndarray  # [n] int32
    num_prompt: int  # tokens before the answer
    temperature: float = 0.0
    source: int = 0

    def __len__(self) -> int:
        """Return the number of tokens, prompt included."""
        return len(self.token_ids)

    @property
    def answer(self) -> np.ndarray:
        """Return the tokens behind the prompt."""
        return self.token_ids[self.num_prompt :]


@dataclass(frozen=True)
class TokenBatch:
    """Sequences end to end: T tokens of S sequences."""

    token_ids: Tensor  # [T] int64
    starts: Tensor  # [S + 1] int64
    num_prompt: Tensor  # [S] int64
    temperature: Tensor  # [S] float32
    source: Tensor  # [S] int64

    @property
    def positions(self) -> Tensor:
        """Return [T] int64: the position of each token in its own sequence."""
        lengths = self.starts.diff()
        first = torch.repeat_interleave(self.starts[:-1], lengths)
        return torch.arange(len(self.token_ids), device=first.device) - first

    @property
    def is_answer(self) -> Tensor:
        """Return [T] bool: whether a token belongs to an answer."""
        num_prompt = torch.repeat_interleave(self.num_prompt, self.starts.diff())
        return self.positions >= num_prompt

    def padded(self, pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
        """Return [S, L] int64 token ids padded behind their ends, and [S, L] bool where they are.

        Args:
            pad_token_id: what stands behind the end of a shorter sequence.
        """
        lengths = self.starts.diff()
        place = torch.arange(int(lengths.max()), device=lengths.device)
        is_token = place < lengths[:, None]
        token_ids = self.token_ids.new_full(is_token.shape, pad_token_id)
        token_ids[is_token] = self.token_ids
        return token_ids, is_token

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch on a device."""
        return TokenBatch(**{name: part.to(device) for name, part in vars(self).items()})


class TokenDataset:
    """The sequences of one split of a dataset, all in memory.

    Args:
        folder: written by the stage `data`, or a pattern of several such folders, as a shell has
            it: datasets of other seeds, which several processes wrote, are one.
        split: "train" or "valid".
        max_len: longer sequences are cut behind so many tokens; None keeps them whole. Those whose
            prompt alone is as long are left out.

    Raises:
        ConfigError: a folder is no dataset, one has other sources than another, or none has a
            sequence of the split.
        WeightsError: a shard is damaged.
    """

    def __init__(
        self, folder: Path | str, split: str = "train", max_len: int | None = None
    ) -> None:
        self.split = split
        if split not in SPLITS:
            raise ConfigError(f"split={split!r} is not allowed; give {' or '.join(SPLITS)}")
        if max_len is not None and max_len < 2:
            raise ConfigError(f"max_len={max_len} is not allowed; give an integer >= 2, or null")
        folders = dataset_folders(folder)
        self.sources = _sources_of(folders)  # what sources are indices of
        shards = [read_shard(path) for own in folders for path in shard_paths(own, split)]
        sizes = [len(shard["num_prompt"]) for shard in shards]
        if not sum(sizes):
            raise ConfigError(
                f"{folder} holds no sequence of the split {split!r}; run the stage data with "
                "more sequences"
            )
        self._token_ids = np.concatenate([shard["token_ids"] for shard in shards])
        offsets = np.cumsum([0, *[len(shard["token_ids"]) for shard in shards]])
        begins = [s["starts"][:-1] + at for s, at in zip(shards, offsets, strict=False)]
        lengths = np.concatenate([np.diff(shard["starts"]) for shard in shards])
        num_prompt = np.concatenate([shard["num_prompt"] for shard in shards])
        if max_len is not None:
            lengths = np.minimum(lengths, max_len)
        kept = num_prompt < lengths
        if not kept.any():
            raise ConfigError(f"max_len={max_len} leaves no answer of {folder}; give more")
        self._begins = np.concatenate(begins)[kept]
        self.lengths = lengths[kept]  # [S] int64
        self._num_prompt = num_prompt[kept]
        self._temperature = np.concatenate([shard["temperature"] for shard in shards])[kept]
        self._source = np.concatenate([shard["source"] for shard in shards])[kept]

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all sequences, prompts included."""
        return int(self.lengths.sum())

    def sequence(self, index: int) -> TokenSequence:
        """Return one sequence, in the order of the files."""
        begin, length = int(self._begins[index]), int(self.lengths[index])
        return TokenSequence(
            self._token_ids[begin : begin + length],
            int(self._num_prompt[index]),
            float(self._temperature[index]),
            int(self._source[index]),
        )

    def token_counts(self, vocab_size: int, answers_only: bool = True) -> np.ndarray:
        """Return [vocab_size] int64: how often the split holds each token.

        Args:
            vocab_size: of the target.
            answers_only: leave prompts out.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        for index in range(len(self)):
            sequence = self.sequence(index)
            tokens = sequence.answer if answers_only else sequence.token_ids
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def batch(self, indices: Sequence[int] | np.ndarray) -> TokenBatch:
        """Put some sequences end to end."""
        chosen = np.asarray(indices, dtype=np.int64)
        parts = [self.sequence(int(index)).token_ids for index in chosen]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return TokenBatch(
            torch.from_numpy(np.concatenate(parts).astype(np.int64)),
            torch.from_numpy(starts),
            torch.from_numpy(self._num_prompt[chosen].astype(np.int64)),
            torch.from_numpy(self._temperature[chosen]),
            torch.from_numpy(self._source[chosen].astype(np.int64)),
        )

    def plan(
        self,
        max_tokens: int,
        seed: int,
        epoch: int = 0,
        padded: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> list[np.ndarray]:
        """Return the batches of an epoch as indices of sequences; see `plan_batches`.

        Args:
            max_tokens: tokens of a batch at most.
            seed: of the order.
            epoch: of the order, too.
            padded: count every sequence of a batch as long as the longest.
            rank: which of the processes that share an epoch this is.
            num_ranks: how many they are; all get the same number of batches.
        """
        batches = plan_batches(self.lengths, max_tokens, seed, epoch, padded)
        return batches[rank : len(batches) - len(batches) % num_ranks : num_ranks]

    def batches(self, plan: Sequence[np.ndarray], first: int = 0) -> Iterator[TokenBatch]:
        """Give the batches of a plan, from the one with index `first` on."""
        for indices in plan[first:]:
            yield self.batch(indices)


def plan_batches(
    lengths: np.ndarray, max_tokens: int, seed: int, epoch: int, padded: bool = False
) -> list[np.ndarray]:
    """Divide sequences into batches of like lengths, in random order.

    Args:
        lengths: [S] tokens of each sequence.
        max_tokens: tokens of a batch at most.
        seed, epoch: of the order.
        padded: count every sequence of a batch as long as the longest.

    Raises:
        ConfigError: a sequence alone is longer than a batch.
    """
    longest = int(lengths.max(initial=1))
    if longest > max_tokens:
        raise ConfigError(
            f"a batch of {max_tokens} tokens cannot hold a sequence of {longest}; give at least "
            f"{longest}, or cut sequences by max_len"
        )
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for at in range(0, len(order), _WINDOW):
        window = order[at : at + _WINDOW]
        window = window[np.argsort(lengths[window], kind="stable")]
        first, total = 0, 0
        for i, length in enumerate(lengths[window].tolist()):
            # Sorted, so the newest is the longest.
            size = (i + 1 - first) * length if padded else total + length
            if size > max_tokens:
                batches.append(window[first:i])
                first, total = i, 0
            total += length
        batches.append(window[first:])
    return [batches[i] for i in rng.permutation(len(batches))]


def shard_name(split: str, index: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{index:05d}.safetensors"


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split in their order."""
    return sorted(folder.glob(f"{split}-*.safetensors"))


def write_shard(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Write sequences as one file, in one step."""
    parts = [np.asarray(sequence.token_ids) for sequence in sequences]
    columns = {
        "token_ids": np.concatenate([np.zeros(0, np.int32), *parts]),
        "starts": np.cumsum([0, *map(len, parts)]),
        "num_prompt": np.array([sequence.num_prompt for sequence in sequences]),
        "temperature": np.array([sequence.temperature for sequence in sequences]),
        "source": np.array([sequence.source for sequence in sequences]),
    }
    part = path.with_name(f".{path.name}.part")
    save_file({name: columns[name].astype(dtype) for name, dtype in _DTYPES.items()}, part)
    os.replace(part, path)


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """Read a shard's columns.

    Raises:
        WeightsError: the file is damaged, or no shard.
    """
    try:
        shard = load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); run the stage data anew") from error
    wrong = [
        name for name, dtype in _DTYPES.items() if getattr(shard.get(name), "dtype", 0) != dtype
    ]
    if wrong:
        raise WeightsError(f"{path} is no shard of a dataset: {wrong[0]} is not as it should be")
    num_sequences, starts = len(shard["num_prompt"]), shard["starts"]
    fits = len(starts) == num_sequences + 1 and starts[0] == 0 and (np.diff(starts) > 0).all()
    if not fits or starts[-1] != len(shard["token_ids"]):
        raise WeightsError(f"{path} is damaged: starts do not divide its tokens")
    return shard


def read_sequences(path: Path) -> list[TokenSequence]:
    """Read a shard as sequences."""
    shard = read_shard(path)
    starts = shard["starts"].tolist()
    return [
        TokenSequence(
            shard["token_ids"][starts[i] : starts[i + 1]],
            int(shard["num_prompt"][i]),
            float(shard["temperature"][i]),
            int(shard["source"][i]),
        )
        for i in range(len(starts) - 1)
    ]


def dataset_folders(pattern: Path | str) -> list[Path]:
    """Return the folders that a path or a pattern names, in their order.

    Raises:
        ConfigError: a pattern names nothing.
    """
    if not glob.has_magic(str(pattern)):
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(str(pattern)))
    if not found:
        raise ConfigError(f"no folder is named like {pattern}; give a dataset of the stage data")
    return found


def _sources_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of sources, which datasets have in common.

    Raises:
        ConfigError: they have not, or a folder is no dataset.
    """
    found = [list(read_meta(folder).get("sources", [])) for folder in folders]
    for folder, sources in zip(folders, found, strict=True):
        if sources != found[0]:
            raise ConfigError(f"{folder} has other sources than {folders[0]}; train on one of them")
    return found[0]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read what a dataset says of itself.

    Raises:
        ConfigError: the folder is no dataset.
    """
    path = folder / META_NAME
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is no dataset: {META_NAME} cannot be read ({error}); run the stage data"
        ) from error
    return meta


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write what a dataset says of itself, in one step."""
    part = folder / f".{META_NAME}.part"
    part.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / META_NAME)
