"""Prompt lookup: propose what followed the last tokens' most recent earlier occurrence.

For n from max_n down to min_n, the last n tokens of a row are searched in the row; the longest n
that occurs earlier wins, at its most recent occurrence. A match that runs into the end of the text
goes on periodically, as the text itself would: inside "a b a b" it proposes "a b a b ...". No match
means no draft.

Source: Saxena 2023, prompt lookup decoding; Yang et al. 2023 (LLMA).
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.dispatch import use_triton
from runner.rows import scatter_rows_ref
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, StateView
from specdec.registry import register_drafter

_MAX_BLOCK_TOKENS = 4096


@dataclass
class NgramConfig(DrafterConfig):
    """Parameters of prompt lookup.

    Args:
        min_n: shortest run of tokens that counts as a match.
        max_n: longest run that is searched.
    """

    name: str = "ngram"
    min_n: int = 1
    max_n: int = 3

    def __post_init__(self) -> None:
        """Check the range of n."""
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(
                f"drafter ngram needs 1 <= min_n <= max_n, got min_n={self.min_n} and "
                f"max_n={self.max_n}"
            )


@register_drafter("ngram", NgramConfig)
class NgramDrafter(DrafterBase):
    """Searches each row's own committed tokens; no weights, no state."""

    # The kernel takes a token table in pinned memory as well.
    capabilities = DrafterCapabilities(
        variable_length=True, splits_first_pass=True, reads_token_table=False, can_score=True
    )
    config: NgramConfig

    def propose(self, ctx: DraftContext) -> None:
        """Search all rows of the step at once."""
        look_up_drafts(
            ctx.state,
            ctx.idx_mapping,
            self.buffers.draft_tokens[:, : ctx.num_drafts],
            self.config.min_n,
            self.config.max_n,
            ctx.max_seq_len,
        )


@triton.jit
def _look_up_drafts_kernel(
    idx_mapping_ptr,  # [R] int32, -1 in padding
    all_token_ids_ptr,  # [N, max_model_len] int32
    all_token_ids_stride,
    total_len_ptr,  # [N] int32
    draft_tokens_ptr,  # [N, K] int64, out
    draft_tokens_stride,
    num_drafts,
    min_n,
    max_n,
    LAST_TOKENS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    text_ptr = all_token_ids_ptr + row * all_token_ids_stride
    total_len = tl.load(total_len_ptr + row)
    i = tl.arange(0, LAST_TOKENS)
    last = tl.load(text_ptr + total_len - 1 - i, mask=i < tl.minimum(total_len, max_n), other=0)
    # From the end backwards: of equal lengths the first one found is the most recent, and nothing
    # beats a match of max_n. A column is where a match ends.
    best_len = tl.full((), 0, tl.int32)
    best_end = tl.full((), 0, tl.int32)
    behind = total_len - 1
    while behind > 0:
        column = behind - BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        alive = column >= 0
        match_len = tl.zeros([BLOCK_TOKENS], dtype=tl.int32)
        for n in range(max_n):
            wanted = tl.sum(tl.where(i == n, last, 0), axis=0)
            alive = alive & (column >= n)
            # Only columns that have matched so far are read again.
            token = tl.load(text_ptr + column - n, mask=alive, other=0)
            alive = alive & (token == wanted)
            match_len += alive.to(tl.int32)
        block_len = tl.max(match_len, axis=0)
        block_end = tl.max(tl.where(match_len == block_len, column, 0), axis=0)
        best_end = tl.where(block_len > best_len, block_end, best_end)
        best_len = tl.maximum(block_len, best_len)
        behind = tl.where(best_len < max_n, behind - BLOCK_TOKENS, 0)
    j = tl.arange(0, DRAFTS)
    source = best_end + 1 + j % tl.maximum(total_len - 1 - best_end, 1)
    num_found = tl.where(best_len >= min_n, num_drafts, 0)
    draft = tl.load(text_ptr + source, mask=j < num_found, other=-1)
    out = draft_tokens_ptr + row * draft_tokens_stride + j
    tl.store(out, draft.to(tl.int64), mask=j < num_drafts)


def look_up_drafts(
    state: StateView,
    idx_mapping: Tensor,
    draft_tokens: Tensor,
    min_n: int,
    max_n: int,
    max_seq_len: int,
) -> None:
    """Write what followed the longest, most recent occurrence of each row's last tokens.

    Args:
        state: rows; `all_token_ids` may lie in pinned host memory.
        idx_mapping: [R] int32, -1 in padding, where nothing is written.
        draft_tokens: [N, K] int64, out; -1 where there is no match.
        min_n: shortest match.
        max_n: longest match.
        max_seq_len: bound on `total_len` over the step's rows.
    """
    if not use_triton(idx_mapping):
        look_up_drafts_ref(state, idx_mapping, draft_tokens, min_n, max_n, max_seq_len)
        return
    num_drafts, width = draft_tokens.shape[1], state.all_token_ids.shape[1]
    _look_up_drafts_kernel[(len(idx_mapping),)](
        idx_mapping,
        state.all_token_ids,
        state.all_token_ids.stride(0),
        state.total_len,
        draft_tokens,
        draft_tokens.stride(0),
        num_drafts,
        min_n,
        max_n,
        LAST_TOKENS=triton.next_power_of_2(max_n),
        DRAFTS=triton.next_power_of_2(num_drafts),
        # By the table's width and not by max_seq_len, which would compile anew as texts grow.
        BLOCK_TOKENS=min(triton.next_power_of_2(width), _MAX_BLOCK_TOKENS),
        num_warps=8,
    )


def look_up_drafts_ref(
    state: StateView,
    idx_mapping: Tensor,
    draft_tokens: Tensor,
    min_n: int,
    max_n: int,
    max_seq_len: int,
) -> None:
    """Torch twin of `look_up_drafts`, over the columns that the step can have filled."""
    rows = idx_mapping.long().clamp(min=0)
    width = min(max_seq_len, state.all_token_ids.shape[1])
    tokens = state.all_token_ids[:, :width].index_select(0, rows)
    total_len = torch.where(idx_mapping >= 0, state.total_len[rows], 0).long()[:, None]
    columns = torch.arange(width, device=tokens.device)
    # match_len[r, e]: how many tokens ending at column e equal the last tokens of the text.
    match_len = torch.zeros_like(tokens)
    alive = columns < total_len - 1
    for n in range(max_n):
        last = tokens.gather(1, (total_len - 1 - n).clamp(min=0))
        shifted = torch.roll(tokens, n, dims=1)
        alive = alive & (shifted == last) & (columns >= n)
        match_len += alive
    # Longest match first, most recent occurrence among equals.
    score = torch.where(match_len >= min_n, match_len * width + columns, -1)
    best, end = score.max(1, keepdim=True)
    period = total_len - 1 - end
    offset = torch.arange(draft_tokens.shape[1], device=tokens.device)[None]
    source = end + 1 + offset % period.clamp(min=1)
    drafts = tokens.gather(1, source.clamp(max=width - 1)).long()
    scatter_rows_ref(draft_tokens, idx_mapping, torch.where(best >= 0, drafts, -1))
