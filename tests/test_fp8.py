"""8-bit weights: rounding, the layers over them, and what a model of them gives."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.training.frozen_target import FrozenTarget
from runner.dispatch import on_device
from runner.loader import LoadedTarget
from runner.models import hf, layers
from runner.models.fp8 import FP8, compare_logits, dequantize_rows, quantize_rows
from runner.models.hf import HFModel
from runner.models.layers import PackedRows, StreamedLinear
from runner.models.linear_choices import TOKEN_LIMITS, rule
from runner.models.linear_launch import LinearShape
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, UnsupportedError
from tests.current_device import record_devices
from tests.models import (
    FAMILIES,
    VOCAB_SIZE,
    byte_tokenizer,
    random_prompts,
    randomized,
    tiny_model,
)

HALF_STEP = 2.0**-4  # of a number with three bits of mantissa


def test_rows_are_rounded_to_within_half_a_step() -> None:
    weight = torch.randn(12, 40) * torch.logspace(-6, 4, 12)[:, None]
    weight[3] = 0.0
    values, scales = quantize_rows(weight)
    assert values.dtype == FP8
    error = (dequantize_rows(values, scales, torch.float32) - weight).abs()
    # Numbers far below a row's largest fall into the format's subnormal ones.
    allowed = torch.maximum(weight.abs() * HALF_STEP, scales[:, None] * 2.0**-10)
    assert bool((error <= allowed * 1.0001).all())
    assert bool((error[3] == 0).all())
    largest = dequantize_rows(values, scales, torch.float32).abs().amax(1)
    torch.testing.assert_close(largest, weight.abs().amax(1))


def test_a_weight_that_is_no_number_stays_one_that_shows() -> None:
    weight = torch.randn(3, 8)
    weight[1, 2] = float("nan")
    values, scales = quantize_rows(weight)
    assert dequantize_rows(values, scales, torch.float32).isnan().any(1).tolist() == [
        False,
        True,
        False,
    ]
    assert scales.isnan().tolist() == [False, True, False]  # and so is every output of the row


def test_a_layer_computes_with_its_rounded_weight() -> None:
    bias = torch.randn(24)
    layer = StreamedLinear(torch.randn(24, 32), bias)
    layer.quantize()
    assert layer.scales is not None
    x = torch.randn(5, 32)
    weight = dequantize_rows(layer.weight, layer.scales, torch.float32)
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    gate, up = (x @ weight.T + bias).chunk(2, 1)
    torch.testing.assert_close(layer.gated(x), torch.nn.functional.silu(gate) * up)


def token_ids(count: int = 48) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_reports_what_rounding_did(family: str) -> None:
    model = HFModel(copy.deepcopy(tiny_model(family)))
    effect = model.quantize(token_ids())
    assert effect == model.weight_effect
    assert effect.num_tokens == 48
    # Random weights of this scale make much of a small error: trained models move far less.
    assert 0.0 < effect.relative_error < 0.5
    assert effect.top1_agreement > 0.5
    assert effect.mean_kl > 0.0


def test_a_wrong_scale_shows_in_the_report() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    logits = model._logits_in_chunks(token_ids())
    right = model.quantize(token_ids())
    assert model.fused is not None
    layer: Any = model.fused.layers[1].mlp.down
    layer.scales = layer.scales * 2.0
    wrong = compare_logits(logits, model._logits_in_chunks(token_ids()))
    assert wrong.relative_error > 2 * right.relative_error


def test_no_weight_of_a_layer_is_left_in_another_dtype() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    model.quantize(token_ids())
    left = [name for name, w in model.decoder.named_parameters() if w.dim() == 2]
    assert left == ["embed_tokens.weight"]
    layer: Any = model.decoder.layers[0]  # pyright: ignore[reportIndexIssue]
    assert isinstance(layer.self_attn.k_proj, PackedRows)
    x = torch.randn(1, 3, 64)
    assert layer.self_attn.k_proj(x).shape == (1, 3, 32)


def test_drafts_change_no_text_of_a_rounded_target() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    model.quantize(token_ids())
    prompts, params = random_prompts((5, 17, 9)), SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for drafter in ("none", "ngram", {"name": "draft_model", "model": "target"}):
        llm = LLM(LoadedTarget("tiny", model, None), drafter, "greedy", 3, max_model_len=80)
        texts.append([out.token_ids for out in llm.generate(prompts, params)])
    assert texts[0] == texts[1] == texts[2]


def test_what_runs_while_a_model_is_loaded_runs_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Triton launches on the current GPU: with device="cuda:1" that has to be the model's.
    assert on_device(torch.device("cuda", 1)).idx == 1  # pyright: ignore
    current = record_devices(monkeypatch, hf)
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    assert model.fused is not None
    plain, seen = model.fused.forward, []

    def forward(*args: Any) -> Any:
        seen.append(list(current))
        return plain(*args)

    monkeypatch.setattr(model.fused, "forward", forward)
    model.quantize(token_ids())
    assert seen == [[model.device]] * 4


def test_weights_are_rounded_once() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    effect = model.quantize(token_ids())
    with pytest.raises(UnsupportedError, match="8-bit already"):
        model.quantize(token_ids())
    assert model.weight_effect == effect


def test_a_rounded_target_is_not_trained_on() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")))
    model.quantize(token_ids())
    with pytest.raises(ConfigError, match="8-bit weights"):
        FrozenTarget(LoadedTarget("tiny", model, None))


def test_an_unfused_model_is_refused() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")), fuse=False)
    with pytest.raises(UnsupportedError, match="not fused"):
        model.quantize(token_ids())


def test_the_kernel_is_taken_for_more_tokens_than_with_wide_weights() -> None:
    wide, narrow = LinearShape(4096, 4096), LinearShape(4096, 4096, eight_bit=True)
    taken = [limit for limit in TOKEN_LIMITS if rule(narrow, limit) is not None]
    assert taken == [16, 32, 64, 160, 320]
    assert [limit for limit in TOKEN_LIMITS if rule(wide, limit) is not None] == [16, 32, 64]


def test_a_layer_asks_for_the_launch_of_the_weight_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[LinearShape] = []
    monkeypatch.setattr(layers, "choose_linear", lambda shape, *_: asked.append(shape))
    layer, x = StreamedLinear(torch.randn(24, 32)), torch.randn(5, 32)
    layer.parts(x)
    layer.quantize()
    layer.parts(x)
    layer.gated(x)
    assert asked == [
        LinearShape(24, 32),
        LinearShape(24, 32, eight_bit=True),
        LinearShape(12, 32, glu=True, eight_bit=True),
    ]


def test_option_reaches_the_target_that_is_loaded_by_name(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = randomized(lambda: FAMILIES["llama"](vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path), "none", "greedy", dtype="float32", weight_dtype="fp8", max_model_len=80
    )
    effect = llm.engine.target.model.weight_effect
    assert effect is not None
    assert effect.num_tokens > 100


def test_a_loaded_target_of_other_weights_is_refused() -> None:
    target = LoadedTarget("tiny", HFModel(copy.deepcopy(tiny_model("llama"))), None)
    with pytest.raises(ConfigError, match="loaded by name"):
        LLM(target, "none", "greedy", weight_dtype="fp8", max_model_len=80)


def test_an_unknown_weight_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_dtype='int3' is not allowed"):
        LLM("nowhere", "none", "greedy", weight_dtype="int3")
