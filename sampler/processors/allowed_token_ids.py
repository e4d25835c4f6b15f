"""Allowed token ids: every other token is set to -inf."""

import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from sampler.processors.bad_words import encode_word
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.checks import check_ids
from sampler.processors.min_tokens import stop_tokens
from sampler.processors.token_mask import apply_token_mask, num_mask_words, pack_token_ids
from specdec.errors import ConfigError
from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams


class AllowedTokenIds(LogitsProcessorBase):
    """A bitmask over the vocabulary for each row.

    Args:
        setup: sizes of the engine.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        rows, words = setup.max_num_reqs, num_mask_words(setup.vocab_size)
        self._is_masked = StagedWriteTensor(rows, torch.int32, setup.device)
        self._mask = StagedWriteTensor((rows, words), torch.int32, setup.device)

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse ids that are not in the vocabulary, and ids that are all forbidden elsewhere."""
        if params.allowed_token_ids is None:
            return
        check_ids("allowed_token_ids", params.allowed_token_ids, context.vocab_size)
        left = set(params.allowed_token_ids)
        if params.min_tokens:
            left.difference_update(stop_tokens(params, context))
        if context.tokenizer is not None:
            words = [encode_word(context.tokenizer, word) for word in params.bad_words or ()]
            left.difference_update(form[0] for forms in words for form in forms if len(form) == 1)
        if not left:
            raise ConfigError(
                f"allowed_token_ids={params.allowed_token_ids} leave no token to draw, as "
                f"bad_words and min_tokens forbid all of them; allow another, or forbid less"
            )

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage the mask, where there is one."""
        allowed = params.allowed_token_ids
        self._is_masked.stage_write(row, 0, int(allowed is not None))
        if allowed is None:
            return False
        self._mask.stage_write(row, 0, pack_token_ids(list(allowed), context.vocab_size))
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Mask, in place."""
        apply_token_mask(
            logits, ctx.expanded_idx_mapping, self._is_masked.tensor, self._mask.tensor
        )
