"""Bad words: the last token of a word is set to -inf where the new text ends with the others.

The new text of a line is what was committed behind the prompt, and the row's drafts before the
line. A word of a single token is never drawn. Each word is banned as its own tokens and, where a
space before it gives others, as those: in the middle of a text most tokenizers use them.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import functools
import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.checks import check_count, check_ids
from specdec.errors import UnsupportedError
from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams

# Of a request, forms with a space included.
MAX_WORDS = 128
MAX_TOKENS = 1024


class BadWords(LogitsProcessorBase):
    """The words of each row, as token ids one after another.

    Args:
        setup: sizes of the engine.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        rows, device = setup.max_num_reqs, setup.device
        self._num_words = StagedWriteTensor(rows, torch.int32, device)
        # [N, MAX_WORDS + 1]: word w has the tokens ends[w] .. ends[w + 1] - 1.
        self._ends = StagedWriteTensor((rows, MAX_WORDS + 1), torch.int32, device)
        self._token_ids = StagedWriteTensor((rows, MAX_TOKENS), torch.int32, device)
        self._encode = functools.lru_cache(maxsize=4096)(encode_word)

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse words without a tokenizer, and more of them than a row holds."""
        if not params.bad_words:
            return
        if context.tokenizer is None:
            raise UnsupportedError(
                "bad_words need a tokenizer, which this target has not; use logit_bias"
            )
        words = self._words(params, context)
        token_ids = [i for word in words for i in word]
        check_ids("bad_words", token_ids, context.vocab_size)
        check_count("bad_words, with and without a space before them,", len(words), MAX_WORDS)
        check_count("bad_words, as token ids,", len(token_ids), MAX_TOKENS)

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage the words."""
        words = self._words(params, context)
        self._num_words.stage_write(row, 0, len(words))
        if not words:
            return False
        ends = [0]
        for word in words:
            ends.append(ends[-1] + len(word))
        self._ends.stage_write(row, 0, ends)
        self._token_ids.stage_write(row, 0, [i for word in words for i in word])
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Mask, in place."""
        apply_bad_words(
            logits, ctx, self._num_words.tensor, self._ends.tensor, self._token_ids.tensor
        )

    def _words(self, params: SamplingParams, context: RequestContext) -> list[tuple[int, ...]]:
        """Return the token ids of every form of a request's words."""
        forms = [self._encode(context.tokenizer, word) for word in params.bad_words or ()]
        return list(dict.fromkeys(form for word in forms for form in word))


def encode_word(tokenizer: Any, word: str) -> list[tuple[int, ...]]:
    """Return a word's token ids, and those of it behind a space where that gives others."""
    bare = word.lstrip()
    plain, spaced = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)
    )
    forms = [form for form in (plain, spaced) if form]
    # Where the plain form is the end of the other, it is found there, too.
    return forms[:1] if plain and spaced[-len(plain) :] == plain else forms


@triton.jit
def _bad_words_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    draw_positions_ptr,  # [L] int64
    prompt_len_ptr,  # [N] int32
    all_token_ids_ptr,  # [N, max_model_len] int32
    all_token_ids_stride,
    draft_tokens_ptr,  # [N, K] int64
    draft_tokens_stride,
    num_words_ptr,  # [N] int32
    ends_ptr,  # [N, max_words + 1] int32
    ends_stride,
    token_ids_ptr,  # [N, max_tokens] int32
    token_ids_stride,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    num_words = tl.load(num_words_ptr + row)
    if num_words == 0:
        return
    w = tl.arange(0, BLOCK_SIZE)
    inside = w < num_words
    begins = tl.load(ends_ptr + row * ends_stride + w, mask=inside, other=0)
    ends = tl.load(ends_ptr + row * ends_stride + w + 1, mask=inside, other=1)
    token_ids = token_ids_ptr + row * token_ids_stride
    drafts = draft_tokens_ptr + row * draft_tokens_stride
    committed = all_token_ids_ptr + row * all_token_ids_stride
    num_before = ends - begins - 1  # tokens of the word that the text must end with
    longest = tl.max(tl.where(inside, num_before, 0), axis=0)
    draw_position = tl.load(draw_positions_ptr + line)
    num_new = tl.maximum(draw_position - tl.load(prompt_len_ptr + row), 0)
    num_drafts = tl.load(local_pos_ptr + line)
    matches = tl.where(inside & (num_before <= num_new), 1, 0)
    # Backwards from the end of the text, in all words at once.
    for back in range(tl.minimum(longest, num_new)):
        if back < num_drafts:
            token = tl.load(drafts + num_drafts - 1 - back)
        else:
            token = tl.load(committed + draw_position - 1 - back).to(tl.int64)
        asked = inside & (back < num_before)
        expected = tl.load(token_ids + ends - 2 - back, mask=asked, other=0)
        matches = tl.where(asked & (expected != token), 0, matches)
    last = tl.load(token_ids + ends - 1, mask=inside, other=0)
    banned = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    tl.store(logits_ptr + line * logits_stride + last, banned, mask=inside & (matches > 0))


def apply_bad_words(
    logits: Tensor, ctx: LogitsContext, num_words: Tensor, ends: Tensor, token_ids: Tensor
) -> None:
    """Set the tokens that would complete a bad word to -inf, in place.

    Args:
        logits: [L, V] float32.
        ctx: the lines.
        num_words: [N] int32, 0 = none.
        ends: [N, max_words + 1] int32: word w has the tokens ends[w] .. ends[w + 1] - 1.
        token_ids: [N, max_tokens] int32.
    """
    if not use_triton(logits):
        apply_bad_words_ref(logits, ctx, num_words, ends, token_ids)
        return
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    _bad_words_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        ctx.expanded_idx_mapping,
        ctx.expanded_local_pos,
        ctx.draw_positions,
        ctx.state.prompt_len,
        ctx.state.all_token_ids,
        ctx.state.all_token_ids.stride(0),
        ctx.draft_tokens,
        ctx.draft_tokens.stride(0),
        num_words,
        ends,
        ends.stride(0),
        token_ids,
        token_ids.stride(0),
        BLOCK_SIZE=triton.next_power_of_2(ends.shape[1] - 1),
    )


def apply_bad_words_ref(
    logits: Tensor, ctx: LogitsContext, num_words: Tensor, ends: Tensor, token_ids: Tensor
) -> None:
    """Torch twin of `apply_bad_words`."""
    rows = ctx.expanded_idx_mapping.long()
    (lines,) = ((rows >= 0) & (num_words[rows.clamp(min=0)] > 0)).nonzero(as_tuple=True)
    for line in lines.tolist():
        row, num_drafts = int(rows[line]), int(ctx.expanded_local_pos[line])
        total_len = int(ctx.draw_positions[line]) - num_drafts
        text = ctx.state.all_token_ids[row, int(ctx.state.prompt_len[row]) : total_len].tolist()
        text += ctx.draft_tokens[row, :num_drafts].tolist()
        bounds = ends[row, : int(num_words[row]) + 1].tolist()
        for begin, end in itertools.pairwise(bounds):
            *before, last = token_ids[row, begin:end].tolist()
            if before == text[max(len(text) - len(before), 0) :]:
                logits[line, last] = float("-inf")
