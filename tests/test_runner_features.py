"""What the target hands to drafters: outputs of its layers, in every scope, for every token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.attention import single_request_metadata
from runner.loader import LoadedTarget
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, TargetView
from specdec.registry import register_drafter
from tests.models import FAMILIES, random_prompts, tiny_model, tiny_target

LAYERS = (1, 0)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SIZES: dict[str, Any] = {"max_model_len": 48, "max_num_batched_tokens": 11, "block_size": 4}


@register_drafter("features_probe", DrafterConfig)
class FeaturesProbe(DrafterBase):
    """Keeps what it was given for every position whose token stays."""

    layers: tuple[int, ...] = LAYERS

    def load(self, target: TargetView) -> None:
        """Say only now what is wanted."""
        self.capabilities = DrafterCapabilities(
            hidden_states="last", aux_layers=self.layers, splits_first_pass=True
        )
        self.seen: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    def first_pass(self, ctx: DraftContext) -> None:
        """Keep the features of committed tokens, by row and position."""
        assert ctx.hidden_states is not None
        assert ctx.aux_hidden_states is not None
        for place, row in enumerate(ctx.idx_mapping.tolist()):
            start, end = ctx.query_start_loc[place : place + 2].tolist()
            kept = end - start - int(ctx.num_rejected[place]) if row >= 0 else 0
            for t in range(start, start + kept):
                features = ctx.hidden_states[t].clone(), ctx.aux_hidden_states[t].clone()
                self.seen.setdefault(row, {})[int(ctx.positions[t])] = features

    def propose(self, ctx: DraftContext) -> None:
        """Draft token 1: now and then it is right."""
        assert ctx.hidden_states is None or ctx.aux_hidden_states is not None
        self.buffers.draft_tokens[:, : ctx.num_drafts] = 1


@torch.inference_mode()
def reference(model: Any, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the last hidden states and the layers' outputs by transformers' own pass."""
    states = model.get_decoder()(torch.tensor([token_ids]), output_hidden_states=True)
    layers = [states.hidden_states[layer + 1][0] for layer in LAYERS]
    return states.last_hidden_state[0], torch.cat(layers, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window"])
def test_recorded_layers_are_those_of_transformers(family: str) -> None:
    model = FAMILIES[family]().eval()
    token_ids = random_prompts([20])[0]
    runnable = tiny_target(model).model
    hidden, aux = reference(model, token_ids)
    positions = torch.arange(len(token_ids))
    metadata = single_request_metadata(runnable.make_kv_cache(1, 32), positions, len(token_ids))
    inputs = torch.tensor(token_ids), positions, metadata
    own = runnable.forward_with_layers(*inputs, LAYERS)
    torch.testing.assert_close(own[0], hidden, **TOLERANCE)
    torch.testing.assert_close(own[1], aux, **TOLERANCE)
    # Nothing is left behind: other passes of the same model pay nothing.
    assert not any(layer._forward_hooks for layer in runnable.layers)
    assert runnable.forward_with_layers(*inputs, ())[1] is None


@pytest.mark.parametrize("scope", ["none", "draft", "step"])
def test_every_committed_position_comes_with_its_features(scope: str) -> None:
    model = tiny_model("llama")
    options = {**SIZES, "graph_scope": scope, "graph_num_reqs": [2, 4], "max_num_reqs": 4}
    engine = Engine(tiny_target(model), "features_probe", "sampled_match", 2, **options)
    probe: Any = engine.drafter
    probe.seen.clear()  # capturing ran padding
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = random_prompts([17, 3, 9])
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    rows, texts = {}, {}
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
        rows.update({r.request_id: r.row for r in engine.scheduler.running if r.row is not None})
    for i, prompt in enumerate(prompts):
        text = prompt + texts[str(i)]
        hidden, aux = reference(model, text)
        seen = probe.seen[rows[str(i)]]
        assert set(range(len(text) - 3)) <= seen.keys()
        for position in range(len(text) - 3):
            torch.testing.assert_close(seen[position][0], hidden[position], **TOLERANCE)
            torch.testing.assert_close(seen[position][1], aux[position], **TOLERANCE)


@pytest.mark.parametrize("layers", [(0, 3), (-1,)])
def test_a_layer_that_does_not_exist_is_refused(
    layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeaturesProbe, "layers", layers)
    target: LoadedTarget = tiny_target(tiny_model("llama"))
    with pytest.raises(ConfigError, match=rf"target layer {layers[-1]}; the target has 3 layers"):
        Engine(target, "features_probe", "sampled_match", 2, **SIZES)
