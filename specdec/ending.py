"""Where a text ends: the one trim function, and the detokenizer that finds stop strings.

The earliest event in a committed run wins: EOS, stop token, stop string, then length. Nothing after
it shows anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.types import FinishReason, SamplingParams

_MAX_LEADING = 16  # tokens without text that are kept where a text begins


@dataclass
class _Cursor:
    """How far tokens were decoded."""

    # The last tokens that gave text: what follows is decoded behind them. Where nothing has yet,
    # the first tokens.
    prefix: int = 0
    stop: int = 0
    read: int = 0  # tokens whose text is known


class Detokenizer:
    """Turns tokens into text, holding back incomplete characters.

    With stop strings every token is decoded as it is added. Without them nothing is decoded before
    somebody reads: the whole text in one go, or what a run of tokens added to it.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=True)`; None gives empty text.
        stop_strings: strings that end the text; the first to appear cuts it.
        min_tokens: a stop string that is complete by then is let be.
    """

    def __init__(
        self, tokenizer: Any | None, stop_strings: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._stop_strings = tuple(stop_strings)
        self._hold = max((len(s) for s in stop_strings), default=1) - 1
        # Of the text, without a stop token or EOS. Without stop strings they may be appended here.
        self.token_ids: list[int] = []
        self._text = ""
        self._whole = _Cursor()  # where `_text` ends
        # Decodes run by run, to tell how long the text was after how many tokens.
        self._runs = _Cursor()
        self._lengths = {0: 0}
        self._num_measured = 0
        self.stop_string: str | None = None  # the one that was found

    @property
    def text(self) -> str:
        """Return the text so far, cut before a stop string."""
        if self.stop_string is None:
            self._extend(final=False)
        return self._text

    def add(self, token_id: int) -> bool:
        """Append a token; return whether a stop string was completed."""
        self.token_ids.append(token_id)
        if not self._stop_strings:
            return False
        before = len(self._text)
        self._measure(len(self.token_ids))
        if len(self.token_ids) <= self._min_tokens:
            return False
        # Whatever ended before this token was looked at then.
        found = [(self._text.find(s, max(0, before - len(s) + 1)), s) for s in self._stop_strings]
        found = [(at, s) for at, s in found if at >= 0]
        if not found:
            return False
        at, self.stop_string = min(found)
        self._text = self._text[:at]
        return True

    def rewind(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones."""
        del self.token_ids[num_tokens:]
        self._text, self.stop_string = "", None
        self._whole, self._runs = _Cursor(), _Cursor()
        self._lengths, self._num_measured = {0: 0}, 0

    def finish(self) -> None:
        """Flush a character that stayed incomplete."""
        if self.stop_string is None:
            self._extend(final=True)

    def piece(self, start: int, end: int, final: bool) -> str:
        """Return what a run of tokens added to the text, short of what may become a stop string.

        Pieces of runs that follow each other are the text, whenever they are asked for.

        Args:
            start: tokens before the run.
            end: tokens up to its end.
            final: the text ends with this run: return all that is left.
        """
        if self._tokenizer is None:
            return ""
        begin = self._streamed(start)
        if final:
            return self.text[begin:]
        stop = self._streamed(end)
        return (self._text if stop <= len(self._text) else self.text)[begin:stop]

    def _streamed(self, num_tokens: int) -> int:
        """Return how much text may be shown after some tokens."""
        if num_tokens not in self._lengths:
            self._measure(num_tokens)
        return max(0, self._lengths[num_tokens] - self._hold)

    def _measure(self, num_tokens: int) -> None:
        """Decode up to some tokens, and note how long the text is then."""
        if num_tokens < self._num_measured:  # asked for out of order
            self._runs, self._num_measured = _Cursor(), 0
        first = self._num_measured + 1
        if not self._decode_run(num_tokens):
            # It ends inside a character, but there may be whole ones before.
            for end in range(first, num_tokens):
                self._decode_run(end)
            self._lengths[num_tokens] = self._lengths[num_tokens - 1]
            self._num_measured = num_tokens

    def _decode_run(self, end: int) -> bool:
        """Decode tokens up to `end`; return False where these end inside a character."""
        both = self._runs == self._whole
        length, read = self._lengths[self._num_measured], self._runs.read
        new = self._decode(self._runs, end, final=False)
        self._lengths[end] = length + len(new)
        self._num_measured = end
        if both:
            self._text += new
            self._whole = replace(self._runs)
        return self._runs.read > read

    def _extend(self, final: bool) -> None:
        """Decode what is left in one go."""
        if self._whole.read < len(self.token_ids):
            self._text += self._decode(self._whole, len(self.token_ids), final)

    def _decode(self, cursor: _Cursor, end: int, final: bool) -> str:
        """Return the text that tokens up to `end` add, "" where it ends inside a character."""
        if self._tokenizer is None:
            return ""
        # Spacing depends on neighbours, so the tokens before are decoded along.
        context, new = (
            self.token_ids[cursor.prefix : cursor.stop],
            self.token_ids[cursor.read : end],
        )
        before = self._tokenizer.decode(context, skip_special_tokens=True)
        after = self._tokenizer.decode(context + new, skip_special_tokens=True)
        if after.endswith("\ufffd") and not final:
            return ""
        text = after[len(before) :]
        if text:
            cursor.prefix, cursor.stop = cursor.read, end
        elif not before and end <= _MAX_LEADING:
            cursor.stop = end
        # Else special tokens, which are left out: behind them alone a tokenizer may take what
        # follows for the beginning of a text, and drop its space.
        cursor.read = end
        return text


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
