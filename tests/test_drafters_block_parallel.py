"""A block-parallel head in the engine against the same head in plain torch, step by step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.block_parallel import (
    BlockParallelConfig,
    BlockParallelDrafter,
    load_block_parallel,
)
from runner import head_inputs
from runner.models.hf import HFModel
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, WeightsError
from specdec.protocols import DraftContext, TargetView
from tests.block_parallel_reference import SIZES, PlainHead, random_head, save_random
from tests.models import random_prompts, tiny_model, tiny_target

V = 17
K = 4
PROMPTS = random_prompts((5, 23, 3, 14, 9, 1), seed=2, vocab_size=V)
GREEDY = SamplingParams(temperature=0, max_tokens=18)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=18)


class HeadCheck:
    """Compares each draft's logits, and the KV of committed positions, with the plain head."""

    def __init__(self, path: str, sampling: str, verifier: str, **options: Any) -> None:
        model = tiny_model("llama", vocab_size=V)
        drafter = {"name": "block_parallel", "path": path, "sampling": sampling}
        options = {"max_model_len": 48, **options}
        self.llm = LLM(tiny_target(model), drafter, verifier, K, **options)
        self.plain = PlainHead(model, random_head())
        self.drafter: Any = self.llm.engine.runner.drafter
        self.logit_error = self.kv_error = 0.0
        self.num_checked, self.num_rejected = [0] * K, 0
        self._runs: dict[tuple[int, ...], Any] = {}
        self._choose, self._propose = self.drafter.sampler.choose, self.drafter.propose
        self.drafter.sampler.choose = self.choose
        self.drafter.propose = self.propose

    def places(self, ctx: DraftContext, index: int) -> list[tuple[int, int, list[int]]]:
        """Return place, row and committed tokens where a draft can be used."""
        found = []
        for place, row in enumerate(ctx.idx_mapping.tolist()):
            if row >= 0 and ctx.state.draft_limit[row] > index:
                length = int(ctx.state.total_len[row])
                found.append((place, row, ctx.state.all_token_ids[row, :length].tolist()))
        return found

    def run_plain(self, tokens: list[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the plain head once a text: a mask sees none behind it."""
        if tuple(tokens) not in self._runs:
            self._runs[tuple(tokens)] = self.plain.run(tokens, K - 1)
        return self._runs[tuple(tokens)]

    def choose(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Compare a draft's logits first."""
        for place, _, tokens in self.places(ctx, index):
            expected = self.run_plain(tokens)[0][index]
            error = float((logits[place] - expected).norm() / expected.norm())
            self.logit_error = max(self.logit_error, error)
            self.num_checked[index] += 1
        return self._choose(ctx, logits, index)

    def propose(self, ctx: DraftContext) -> None:
        """Compare the KV that the first pass has left."""
        kv = self.drafter.buffers.kv
        for _, row, tokens in self.places(ctx, 0):
            _, *expected = self.run_plain(tokens)
            position = torch.arange(len(tokens) - 1)
            block = ctx.state.block_table[row, position // ctx.block_size].long()
            slots = block * ctx.block_size + position % ctx.block_size
            for own, plain in zip((kv.keys, kv.values), expected, strict=True):
                for layer, cached in zip(plain, own, strict=True):
                    error = float((cached[slots] - layer[: len(slots)]).abs().max())
                    self.kv_error = max(self.kv_error, error)
        self.num_rejected += int(ctx.num_rejected.sum())
        self._propose(ctx)

    def run(self, params: SamplingParams) -> None:
        """Write all texts."""
        self.llm.generate(PROMPTS, params)
        assert min(self.num_checked) > 10
        assert self.num_rejected > 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random(tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize(
    ("sampling", "verifier", "params"),
    [("argmax", "greedy", GREEDY), ("gumbel", "rejection", SAMPLED)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 18, "block_size": 4},
        {"max_num_reqs": 2, "block_size": 3},
        {"graph_scope": "step", "graph_num_reqs": [2, 4, 6]},
    ],
    ids=["plain", "chunks", "preempted", "rows reused", "fixed shapes"],
)
def test_logits_and_kv_are_those_of_the_plain_head(
    path: str, options: dict[str, Any], sampling: str, verifier: str, params: SamplingParams
) -> None:
    check = HeadCheck(path, sampling, verifier, **options)
    check.run(params)
    assert check.logit_error < 1e-4
    assert check.kv_error < 1e-4


def test_kv_of_masks_that_stays_where_a_token_was_committed_is_noticed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = head_inputs.first_head_inputs

    def only_last(ctx: Any, kv: Any) -> Any:
        step = right(ctx, kv)
        if ctx.is_verify.all():
            keep = torch.zeros_like(step.attn_metadata.slot_mapping, dtype=torch.bool)
            keep[step.last_indices] = True
            slots = torch.where(keep, step.attn_metadata.slot_mapping, -1)
            step.attn_metadata.slot_mapping = slots
        return step

    monkeypatch.setattr("drafters.block_parallel.first_head_inputs", only_last)
    check = HeadCheck(path, "argmax", "greedy")
    check.run(GREEDY)
    assert check.kv_error > 1e-2
    assert check.logit_error > 1e-3


def test_a_mask_sees_the_masks_before_it(path: str) -> None:
    plain = PlainHead(tiny_model("llama", vocab_size=V), random_head())
    logits, _, _ = plain.run(PROMPTS[1], 3)
    assert float((logits[2] - logits[1]).abs().max()) > 1e-2
    # What comes later changes nothing earlier: the masks of a longer block begin alike.
    torch.testing.assert_close(plain.run(PROMPTS[1], 1)[0], logits[:2])


def test_saved_heads_load_as_they_were(tmp_path: Path) -> None:
    head = load_block_parallel(save_random(tmp_path), SIZES.hidden_size)
    assert head.sizes == replace(SIZES, aux_layers=list(SIZES.aux_layers))
    for name, tensor in random_head().state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor)


def test_frequencies_of_positions_stay_float32_in_a_bf16_head(path: str) -> None:
    target = HFModel(tiny_model("llama", vocab_size=V).bfloat16())
    drafter = BlockParallelDrafter(BlockParallelConfig(path=path))
    drafter.load(TargetView(target, V, 64, torch.bfloat16, torch.device("cpu"), K, 48))
    expected = SIZES.rope_theta ** (-torch.arange(0, SIZES.head_size, 2) / SIZES.head_size)
    torch.testing.assert_close(drafter.head.body.rotary_emb.inv_freq, expected)
    assert drafter.head.mask_feature.dtype == torch.bfloat16


def edit(folder: Path, **changes: Any) -> str:
    """Save a head, change its config.json, and return its folder; None takes a key away."""
    save_random(folder)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "llama"}, ["type 'llama'", "specdec_block_parallel"]),
        ({"num_layers": None}, ["num_layers", "does not describe"]),
        ({"width": 3}, ["width", "known sizes"]),
        ({"num_layers": 3}, ["lacks the tensor", "body.layers.2"]),
        ({"num_layers": 1}, ["unknown tensor", "body.layers.1"]),
        ({"intermediate_size": 96}, ["[64, 80]", "[64, 96]"]),
        ({"hidden_size": 32, "num_layers": 2}, ["hidden size 32", "has 64"]),
    ],
    ids=str,
)
def test_wrong_heads_are_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(WeightsError) as caught:
        load_block_parallel(edit(tmp_path, **changes), 64)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_layers_that_the_target_has_not_are_refused(tmp_path: Path) -> None:
    path = edit(tmp_path, aux_layers=[2, 7])
    drafter = {"name": "block_parallel", "path": path}
    with pytest.raises(ConfigError, match="target layer 7"):
        LLM(tiny_target(tiny_model()), drafter, "greedy", max_model_len=48)
    with pytest.raises(ConfigError, match="needs path"):
        BlockParallelConfig()


def test_a_damaged_tensor_is_refused(tmp_path: Path) -> None:
    path = save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fuse.weight"] = tensors["fuse.weight"][:, :5].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'fuse.weight' has shape \[64, 5\]"):
        load_block_parallel(path, 64)
