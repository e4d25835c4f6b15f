"""Small targets and datasets of the trainer's tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.training.dataset import TokenSequence, shard_name, write_meta, write_shard
from tests.models import byte_tokenizer, tiny_model

NUM_USED = 97  # tokens that the texts are written in
VOCAB_SIZE = 258  # of the target: those of its tokenizer
# Enough layers for three different features.
TARGET: dict[str, Any] = {"scale": 1.5, "num_hidden_layers": 6, "vocab_size": VOCAB_SIZE}


def save_target(folder: Path) -> str:
    """Save a tiny target with its tokenizer, and return the folder."""
    model = tiny_model("llama", **TARGET)
    # Laws with a few likely tokens: there is nothing to learn from flat ones.
    model.get_output_embeddings().weight.data.mul_(8)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def random_sequences(num: int, seed: int = 0, vocab_size: int = NUM_USED) -> list[TokenSequence]:
    """Return sequences in which the next token follows from the last by a rule, mostly."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(rng.integers(12, 40))
        tokens = [int(rng.integers(vocab_size))]
        for _ in range(length - 1):
            follows = (tokens[-1] * 5 + 3) % vocab_size
            tokens.append(follows if rng.random() < 0.9 else int(rng.integers(vocab_size)))
        prompt = int(rng.integers(2, 6))
        sequences.append(TokenSequence(np.array(tokens, np.int32), prompt))
    return sequences


def save_dataset(folder: Path, num_train: int = 64, num_valid: int = 6) -> str:
    """Write a dataset folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, num, seed in (("train", num_train, 1), ("valid", num_valid, 2)):
        write_shard(folder / shard_name(split, 0), random_sequences(num, seed))
    write_meta(folder, {"sources": ["rule"]})
    return str(folder)


def curve_of(folder: Path) -> list[dict[str, Any]]:
    """Read the curve of a run."""
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
