"""The draft vocabulary: the tokens that the training text's answers use most."""

import numpy as np
import torch
from torch import Tensor

from experiments.training.dataset import TokenDataset
from experiments.training.recorded import RecordedTexts
from specdec.errors import ConfigError


def choose_vocabulary(
    dataset: TokenDataset | RecordedTexts,
    size: int,
    vocab_size: int,
    always: frozenset[int] = frozenset(),
) -> tuple[Tensor, float]:
    """Choose the most frequent tokens of a dataset's answers.

    Args:
        dataset: the split to learn from.
        size: of the draft vocabulary.
        vocab_size: of the target.
        always: tokens that are taken whatever their frequency: those that end a text.

    Returns:
        Ids [size] int64, rising, and the share of the answers' tokens that they cover.

    Raises:
        ConfigError: the target has fewer tokens.
    """
    if size > vocab_size:
        raise ConfigError(
            f"fit.draft_vocab_size={size} is not allowed, the target has {vocab_size} tokens; give "
            f"at most that, or 0 for all"
        )
    counts = dataset.token_counts(vocab_size)
    ranked = counts.copy()
    ranked[list(always)] = counts.max() + 1
    # Equally frequent tokens in the order of their ids: the same choice on every machine.
    ids = np.sort(np.argsort(-ranked, kind="stable")[:size])
    covered = float(counts[ids].sum() / max(counts.sum(), 1))
    return torch.from_numpy(ids.astype(np.int64)), covered
