"""Builds the sampler of an engine: its verifier, its processors, and what they are sized by."""

from collections.abc import Sequence
from typing import Any

from runner.loader import LoadedTarget, eos_token_ids
from sampler.processors.builtin import make_processors
from sampler.processors.chain import ProcessorChain
from sampler.sampler import Sampler
from specdec.config import EngineConfig
from specdec.protocols import ProcessorSetup


def make_sampler(
    config: EngineConfig,
    verifier: Any,
    processors: Sequence[Any],
    num_speculative_tokens: int,
    max_num_reqs: int,
    target: LoadedTarget,
) -> Sampler:
    """Build the sampler and tell the verifier what it is built for.

    Args:
        config: of the engine.
        verifier: judges drafts.
        processors: plug-ins among the logits processors.
        num_speculative_tokens: K.
        max_num_reqs: rows.
        target: whose logits are sampled from.
    """
    model = target.model
    bind = getattr(verifier, "bind", None)
    if bind is not None:
        bind(num_speculative_tokens, model.device)
    sizes = max_num_reqs, model.vocab_size
    setup = ProcessorSetup(*sizes, config.max_model_len, num_speculative_tokens, model.device)
    return Sampler(
        verifier,
        *sizes,
        model.device,
        config.logprobs_mode,
        ProcessorChain(
            make_processors(setup, processors, config.penalties),
            *sizes,
            model.device,
            target.tokenizer,
            eos_token_ids(model, target.tokenizer),
        ),
    )
