"""Where a text ends: the one trim function, and the detokenizer that finds stop strings.

The earliest event in a committed run wins: EOS, stop token, stop string, then length. Nothing after
it shows anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.types import FinishReason, SamplingParams


class Detokenizer:
    """Turns tokens into text one at a time, holding back incomplete characters.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=True)`; None gives empty text.
        stop_strings: strings that end the text; the first to appear cuts it.
    """

    def __init__(self, tokenizer: Any | None, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._hold = max((len(s) for s in stop_strings), default=1) - 1
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._text = ""
        self._streamed = 0
        self.stop_string: str | None = None  # the one that was found

    @property
    def text(self) -> str:
        """Return the text so far, cut before a stop string."""
        return self._text

    def add(self, token_id: int) -> bool:
        """Append a token; return whether a stop string was completed."""
        self._token_ids.append(token_id)
        return self._extend(final=False)

    def finish(self) -> None:
        """Flush a character that stayed incomplete."""
        if self.stop_string is None and self._read < len(self._token_ids):
            self._extend(final=True)

    def stream(self, finished: bool) -> str:
        """Return text not returned before, short of what may still become a stop string."""
        end = len(self._text) if finished else max(self._streamed, len(self._text) - self._hold)
        new = self._text[self._streamed : end]
        self._streamed = end
        return new

    def _extend(self, final: bool) -> bool:
        if self._tokenizer is None:
            return False
        # Decode from a little before the last complete character: spacing depends on neighbours.
        before = self._decode(self._token_ids[self._prefix : self._read])
        after = self._decode(self._token_ids[self._prefix :])
        if after.endswith("\ufffd") and not final:
            return False
        self._prefix, self._read = self._read, len(self._token_ids)
        new = after[len(before) :]
        start = max(0, len(self._text) - self._hold)
        self._text += new
        found = [(self._text.find(s, start), s) for s in self._stop_strings]
        found = [(at, s) for at, s in found if at >= 0]
        if not found:
            return False
        at, self.stop_string = min(found)
        self._text = self._text[:at]
        return True

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Trimmed:
    """What is left of a committed run."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def trim(
    run: Sequence[int],
    room: int,
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    detokenizer: Detokenizer,
) -> Trimmed:
    """Cut a committed run at the earliest event that ends the text.

    Args:
        run: tokens a step committed to one request, in order.
        room: tokens the request may still get, by `max_tokens` and `max_model_len`; at least 1.
        params: the request's parameters.
        eos_token_ids: ids that end a text unless `ignore_eos`.
        detokenizer: of the request; the kept tokens are added, save a stop token or EOS.

    Returns:
        The kept tokens (with the stop token or EOS), and why the text ended, if it did.
    """
    kept: list[int] = []
    for token_id in run:
        kept.append(token_id)
        if token_id in eos_token_ids and not params.ignore_eos:
            return Trimmed(kept, "stop", None)
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return Trimmed(kept, "stop", token_id)
        if detokenizer.add(token_id):
            return Trimmed(kept, "stop", detokenizer.stop_string)
        if len(kept) == room:
            return Trimmed(kept, "length", None)
    return Trimmed(kept)
