"""The engine under `block`: the target's joint law, and noise that is fresh in every step.

Sampled drafts with a law of their own (another temperature, truncated) are held to the target's law
here too, under `rejection` as well.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from drafters.draft_sampling import DraftSampler
from runner.rows import scatter_rows
from sampler.noise import STREAM_DRAFT, STREAM_TARGET, mix_epoch, mix_seed, noise_key, noise_uniform
from sampler.sampler import Sampler
from sampler.verify.block import BlockConfig, BlockVerifier
from specdec import LLM, SamplingParams, register_drafter
from specdec.errors import ConfigError
from specdec.protocols import DraftContext
from tests.statistics import dense_gumbel_sample
from tests.test_rejection_law_engine import (
    FLAT,
    NUM_TEXTS,
    PLAIN,
    PROMPT,
    SHARP,
    draft_model,
    folders,
    law_test,
    target,
)

__all__ = ["folders"]  # a fixture


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


@pytest.mark.parametrize("params", [PLAIN, SHARP])
def test_sampled_draft_model_leaves_the_law_untouched(
    folders: dict[str, str], params: SamplingParams
) -> None:
    result, outputs = law_test(draft_model(folders["opposite"]), params, "block")
    assert result.passes, result
    assert sum(o.stats.num_accepted for o in outputs) > 0


def test_law_holds_while_kinds_change_and_requests_are_preempted() -> None:
    result, outputs = law_test(
        "alternating_in_tests", PLAIN, "block", block_size=2, num_kv_blocks=900, max_num_reqs=256
    )
    assert result.passes, result
    assert sum(o.stats.num_preemptions for o in outputs) > 50


def test_law_holds_with_two_steps_in_flight_in_fixed_shapes(folders: dict[str, str]) -> None:
    options = {"max_steps_in_flight": 2, "graph_scope": "step", "graph_num_reqs": [512]}
    result, _ = law_test(draft_model(folders["opposite"]), FLAT, "block", **options)
    assert result.passes, result


@pytest.mark.parametrize(
    ("own", "verifier"),
    [
        ({"temperature": 0.5}, "block"),
        ({"top_k": 2}, "block"),
        ({"temperature": 2.0, "top_p": 0.6}, "rejection"),
    ],
)
def test_drafts_of_a_law_of_their_own_leave_the_law_untouched(
    folders: dict[str, str], own: dict[str, Any], verifier: str
) -> None:
    result, outputs = law_test({**draft_model(folders["other"]), **own}, PLAIN, verifier)
    assert result.passes, result
    assert sum(o.stats.num_accepted for o in outputs) > NUM_TEXTS / 2


def test_draft_law_that_is_not_truncated_breaks_the_law(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = DraftSampler.choose

    def whole(self: Any, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        token = right(self, ctx, logits, index)
        self._buffers.draft_logits[ctx.idx_mapping.long(), index] = logits
        return token

    monkeypatch.setattr(DraftSampler, "choose", whole)
    result, _ = law_test({**draft_model(folders["other"]), "top_k": 1}, PLAIN, "block")
    assert not result.passes, result


# --- noise of drafters ----------------------------------------------------------------------------


class NoisyDrafter(DrafterBase):
    """Drafts token 0, and keeps the noise of one position, step by step."""

    seen: list[tuple[int, float]]

    def propose(self, ctx: DraftContext) -> None:
        """Ask for the noise of position 7 in every step."""
        rows = ctx.idx_mapping.long()
        noise = ctx.noise.uniform(rows[:1], torch.tensor([7]))
        type(self).seen.append((int(ctx.state.total_len[rows[0]]), float(noise[0])))
        drafts = torch.zeros(len(rows), self.buffers.num_speculative_tokens, dtype=torch.int64)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, drafts)


register_drafter("noisy_in_tests", DrafterConfig)(NoisyDrafter)


def noise_of_steps(verifier: str) -> list[tuple[int, float]]:
    """Return the row's length and the noise of position 7, for every step."""
    NoisyDrafter.seen = []
    llm = LLM(target(), "noisy_in_tests", verifier, 2, max_num_reqs=1, max_model_len=24)
    llm.generate([PROMPT], SamplingParams(max_tokens=12, seed=3))
    assert len(NoisyDrafter.seen) > 3
    return NoisyDrafter.seen


def uniform_of(seed: Tensor, stream: int) -> float:
    key = noise_key(seed, torch.tensor([7]), stream)
    return float(noise_uniform(key, torch.tensor([-1], dtype=torch.int32))[0])


def test_noise_of_drafters_is_of_the_stream_and_as_fresh_as_the_verifier_asks() -> None:
    seed = torch.tensor([mix_seed(3, 0)])
    for verifier, stream in (
        ("rejection", STREAM_DRAFT),
        ("sampled_match", STREAM_DRAFT),
        ("coupled", STREAM_TARGET),
    ):
        noise = {value for _, value in noise_of_steps(verifier)}
        assert noise == {uniform_of(seed, stream)}, verifier
    seen = noise_of_steps("block")
    assert len({value for _, value in seen}) == len(seen)
    for total_len, value in seen:
        assert value == uniform_of(mix_epoch(seed, torch.tensor([total_len])), STREAM_DRAFT)


def test_epochs_without_the_rows_lengths_are_refused() -> None:
    sampler = Sampler(BlockVerifier(BlockConfig()), 2, 97, torch.device("cpu"))
    with pytest.raises(ValueError, match="needs the rows' lengths"):
        sampler.noise()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0\.0 is not allowed"),
        ({"top_p": 0.0}, r"top_p=0\.0 are not allowed"),
        ({"top_k": -2}, r"top_k=-2 and"),
        ({"top_k": 2, "sampling": "argmax"}, "have no effect with sampling='argmax'"),
    ],
)
def test_draft_laws_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    spec = {"name": "draft_model", "model": "target", "sampling": "gumbel", **values}
    with pytest.raises(ConfigError, match=message):
        LLM(target(), spec, "rejection", 2, max_model_len=24)
