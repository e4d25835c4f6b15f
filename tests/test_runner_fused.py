"""The fusion pass: what it matches, what it says of the rest, and parity with the modules."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from runner.attention import single_request_metadata
from runner.models.fused import fuse_decoder
from runner.models.hf import HFModel
from runner.models.layers import PackedRows, StreamedLinear, join_linears
from runner.models.norm import rms_scale
from runner.models.packed_linear import PackedLinear, can_pack
from runner.models.rope import HeadShape, share_turns, turn_heads_ref
from specdec.errors import UnsupportedError
from tests.models import FAMILIES, SIZES, VOCAB_SIZE, randomized, tiny_model

F32, BF16 = torch.float32, torch.bfloat16
NUM_TOKENS = 40


def token_ids(count: int = NUM_TOKENS) -> Tensor:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))


def reference_logits(model: Any, ids: Tensor) -> Tensor:
    """Return what transformers computes with its own attention."""
    with torch.inference_mode():
        return model(input_ids=ids[None], use_cache=False).logits[0].float()


def our_logits(model: HFModel, ids: Tensor, layers: tuple[int, ...] = ()) -> tuple[Tensor, Any]:
    """Run a text in two passes; returns its logits and what was kept of the layers."""
    kv = model.make_kv_cache(1, len(ids))
    logits, kept = [], []
    for positions in torch.arange(len(ids)).split(len(ids) - 7):
        metadata = single_request_metadata(kv, positions, int(positions[-1]) + 1)
        hidden, aux = model.forward_with_layers(ids[positions], positions, metadata, layers)
        logits.append(model.compute_logits(hidden).float())
        kept.append(aux)
    return torch.cat(logits), torch.cat(kept) if layers else None


def relative(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
class TestParity:
    """A fused model is the model."""

    def test_float32(self, family: str) -> None:
        model, ids = tiny_model(family), token_ids()
        fused = HFModel(copy.deepcopy(model))
        assert fused.unfused_reason is None
        assert relative(our_logits(fused, ids)[0], reference_logits(model, ids)) < 2e-6

    def test_bfloat16(self, family: str) -> None:
        model: Any = tiny_model(family)
        ids = token_ids()
        exact = reference_logits(model, ids)
        plain = relative(reference_logits(copy.deepcopy(model).to(BF16), ids), exact)
        fused = relative(our_logits(HFModel(copy.deepcopy(model).to(BF16)), ids)[0], exact)
        # No further from float32 than transformers' own bfloat16 is, give or take a third.
        assert fused < 1.33 * plain + 1e-4

    def test_layers_are_kept_in_the_order_asked_for(self, family: str) -> None:
        model, ids, layers = tiny_model(family), token_ids(), (1, 0, 2, 1)
        fused, plain = (HFModel(copy.deepcopy(model), fuse=on) for on in (True, False))
        logits, kept = our_logits(fused, ids, layers)
        expected_logits, expected = our_logits(plain, ids, layers)
        assert relative(kept, expected) < 2e-6
        assert relative(logits, expected_logits) < 2e-6

    def test_first_layers(self, family: str) -> None:
        model, ids = tiny_model(family), token_ids()
        fused, plain = (
            HFModel(copy.deepcopy(model), fuse=on).first_layers(2) for on in (True, False)
        )
        assert fused.fused is not None
        assert len(fused.fused.layers) == 2
        assert relative(our_logits(fused, ids)[0], our_logits(plain, ids)[0]) < 2e-6


def wrongly_scaled(model: HFModel) -> None:
    assert model.fused is not None
    model.fused.layers[1].attention.scaling *= 1.02


def norms_swapped(model: HFModel) -> None:
    assert model.fused is not None
    layer = model.fused.layers[0]
    layer.input_norm, layer.middle_norm = layer.middle_norm, layer.input_norm


@pytest.mark.parametrize("bug", [wrongly_scaled, norms_swapped])
def test_the_bounds_of_parity_find_a_bug(bug: Any) -> None:
    model, ids = copy.deepcopy(tiny_model("llama")), token_ids()
    for name, weight in model.named_parameters():  # norms that differ
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    fused = HFModel(copy.deepcopy(model))
    bug(fused)
    assert relative(our_logits(fused, ids)[0], reference_logits(model, ids)) > 1e-4


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_scale_of_one_row_is_that_of_several(dtype: torch.dtype) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(torch.as_tensor(rms_scale(x, 1e-5)).double(), exact)
    for row, expected in zip(x.split(1), exact, strict=True):
        scale = torch.as_tensor(rms_scale(row, 1e-5)).double().view(1)
        torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)


def test_layers_of_a_pass_share_their_turns() -> None:
    table, positions = torch.randn(9, 2, 4), torch.tensor([3, 0, 8])
    shared: dict[Any, Any] = {}
    turns = share_turns(table, positions, shared)
    assert share_turns(table, positions, shared) is turns
    assert share_turns(table.clone(), positions, shared) is not turns
    for num_parts in (1, 2):
        parts = torch.randn(num_parts, 3, 4 * 8)
        outputs = []
        for given in (table, turns):
            caches = torch.zeros(2, 6, 1, 8)
            query = turn_heads_ref(
                parts, HeadShape(2, 1, 8), given, positions, None, torch.tensor([1, -1, 2]), *caches
            )
            outputs.append((query, caches))
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other)


def with_biases() -> PreTrainedModel:
    config = LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True})
    return randomized(lambda: LlamaForCausalLM(config))


def test_biases_of_every_layer() -> None:
    model, ids = with_biases(), token_ids()
    fused = HFModel(copy.deepcopy(model))
    assert fused.unfused_reason is None
    assert relative(our_logits(fused, ids)[0], reference_logits(model, ids)) < 2e-6


class Odd(nn.Linear):
    """A linear layer that is more than one."""


def odd_projection(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = Odd(64, 32, bias=False)


def odd_activation(model: Any) -> None:
    model.model.layers[2].mlp.act_fn = nn.GELU()


def odd_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(64)


def more_parts(model: Any) -> None:
    model.model.layers[0].adapter = nn.Linear(64, 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (odd_projection, "k_proj is a Odd"),
        (odd_activation, "activation of its MLP is GELU"),
        (odd_norm, "LayerNorm is no RMSNorm"),
        (more_parts, "a layer has or lacks adapter"),
    ],
)
def test_what_does_not_match_is_named_and_left_whole(change: Any, reason: str) -> None:
    model: Any = tiny_model("llama")
    change(model)
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    with pytest.raises(UnsupportedError, match=reason):
        fuse_decoder(model.get_decoder(), 64)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("model_cls", "config_cls", "options"),
    [
        (Olmo2ForCausalLM, Olmo2Config, {}),
        (Starcoder2ForCausalLM, Starcoder2Config, {"sliding_window": None}),
    ],
)
def test_another_structure_runs_unfused_and_says_why(
    model_cls: Any, config_cls: Any, options: dict[str, Any]
) -> None:
    config, ids = config_cls(**{**SIZES, **options}), token_ids()
    model = randomized(lambda: model_cls(config))
    ours = HFModel(copy.deepcopy(model))
    assert ours.fused is None
    assert ours.unfused_reason
    assert relative(our_logits(ours, ids)[0], reference_logits(model, ids)) < 1e-4


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equal_parts_that_are_put_together_otherwise_run_unfused(dtype: torch.dtype) -> None:
    config = HeliumConfig(**{**SIZES, "head_dim": 16})  # turns pairs that lie side by side
    model: Any = randomized(lambda: HeliumForCausalLM(config))
    ids = token_ids()
    expected = reference_logits(model, ids)
    ours = HFModel(copy.deepcopy(model).to(dtype))
    assert ours.fused is None
    assert "its parts match, but its logits would differ" in str(ours.unfused_reason)
    assert relative(our_logits(ours, ids)[0], expected) < (1e-4 if dtype == F32 else 5e-2)


@pytest.mark.parametrize(
    ("model_cls", "config", "reason"),
    [
        (GraniteForCausalLM, GraniteConfig(**SIZES, residual_multiplier=0.97), "residual_mul"),
        (GraniteForCausalLM, GraniteConfig(**SIZES, embedding_multiplier=1.02), "embedding_mul"),
        (SmolLM3ForCausalLM, SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}), "no positions"),
    ],
)
def test_what_bfloat16_would_hide_is_not_fused(model_cls: Any, config: Any, reason: str) -> None:
    # Weights of the usual initial size: the logits would differ by less than rounding may.
    model: Any = randomized(lambda: model_cls(config), scale=1.0)
    ids = token_ids()
    ours = HFModel(copy.deepcopy(model).to(BF16))
    assert reason in str(ours.unfused_reason)
    assert relative(our_logits(ours, ids)[0], reference_logits(model, ids)) < 1.2e-2


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_done_to_far_positions_alone_is_not_fused_away(dtype: torch.dtype) -> None:
    # Its queries grow from position 64 on, which no text of a few tokens shows.
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 1.0}
    rope["original_max_position_embeddings"] = 64
    config = Ministral3Config(**{**SIZES, "head_dim": 16}, rope_parameters=rope)
    model: Any = randomized(lambda: Ministral3ForCausalLM(config))
    ids = token_ids(100)
    ours = HFModel(copy.deepcopy(model).to(dtype))
    assert "its logits would differ" in str(ours.unfused_reason)
    error = relative(our_logits(ours, ids)[0], reference_logits(model, ids))
    assert error < (1e-4 if dtype == F32 else 5e-2)


def test_window_that_llama_ignores_is_ignored() -> None:
    model, ids = tiny_model("llama", sliding_window=8), token_ids()
    fused = HFModel(copy.deepcopy(model))
    assert fused.unfused_reason is None
    assert relative(our_logits(fused, ids)[0], reference_logits(model, ids)) < 2e-6


def test_weights_are_joined_in_place() -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    fused = HFModel(model)
    assert fused.fused is not None
    attention, joint = model.model.layers[0].self_attn, fused.fused.layers[0].attention.qkv
    assert isinstance(joint, StreamedLinear)
    memory = joint.weight.untyped_storage()
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        assert weight.untyped_storage().data_ptr() == memory.data_ptr(), f"{name} is a copy"
    rows = [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(torch.cat(rows), joint.weight)


@pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=BF16)), reason="oneDNN packs no bfloat16 on this CPU"
)
class TestPacked:
    """bfloat16 on a CPU: one packed layer, and what stands where its parts were."""

    def test_parts_give_their_rows(self) -> None:
        owner = nn.Module()
        linears = [nn.Linear(24, rows, bias=True).to(BF16) for rows in (8, 16)]
        owner.a, owner.b = copy.deepcopy(linears[0]), copy.deepcopy(linears[1])
        joint = join_linears(owner, ("a", "b"))
        x = torch.randn(5, 24, dtype=BF16)
        assert isinstance(joint, PackedLinear)
        assert isinstance(owner.a, PackedRows)
        expected = torch.cat([linear(x) for linear in linears], 1)
        torch.testing.assert_close(joint(x), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(torch.cat((owner.a(x), owner.b(x)), 1), joint(x))

    def test_no_plain_weight_is_left(self) -> None:
        tiny: Any = copy.deepcopy(tiny_model("llama"))
        model = HFModel(tiny.to(BF16))
        assert model.is_packed
        left = [
            name
            for name, weight in model.model.named_parameters()
            if weight.dim() == 2 and "embed" not in name
        ]
        assert left == []

    def test_a_model_that_is_not_fused_after_all_computes_no_row_twice(self) -> None:
        config = HeliumConfig(**{**SIZES, "head_dim": 16})
        model: Any = randomized(lambda: HeliumForCausalLM(config)).to(BF16)
        ours, plain = HFModel(copy.deepcopy(model)), HFModel(copy.deepcopy(model), fuse=False)
        assert "its parts match" in str(ours.unfused_reason)
        kinds = [[type(module) for module in one.model.modules()] for one in (ours, plain)]
        assert kinds[0] == kinds[1]
        assert PackedRows not in kinds[0]
        ids = token_ids()
        assert torch.equal(our_logits(ours, ids)[0], our_logits(plain, ids)[0])
