"""The target's first layers as a drafter: what it shares, what it proposes, which KV it writes."""

import copy
from typing import Any

import pytest
import torch

from runner.models.hf import HFModel
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from tests.models import FAMILIES, SIZES, random_prompts, tiny_model, tiny_target
from tests.test_draft_kv import K, KvCheck, V

GREEDY = SamplingParams(temperature=0, max_tokens=18)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=18)
LAYERS = SIZES["num_hidden_layers"]


def shortened(model: Any, num_layers: int) -> Any:
    """Return a copy of a model without its last layers, still under transformers' attention."""
    short = copy.deepcopy(model)
    decoder = short.get_decoder()
    decoder.layers = decoder.layers[:num_layers]
    short.config.num_hidden_layers = num_layers
    return short


def early(family: str = "llama") -> Any:
    """Return a model whose last layer adds nothing: leaving before it changes nothing."""
    model: Any = tiny_model(family, vocab_size=V)
    layer = model.get_decoder().layers[-1]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_compute_what_a_shorter_model_does_and_share_every_weight(family: str) -> None:
    model: Any = tiny_model(family)
    whole = HFModel(copy.deepcopy(model))
    first = whole.first_layers(2)
    ids = torch.tensor(random_prompts((24,))[0])
    expected = shortened(model, 2)(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(first._logits_in_chunks(ids), expected, rtol=1e-4, atol=1e-4)
    # The whole model is as it was, and holds all that the first layers hold.
    expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(whole._logits_in_chunks(ids), expected, rtol=1e-4, atol=1e-4)
    own = {parameter.data_ptr() for parameter in whole.model.parameters()}
    assert {parameter.data_ptr() for parameter in first.decoder.parameters()} < own
    assert first.head is whole.head
    assert (first.num_layers, whole.num_layers) == (2, LAYERS)


def test_a_target_trained_to_leave_early_accepts_every_draft() -> None:
    llm = LLM(
        tiny_target(early()), {"name": "layer_skip", "num_layers": LAYERS - 1}, "greedy", K,
        max_model_len=64,
    )  # fmt: skip
    outputs = llm.generate(random_prompts((5, 9), vocab_size=V), GREEDY)
    for output in outputs:
        assert output.stats.num_accepted == output.stats.num_drafted > 0


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
        {"max_num_reqs": 2},
    ],
    ids=["plain", "chunks", "preempted", "rows reused"],
)
def test_kv_is_that_of_the_first_layers_over_the_committed_text(
    options: dict[str, int], sampling: str, verifier: str, params: SamplingParams
) -> None:
    drafter = {"name": "layer_skip", "num_layers": 2, "sampling": sampling}
    target = tiny_target(tiny_model("llama", vocab_size=V))
    check = KvCheck(LLM(target, drafter, verifier, K, **{"max_model_len": 48, **options}))
    check.draft = shortened(tiny_model("llama", vocab_size=V), 2)
    assert check.run(params) < 2e-5
    assert len(check.engine.runner.kv_caches[1].keys) == 2


@pytest.mark.parametrize("num_layers", [0, -1, LAYERS, LAYERS + 5])
def test_layers_that_the_target_has_not_to_give_are_refused(num_layers: int) -> None:
    drafter = {"name": "layer_skip", "num_layers": num_layers}
    with pytest.raises(ConfigError, match=f"num_layers={num_layers} is not allowed"):
        LLM(tiny_target(tiny_model()), drafter, "greedy", max_model_len=64)


def test_a_change_of_the_target_changes_its_first_layers() -> None:
    whole = HFModel(copy.deepcopy(tiny_model()))
    first = whole.first_layers(1)
    with torch.no_grad():
        whole.layers[0].mlp.down_proj.weight.zero_()  # pyright: ignore
    assert not first.layers[0].mlp.down_proj.weight.any()  # pyright: ignore
