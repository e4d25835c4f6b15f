"""How much of a dataset also stands in given question files.

The files are read for this report alone: nothing is trained, chosen or left out by what they hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.prompts import load_questions
from experiments.training.dataset import TokenSequence
from experiments.training.filters import ngram_hashes, plain_words

NGRAM_SIZES = (8, 13)


def overlap_report(
    sequences: Sequence[TokenSequence],
    user_texts: Iterable[str],
    files: Sequence[str],
    tokenizer: Any,
) -> dict[str, Any]:
    """Compare training text with the questions of some files.

    Args:
        sequences: of every split.
        user_texts: what users ask in them, without the chat template.
        files: question files.
        tokenizer: of the target.

    Returns:
        By file: for each n-gram size, which share of the training text's n-grams stands in a
        question (`train_share`), and which share of the questions' in the training text
        (`question_share`); and how many questions are a training prompt, word for word.

    Raises:
        ConfigError: a file cannot be read.
    """
    questions = {Path(name).name: _turns(name) for name in files}
    prompts = {plain_words(text) for text in user_texts}
    report: dict[str, Any] = {
        name: {
            "num_turns": len(turns),
            "num_training_prompts": sum(plain_words(turn) in prompts for turn in turns),
            "ngrams": {},
        }
        for name, turns in questions.items()
    }
    encoded = {
        name: [np.array(ids) for ids in tokenizer(turns, add_special_tokens=False)["input_ids"]]
        for name, turns in questions.items()
    }
    for n in NGRAM_SIZES:
        train = _joined(ngram_hashes(sequence.token_ids, n) for sequence in sequences)
        for name, turns in encoded.items():
            asked = _joined(ngram_hashes(turn, n) for turn in turns)
            report[name]["ngrams"][str(n)] = _shares(train, asked)
    return report


def _turns(name: str) -> list[str]:
    return [turn for question in load_questions(name) for turn in question.turns]


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])


def _shares(train: np.ndarray, asked: np.ndarray) -> Mapping[str, float | int]:
    # The training text is large and the questions are few: only these are sorted.
    known = np.unique(asked)
    place = np.minimum(np.searchsorted(known, train), max(len(known) - 1, 0))
    in_asked = known[place] == train if len(known) else np.zeros(len(train), dtype=bool)
    in_train = np.isin(asked, train[in_asked])
    return {
        "num_train": len(train),
        "num_questions": len(asked),
        "train_share": float(in_asked.mean()) if len(train) else 0.0,
        "question_share": float(in_train.mean()) if len(asked) else 0.0,
    }
