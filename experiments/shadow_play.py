"""Drafters that cannot score: the engine plays them along the recorded text, start by start.

The target runs, as drafters may read what it computes, but what it emits is the recorded text: a
verifier keeps a draft where it is the text's own token, and emits that token otherwise. This is the
real run of a rule whose text does not depend on the drafter, and, for one-hot drafts, of rejection
sampling *given its text* (`experiments.shadow_walk`). Drafts that are drawn from a law leave no way
to follow a text under rejection sampling: such a drafter is run as it is, and writes its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments.schemas import Plugin
from experiments.shadow_texts import Text
from experiments.shadow_walk import StepOutcome, TextOutcome, outcome_of_steps
from runner.loader import LoadedTarget
from sampler.noise import STREAM_DRAFT
from sampler.verify.base import VerifierBase
from sampler.verify.chain import assemble_run
from sampler.verify.config import VerifierConfig
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.log import progress
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier
from specdec.trace import StepTrace
from specdec.types import SamplingParams

PLAYED = "played along the texts"
RUN = "run with texts of its own"


@dataclass
class ReplayConfig(VerifierConfig):
    """Parameters of a replay.

    Args:
        max_model_len: of the engine.
        draft_stream, noise_epoch: of drafters' noise, as the rule that is stood in for has them.
    """

    name: str = "shadow_replay"
    max_model_len: int = 2048
    draft_stream: int = STREAM_DRAFT
    noise_epoch: bool = False


@register_verifier("shadow_replay", ReplayConfig)
class ReplayVerifier(VerifierBase):
    """Emits a given text, whatever the target says; for an engine of one row."""

    name = "shadow_replay"
    lossless = True
    text_equal = True
    config: ReplayConfig

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(config)
        self.draft_stream, self.noise_epoch = config.draft_stream, config.noise_epoch

    def bind(self, num_speculative_tokens: int, device: torch.device) -> None:
        """Allocate the text: steps may be captured, so it stays where it is."""
        size = self.config.max_model_len
        self._text = torch.zeros(size, dtype=torch.int64, device=device)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Emit another text from now on; no step is in flight."""
        own = torch.tensor(token_ids, device=self._text.device)
        self._text[: len(own)] = own

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Keep drafts while they are the text's tokens, then emit the next of these."""
        text = self._text[inputs.draw_positions.clamp(max=len(self._text) - 1)]
        drafts = inputs.draft_tokens
        return assemble_run(
            text == drafts, drafts, text, inputs.cu_num_logits, inputs.max_num_logits
        )


@dataclass(frozen=True)
class PlaySetup:
    """What the played runs share."""

    target: LoadedTarget
    verifier: Plugin
    engine: EngineConfig
    params: SamplingParams  # but for the seed, which is the text's


def play_drafter(
    setup: PlaySetup, drafter: Plugin, k: int, texts: Sequence[Text]
) -> tuple[list[TextOutcome], str]:
    """Run a drafter with K = k, one text after the other.

    Returns:
        What it gave on each text, and how that was found: PLAYED or RUN.
    """
    rule: Any = setup.verifier.entry.cls(setup.verifier.config)
    config = replace(setup.engine, max_num_reqs=1)
    replay = ReplayConfig(
        max_model_len=config.max_model_len,
        draft_stream=getattr(rule, "draft_stream", STREAM_DRAFT),
        noise_epoch=getattr(rule, "noise_epoch", False),
    )
    engine = Engine(setup.target, drafter.spec, replay, k, config=config)
    follows = rule.text_equal or not engine.drafter.capabilities.offers_q
    follows = follows or setup.params.temperature == 0
    if not follows:
        engine = Engine(setup.target, drafter.spec, setup.verifier.spec, k, config=config)
    outcomes = []
    with progress(f"playing {drafter.entry.name} K={k}", total=len(texts)) as bar:
        for text in texts:
            if follows:
                engine.verifier.follow(text.token_ids)
            outcomes.append(outcome_of_steps(_play(engine, text, setup.params), k))
            bar.advance(text.request_id)
    return outcomes, PLAYED if follows else RUN


def _play(engine: Engine, text: Text, params: SamplingParams) -> list[StepOutcome]:
    """Return the verifications of one request."""
    engine.trace = trace = StepTrace()
    own = replace(params, seed=text.seed)
    engine.add_request(text.request_id, text.token_ids[: text.prompt_len], own)
    while engine.has_requests:
        engine.step()
    rows = trace.requests()
    rows = rows[rows["is_verify"].astype(bool)]
    columns = [rows[name].tolist() for name in StepOutcome._fields]
    return [StepOutcome(*values) for values in zip(*columns, strict=True)]
