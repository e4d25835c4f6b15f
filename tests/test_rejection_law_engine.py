"""The engine writes texts with the target's joint law under `rejection`, drafter by drafter.

The target is a tiny Llama over three tokens; its law is enumerated from transformers' own logits of
every text. Many requests with seeds of their own run side by side.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from drafters.draft_sampling import DraftSampler
from runner.rows import scatter_rows
from sampler.verify.rejection import RejectionConfig
from specdec import LLM, DrafterCapabilities, SamplingParams, register_drafter, register_verifier
from specdec.protocols import DRAFT_KIND_NONE, DRAFT_KIND_WITH_Q, DraftContext
from tests.models import tiny_model, tiny_target
from tests.statistics import (
    ChiSquare,
    chi_square,
    dense_gumbel_sample,
    joint_law,
    processed_law,
    window_counts,
    window_law,
)
from tests.test_rejection_law import AcceptsAlways, ResidualFromTarget

V = 3
K = 2
WINDOW = K + 2
START = 1
# Beyond the window a row still has room for all K drafts: the end cuts no run inside the window.
LENGTH = START + WINDOW + K
NUM_TEXTS = 1500
PROMPT = [0, 1, 2, 0, 1]
SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
PLAIN = SamplingParams(temperature=1.0)
SHARP = SamplingParams(temperature=0.6, top_p=0.85)
COLD = SamplingParams(temperature=0.3)
FLAT = SamplingParams(temperature=1.5)


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


@functools.cache
def target_model() -> Any:
    """Return the target as transformers runs it; its head gives logits of a spread near 1."""
    return tiny_model("llama", seed=51, scale=4.0, **SIZES)


@functools.cache
def target() -> Any:
    """Return the target behind the runner, shared by all engines."""
    return tiny_target(target_model())


@functools.cache
def exact_law(temperature: float, top_p: float) -> np.ndarray:
    """Return the joint law of the window, from transformers' logits of every text."""

    @torch.inference_mode()
    def next_law(texts: np.ndarray) -> np.ndarray:
        prompts = np.tile(PROMPT, (len(texts), 1))
        ids = torch.from_numpy(np.concatenate([prompts, texts], 1))
        logits = target_model()(ids, use_cache=False).logits[:, -1]
        return processed_law(logits.numpy(), temperature, top_p)

    return window_law(joint_law(next_law, V, START + WINDOW), START, WINDOW)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save draft models: the target with its head turned round, and one of other weights."""
    opposite = tiny_model("llama", seed=51, scale=4.0, **SIZES)
    opposite.get_output_embeddings().weight.data.neg_()  # pyright: ignore[reportOptionalMemberAccess]
    models = {
        "opposite": opposite,
        "other": tiny_model("llama", seed=43, scale=4.0, **SIZES),
        "smaller": tiny_model("llama", seed=43, scale=4.0, **{**SIZES, "vocab_size": V - 1}),
        "larger": tiny_model("llama", seed=43, scale=4.0, **{**SIZES, "vocab_size": V + 2}),
    }
    folder = tmp_path_factory.mktemp("drafts")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


class AlternatingDrafter(DrafterBase):
    """Changes its kind with every token: q drafts, one-hot drafts, a short run, no draft."""

    capabilities = DrafterCapabilities(offers_q=True, variable_length=True)

    def propose(self, ctx: DraftContext) -> None:
        """Draw from a fixed law, or count up from the last token."""
        rows = ctx.idx_mapping.long()
        total_len = ctx.state.total_len[rows].long()[:, None]
        turn = total_len % 4
        law = torch.tensor([-1.0, 2.0, 0.0])
        positions = total_len + torch.arange(K)
        noise = ctx.noise.gumbel(
            rows.repeat_interleave(K), positions.reshape(-1), torch.arange(V)
        ).view(-1, K, V)
        last = ctx.state.all_token_ids[rows, total_len[:, 0] - 1].long()[:, None]
        counted = (last + 1 + torch.arange(K)) % V
        drafts = torch.where(turn == 0, (law + noise).argmax(2), counted)
        drafts[:, 1:] = torch.where(turn == 2, -1, drafts[:, 1:])
        drafts = torch.where(turn == 3, -1, drafts)
        assert self.buffers.draft_logits is not None
        scatter_rows(self.buffers.draft_logits, ctx.idx_mapping, law.expand(len(rows), K, V))
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, drafts)
        kinds = torch.where(turn[:, 0] == 0, DRAFT_KIND_WITH_Q, DRAFT_KIND_NONE).to(torch.int8)
        scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kinds)


register_drafter("alternating_in_tests", DrafterConfig)(AlternatingDrafter)
for bug in (ResidualFromTarget, AcceptsAlways):
    register_verifier(f"bug_{bug.__name__}", RejectionConfig)(bug)


def law_test(
    drafter: Any, params: SamplingParams, verifier: str = "rejection", **options: Any
) -> tuple[ChiSquare, Any]:
    """Write NUM_TEXTS texts and hold their window to the law; returns the outputs as well."""
    options = {"max_num_reqs": 512, "max_model_len": 16, **options}
    llm = LLM(target(), drafter, verifier, K, **options)
    requests = [
        SamplingParams(
            temperature=params.temperature, top_p=params.top_p, max_tokens=LENGTH, seed=seed
        )
        for seed in range(NUM_TEXTS)
    ]
    outputs = llm.generate([PROMPT] * NUM_TEXTS, requests)
    counts = window_counts([output.token_ids for output in outputs], START, WINDOW, V)
    return chi_square(counts, exact_law(params.temperature, params.top_p)), outputs


def draft_model(folder: str, sampling: str = "gumbel") -> dict[str, str]:
    """Return the spec of a draft model."""
    return {"name": "draft_model", "model": folder, "sampling": sampling}


@pytest.mark.parametrize("params", [PLAIN, SHARP, COLD, FLAT])
@pytest.mark.parametrize("model", ["opposite", "other"])
def test_sampled_draft_model_leaves_the_law_untouched(
    folders: dict[str, str], model: str, params: SamplingParams
) -> None:
    result, outputs = law_test(draft_model(folders[model]), params)
    assert result.passes, result
    assert (
        0 < sum(o.stats.num_accepted for o in outputs) < sum(o.stats.num_drafted for o in outputs)
    )


@pytest.mark.parametrize("model", ["smaller", "larger"])
def test_draft_model_whose_vocabulary_is_padded_otherwise_leaves_the_law_untouched(
    folders: dict[str, str], model: str
) -> None:
    # Models of one tokenizer are padded to unlike sizes.
    result, outputs = law_test(draft_model(folders[model]), PLAIN)
    assert result.passes, result
    assert sum(o.stats.num_accepted for o in outputs) > NUM_TEXTS / 2


def test_argmax_draft_model_leaves_the_law_untouched(folders: dict[str, str]) -> None:
    result, _ = law_test(draft_model(folders["other"], "argmax"), PLAIN)
    assert result.passes, result


def test_one_hot_drafters_leave_the_law_untouched() -> None:
    unlikely = {"name": "oracle", "texts": [[*PROMPT, *[0, 1, 2] * 3]], "rates": [0.7, 0.4]}
    for drafter in ("none", "ngram", unlikely):
        result, _ = law_test(drafter, PLAIN)
        assert result.passes, (drafter, result)


def test_law_holds_while_kinds_change_and_requests_are_preempted() -> None:
    result, outputs = law_test(
        "alternating_in_tests", PLAIN, block_size=2, num_kv_blocks=900, max_num_reqs=256
    )
    assert result.passes, result
    assert sum(o.stats.num_preemptions for o in outputs) > 50


def test_law_holds_with_two_steps_in_flight(folders: dict[str, str]) -> None:
    result, _ = law_test(draft_model(folders["opposite"]), FLAT, max_steps_in_flight=2)
    assert result.passes, result


def test_draft_model_is_accepted_as_often_as_the_laws_overlap(folders: dict[str, str]) -> None:
    # One token is written before the first draft: the overlap is averaged over its law.
    expected = 0.0
    with torch.inference_mode():
        logits = target_model()(torch.tensor([PROMPT])).logits[0, -1].numpy()
        for token, probability in enumerate(processed_law(logits, 1.0)):
            after = target_model()(torch.tensor([[*PROMPT, token]])).logits[0, -1].numpy()
            overlap = np.minimum(processed_law(after, 1.0), processed_law(-after, 1.0)).sum()
            expected += probability * overlap
    llm = LLM(target(), draft_model(folders["opposite"]), "rejection", 1, max_model_len=16)
    # Two tokens after the first leave room for one draft, which the first verification judges.
    params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(4000)]
    outputs = llm.generate([PROMPT] * len(params), params)
    accepted = sum(o.stats.accepted_per_position[0] for o in outputs)
    deviation = (len(params) * expected * (1 - expected)) ** 0.5
    assert all(o.stats.num_drafted == 1 for o in outputs)
    assert abs(accepted - len(params) * expected) < 5 * deviation


# --- injected bugs --------------------------------------------------------------------------------


def test_bug_in_the_residual_breaks_the_law(folders: dict[str, str]) -> None:
    for drafter in ("ngram", "alternating_in_tests", draft_model(folders["opposite"])):
        result, _ = law_test(drafter, PLAIN, verifier="bug_ResidualFromTarget")
        assert not result.passes, (drafter, result)


def test_accepting_every_draft_breaks_the_law(folders: dict[str, str]) -> None:
    result, _ = law_test(draft_model(folders["other"]), PLAIN, verifier="bug_AcceptsAlways")
    assert not result.passes, result


def test_draft_law_of_another_temperature_breaks_the_law(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = DraftSampler.choose

    def unscaled(self: Any, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        token = right(self, ctx, logits, index)
        self._buffers.draft_logits[ctx.idx_mapping.long(), index] = logits
        return token

    monkeypatch.setattr(DraftSampler, "choose", unscaled)
    result, _ = law_test(draft_model(folders["other"]), COLD)
    assert not result.passes, result
