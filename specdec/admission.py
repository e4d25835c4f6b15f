"""What a caller asks for, checked, and the samples that it becomes."""

import copy
from typing import Any

from runner.loader import LoadedTarget, eos_token_ids
from specdec.checks import check_params
from specdec.config import EngineConfig
from specdec.ending import Detokenizer
from specdec.grammar import GrammarBackend
from specdec.intake import Prompt, PromptReader
from specdec.outcomes import new_outcomes
from specdec.protocols import Verifier
from specdec.request import Request
from specdec.samples import RequestGroup
from specdec.types import RequestStats, SamplingParams


class Admission:
    """Builds the requests of one engine.

    Args:
        target: its tokenizer, vocabulary and ends.
        verifier: may refuse parameters.
        config: limits, and the seed of unseeded requests.
        num_speculative_tokens: K.
    """

    def __init__(
        self,
        target: LoadedTarget,
        verifier: Verifier,
        config: EngineConfig,
        num_speculative_tokens: int,
    ) -> None:
        self.tokenizer, self.verifier, self.config = target.tokenizer, verifier, config
        self.num_speculative_tokens = num_speculative_tokens
        self.eos_token_ids = eos_token_ids(target.model, target.tokenizer)
        self._reader = PromptReader(target.tokenizer, target.model.vocab_size, config.max_model_len)
        self.grammars = GrammarBackend(
            target.tokenizer, target.model.vocab_size, self.eos_token_ids
        )
        self._num_admitted = 0

    def build(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, label: Any
    ) -> RequestGroup:
        """Check a request and build its samples; see `Engine.add_request`."""
        params = check_params(
            SamplingParams() if params is None else params,
            self.verifier,
            self.num_speculative_tokens,
            self.tokenizer is not None,
        )
        # What the caller changes later is meant for other requests.
        params = copy.deepcopy(params)
        text, token_ids = self._reader.read(prompt)
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.compile(structure)
        # Unseeded requests get a seed from the engine's own and their arrival: recorded.
        seed = params.seed
        if seed is None:
            seed = _as_int64(self.config.seed * 1_000_003 + self._num_admitted)
        end_token_ids = frozenset(params.stop_token_ids or ()).union(
            () if params.ignore_eos else self.eos_token_ids
        )
        samples = [
            Request(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=token_ids,
                params=params,
                seed=seed,
                max_total_len=min(len(token_ids) + params.max_tokens, self.config.max_model_len),
                draft_budget=self._draft_budget(params),
                sample_index=sample_index,
                label=label,
                token_ids=list(token_ids),
                stats=self._new_stats(),
                detokenizer=Detokenizer(self.tokenizer, params.stop_strings, params.min_tokens),
                end_token_ids=end_token_ids,
                outcomes=new_outcomes(self.num_speculative_tokens),
                grammar=None if grammar is None else grammar.copy(),
            )
            for sample_index in range(params.n)
        ]
        return RequestGroup(samples)

    def count(self) -> None:
        """Count the request that was built last; one that is refused for its size is none."""
        self._num_admitted += 1

    def _draft_budget(self, params: SamplingParams) -> int:
        budget, most = params.num_speculative_tokens, self.num_speculative_tokens
        return most if budget is None else min(budget, most)

    def _new_stats(self) -> RequestStats:
        k = self.num_speculative_tokens
        return RequestStats(drafted_per_position=[0] * k, accepted_per_position=[0] * k)


def _as_int64(value: int) -> int:
    """Return the signed 64-bit number with the low bits of `value`: a seed that may be given."""
    return (value + 2**63) % 2**64 - 2**63
