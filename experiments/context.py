"""Prompts of a given length in tokens: a question behind other text, or random tokens.

A prompt keeps the frame that the target's chat template puts around a message. Between its parts
stand exactly as many tokens as the length leaves: the question, in front of it the texts of other
questions, again and again if need be; or tokens drawn at random, which no user would write.
Drafters that look text up profit from text that repeats itself, and no drafter from random tokens,
so that figures on such prompts say so wherever they are shown.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.prompts import Question
from specdec.errors import ConfigError

_FILLER_CHARS_A_TOKEN = 8  # as much text as any tokenizer needs; it repeats if that is too little
_PROBES = ("0 a", "Q z")  # unlike from the first character to the last


def ladder(
    questions: Sequence[Question], lengths: Sequence[int], random_tokens: bool
) -> list[Question]:
    """Return every question at every length, the first turn alone; a length is a category.

    Args:
        questions: chosen from a file.
        lengths: of prompts, in tokens of the target.
        random_tokens: random ones instead of text.
    """
    found: list[Question] = []
    for length in lengths:
        for i, question in enumerate(questions):
            others = [*questions[i + 1 :], *questions[:i]] or [question]
            filler = "\n\n".join(turn for other in others for turn in other.turns)
            found.append(
                Question(
                    f"{question.question_id}@{length}",
                    f"context {length}" + (" random" if random_tokens else ""),
                    question.turns[:1],
                    context_len=length,
                    random_tokens=random_tokens,
                    filler=filler[: _FILLER_CHARS_A_TOKEN * length] + "\n\n",
                )
            )
    return found


def fit_context(
    questions: Sequence[Question],
    encode: Callable[[str], list[int]],
    tokenizer: Any,
    vocab_size: int,
) -> list[Question]:
    """Give each question of a ladder its prompt's tokens; the others stay as they are.

    Args:
        questions: to be asked.
        encode: returns the tokens of a conversation with one message.
        tokenizer: of the target.
        vocab_size: of the target; it may be smaller or larger than the tokenizer's.

    Raises:
        ConfigError: a length leaves no room beside the chat template.
    """
    if all(question.context_len is None for question in questions):
        return list(questions)
    head, tail = _frame(encode)
    special = set(tokenizer.all_special_ids)
    usual = [i for i in range(min(vocab_size, len(tokenizer))) if i not in special]
    fitted: list[Question] = []
    for question in questions:
        if question.context_len is None:
            fitted.append(question)
            continue
        room = question.context_len - len(head) - len(tail)
        if room < 1:
            raise ConfigError(
                f"prompts.context_lengths holds {question.context_len}, but the target's chat "
                f"template alone takes {len(head) + len(tail)} tokens; give more"
            )
        if question.random_tokens:
            rng = np.random.default_rng(zlib.crc32(str(question.question_id).encode()))
            body = rng.choice(usual, room).tolist()
        else:
            own = encode(question.turns[0])[len(head) :]
            own = own[: len(own) - len(tail)]
            filler = list(tokenizer(question.filler, add_special_tokens=False)["input_ids"])
            missing = max(room - len(own), 0)
            repeated = filler * (missing // len(filler) + 1)
            body = (repeated[len(repeated) - missing :] + own)[-room:]
        token_ids = (*head, *body, *tail)
        assert len(token_ids) == question.context_len, len(token_ids)
        fitted.append(dataclasses.replace(question, token_ids=token_ids))
    return fitted


def _frame(encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Return the tokens that a chat template puts before and behind every message."""
    first, second = (encode(probe) for probe in _PROBES)
    most = min(len(first), len(second))
    before = next((i for i in range(most) if first[i] != second[i]), most)
    most -= before
    after = next((i for i in range(most) if first[-1 - i] != second[-1 - i]), most)
    return first[:before], first[len(first) - after :]
