"""What `record` writes is what the target computes for the text, whatever was rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from tests.models import random_prompts, tiny_model, tiny_target

LAYERS = [0, 1]


def read(folder: Path) -> list[dict[str, Any]]:
    return [load_file(path) for path in sorted(folder.glob("*.safetensors"))]


@pytest.mark.parametrize("others", [[], [{"name": "ngram"}], [{"name": "draft_model"}]])
def test_states_are_those_of_the_committed_text(tmp_path: Path, others: list[Any]) -> None:
    model = tiny_model("llama")
    if others and others[0]["name"] == "draft_model":
        tiny_model("llama", seed=5).save_pretrained(tmp_path / "draft")  # mostly rejected
        others[0]["model"] = str(tmp_path / "draft")
    record = {"name": "record", "folder": str(tmp_path / "texts"), "aux_layers": LAYERS}
    drafter = {"name": "mixed", "drafters": [record, *others]} if others else record
    llm = LLM(
        tiny_target(model), drafter, "greedy", num_speculative_tokens=3,
        max_num_reqs=2, max_model_len=64, max_num_batched_tokens=16, num_kv_blocks=40,
    )  # fmt: skip
    prompts = random_prompts([4, 20, 9, 13, 7])
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    recorders = getattr(llm.engine.drafter, "children", [llm.engine.drafter])
    recorders[0].flush()
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)]
    found = read(tmp_path / "texts")
    assert len(found) == len(texts)
    for tensors in found:
        token_ids = tensors["token_ids"].tolist()
        (text,) = (t for t in texts if t[: len(token_ids)] == token_ids)
        assert len(text) - 1 <= len(token_ids) <= len(text)
        with torch.inference_mode():
            out = model.get_decoder()(torch.tensor([token_ids]), output_hidden_states=True)
        torch.testing.assert_close(
            tensors["hidden_states"], out.last_hidden_state[0], rtol=1e-4, atol=1e-5
        )
        aux = torch.cat([out.hidden_states[i + 1][0] for i in LAYERS], 1)
        torch.testing.assert_close(tensors["aux_hidden_states"], aux, rtol=1e-4, atol=1e-5)
    with safe_open(next((tmp_path / "texts").glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"aux_layers": "0 1"}


def test_a_folder_is_needed_and_has_to_be_empty(tmp_path: Path) -> None:
    target = tiny_target(tiny_model("llama"))
    (tmp_path / "000000.safetensors").touch()
    for folder, words in (("", "folder=<"), (str(tmp_path), "recorded texts already")):
        with pytest.raises(ConfigError, match=words):
            LLM(target, {"name": "record", "folder": folder})
