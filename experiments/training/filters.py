"""What a training text must not be: a loop, a copy of another one; and what it shares with others.

Texts are compared by hashes of their n-grams. Of each text the smallest hashes are kept (a bottom-k
sketch), so that the share of them that another text holds estimates how alike the two are.

Source: Broder, On the resemblance and containment of documents, 1997.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from experiments.training.dataset import TokenSequence

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers never vanish
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LOOP_N = 4
_COPY_N = 8
_SKETCH_SIZE = 16
# A shorter text says too little to be told from another one by its n-grams.
_MIN_TOKENS = 24


def ngram_hashes(token_ids: np.ndarray, n: int) -> np.ndarray:
    """Return [T - n + 1] uint64: a hash of each run of n tokens; [0] where there is none."""
    count = len(token_ids) - n + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    tokens = np.asarray(token_ids).astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(n):  # wraps around at 2^64
        hashes = hashes * _FACTOR + tokens[i : i + count]
    hashes ^= hashes >> np.uint64(31)
    hashes *= _MIX
    return hashes ^ (hashes >> np.uint64(29))


def repeated_share(token_ids: np.ndarray) -> float:
    """Return which share of a text's 4-grams occurred in it before; 0 for a short text."""
    if len(token_ids) < _MIN_TOKENS:
        return 0.0
    hashes = ngram_hashes(token_ids, _LOOP_N).tolist()
    return 1.0 - len(set(hashes)) / len(hashes)


def prompt_key(token_ids: Sequence[int] | np.ndarray) -> int:
    """Return a hash of a whole prompt."""
    raw = np.asarray(token_ids, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def plain_words(text: str) -> str:
    """Return a text's words in lower case, without marks: what makes two prompts the same."""
    return " ".join(re.findall(r"\w+", text.lower()))


def share_of(text: str) -> float:
    """Return a number in [0, 1) that belongs to a text, the same for texts of the same words."""
    digest = hashlib.blake2b(plain_words(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


class SeenTexts:
    """Knows the prompts and answers of a dataset so far.

    Args:
        max_shared: an answer is a copy where more than this share of its sketch was seen.
    """

    def __init__(self, max_shared: float) -> None:
        self._max_shared = max_shared
        self._prompts: set[int] = set()
        self._sketches: set[int] = set()

    def has_prompt(self, prompt: Sequence[int] | np.ndarray) -> bool:
        """Return whether a prompt is known."""
        return prompt_key(prompt) in self._prompts

    def add_new(self, sequence: TokenSequence) -> bool:
        """Remember a prompt and its answer; return False where much the same answer is known."""
        sketch = _sketch(sequence)
        num_known = sum(value in self._sketches for value in sketch)
        if num_known > self._max_shared * _SKETCH_SIZE:
            return False
        self._add(sequence, sketch)
        return True

    def _add(self, sequence: TokenSequence, sketch: list[int]) -> None:
        self._prompts.add(prompt_key(sequence.token_ids[: sequence.num_prompt]))
        self._sketches.update(sketch)

    def add_all(self, sequences: Iterable[TokenSequence]) -> None:
        """Remember what an earlier run kept."""
        for sequence in sequences:
            self._add(sequence, _sketch(sequence))


def _sketch(sequence: TokenSequence) -> list[int]:
    """Return the smallest hashes of an answer, without what it repeats from its own prompt.

    A drafter has to learn how a target copies from its prompt, so that makes no text a copy.
    """
    if len(sequence.answer) < _MIN_TOKENS:
        return []
    own = set(ngram_hashes(sequence.token_ids[: sequence.num_prompt], _COPY_N).tolist())
    sketch: list[int] = []
    # Lists: these arrays are so small that numpy's set routines take longer.
    for value in np.sort(ngram_hashes(sequence.answer, _COPY_N)).tolist():
        if value not in own and (not sketch or value != sketch[-1]):
            sketch.append(value)
            if len(sketch) == _SKETCH_SIZE:
                return sketch
    return []  # too few to tell
