"""Maps between the vocabularies of two tokenizers, by the tokens that both have.

Two tokens are the same where their strings are, once the sign that stands for a space in front of
a word is written alike. What only one vocabulary has is not mapped: a token of the target without
a twin is *read* as the first token that its text gives in the other vocabulary (else as the unknown
or end token), which keeps one token a position. That changes what the other model expects, and so
how often it is right, never what is sampled.

Source: Timor et al. 2025, lossless speculative decoding for heterogeneous vocabularies.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

# Of the smaller vocabulary. Tokenizers of different makers share far more than this; less means
# that one of them is not what it was taken for.
MIN_SHARED = 0.05


@dataclass(frozen=True)
class VocabularyMap:
    """How a model with another tokenizer reads and writes the target's ids; both on the device."""

    model_ids: Tensor  # [V] int64: the id that the model reads for a target's id
    columns: Tensor  # [V] int64: the model's id of the same token, 0 where there is none
    missing: Tensor  # [V] bool: the model has no such token
    num_shared: int

    def target_logits(self, logits: Tensor) -> Tensor:
        """Return logits [R, V] of the target's ids from the model's own, [R, V_model]."""
        return logits.index_select(1, self.columns).masked_fill_(self.missing, float("-inf"))


def map_vocabulary(
    target: Any, other: Any, vocab_sizes: tuple[int, int], device: torch.device
) -> VocabularyMap:
    """Map a target's ids to those of another tokenizer.

    Args:
        target: the target's tokenizer.
        other: the other model's.
        vocab_sizes: logits that the target and the other model have; ids behind them are left out.
        device: where the map is read.

    Raises:
        ConfigError: the two share less than `MIN_SHARED` of the smaller vocabulary.
    """
    size, other_size = vocab_sizes
    own = {t: i for t, i in target.get_vocab().items() if i < size}
    theirs = {t: i for t, i in other.get_vocab().items() if i < other_size}
    sign, other_sign = _space_sign(target), _space_sign(other)
    if sign and other_sign and sign != other_sign:
        theirs = {token.replace(other_sign, sign): i for token, i in theirs.items()}
    shared = {i: theirs[token] for token, i in own.items() if token in theirs}
    least = MIN_SHARED * min(len(own), len(theirs))
    if len(shared) < max(least, 1):
        raise ConfigError(
            f"cross_vocab: the vocabularies share {len(shared)} of {len(own)} and {len(theirs)} "
            f"tokens, and at least {max(int(least), 1)} are needed; give a draft model with a "
            f"tokenizer closer to the target's"
        )
    logger.info(
        "cross_vocab: %d tokens shared, %.1f %% of the target's %d and %.1f %% of the draft's %d",
        len(shared),
        100 * len(shared) / len(own),
        len(own),
        100 * len(shared) / len(theirs),
        len(theirs),
    )
    columns = torch.full((size,), -1, dtype=torch.int64)
    columns[list(shared)] = torch.tensor(list(shared.values()))
    missing = columns < 0
    model_ids = columns.clone()
    model_ids[missing] = _stand_ins(target, own, other, other_size, missing)
    return VocabularyMap(
        model_ids=model_ids.to(device),
        columns=columns.clamp(min=0).to(device),
        missing=missing.to(device),
        num_shared=len(shared),
    )


def _stand_ins(
    target: Any, own: dict[str, int], other: Any, other_size: int, missing: Tensor
) -> Tensor:
    """Return the other model's id that is read for each id of the target without a twin."""
    fallbacks = (other.unk_token_id, other.eos_token_id, 0)
    fallback = next(i for i in fallbacks if i is not None and i < other_size)
    tokens = {i: token for token, i in own.items()}
    special = set(target.all_special_ids)
    texts = []
    for i in missing.nonzero()[:, 0].tolist():
        is_text = i in tokens and i not in special
        texts.append(target.convert_tokens_to_string([tokens[i]]) if is_text else "")
    encoded = other(texts, add_special_tokens=False)["input_ids"] if texts else []
    first = [ids[0] if ids and ids[0] < other_size else fallback for ids in encoded]
    return torch.tensor(first, dtype=torch.int64)


def _space_sign(tokenizer: Any) -> str:
    """Return the sign that a tokenizer writes for a space, "" where it has none."""
    signs = ("\u0120", "\u2581")  # of byte-level and of SentencePiece vocabularies
    counts = dict.fromkeys(signs, 0)
    for token in tokenizer.get_vocab():
        for sign in signs:
            counts[sign] += token.startswith(sign)
    best = max(signs, key=counts.__getitem__)
    return best if counts[best] else ""
