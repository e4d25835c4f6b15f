"""Drafters that take the target's embedding and rows of its output head: files, rows, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.heads.checkpoint import load_head, save_head
from drafters.medusa import load_medusa, save_medusa
from runner.models.hf import HFModel
from runner.shared_model import load_shared_model, save_shared_model, shares_embedding
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, WeightsError
from tests.drafter_folders import random_medusa
from tests.head_cases import CASES, HeadFiles
from tests.models import SIZES, VOCAB_SIZE, random_prompts, tiny_model, tiny_target

IDS = torch.arange(0, VOCAB_SIZE, 3)
K = 3


@pytest.fixture(scope="module")
def model() -> Any:
    """Build the target."""
    return tiny_model("llama")


def save_layers(model: Any, folder: Path, ids: torch.Tensor | None = IDS, **changes: Any) -> str:
    """Save all layers of a model, so that what is drafted is what the target writes."""
    decoder = model.get_decoder()
    tensors = {k: t for k, t in decoder.state_dict().items() if "embed_tokens" not in k}
    save_shared_model(folder, decoder.config, tensors, ids, VOCAB_SIZE, **changes)
    return str(folder)


def test_rows_of_a_packed_head_are_those_of_its_weight(model: Any) -> None:
    plain = tiny_model("llama").bfloat16()
    weight = plain.get_output_embeddings().weight.detach().clone()
    own = HFModel(plain)
    assert torch.equal(own.head_rows(IDS), weight[IDS])
    head = own.head_of(IDS)
    x = torch.randn(2, SIZES["hidden_size"]).bfloat16()
    torch.testing.assert_close(head(x), own.compute_logits(x)[:, IDS], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scope", ["none", "step"])
@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "part"])
def test_layers_of_the_target_draft_what_it_writes(
    model: Any, tmp_path: Path, ids: torch.Tensor | None, sampling: str, scope: str
) -> None:
    folder = save_layers(model, tmp_path, ids)
    assert shares_embedding(folder)
    spec = {"name": "draft_model", "model": folder, "sampling": sampling}
    prompts = random_prompts([5, 9, 14])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"max_num_reqs": 3, "max_model_len": 64}
    plain = LLM(tiny_target(model), "none", "greedy", **options).generate(prompts, params)
    llm = LLM(tiny_target(model), spec, "rejection", K, graph_scope=scope, **options)
    own = llm.generate(prompts, params)
    assert [out.token_ids for out in own] == [out.token_ids for out in plain]
    known = set(IDS.tolist()) if ids is not None else set(range(VOCAB_SIZE))
    for out in own:
        # All is accepted but for tokens that are not drafted at all.
        missed = sum(token not in known for token in out.token_ids)
        assert out.stats.num_verify_steps <= missed + -(-20 // (K + 1)) + 1
    if ids is not None and sampling == "gumbel":
        logits = llm.engine.runner.draft_logits
        assert logits is not None


def test_files_are_small_and_spread(model: Any, tmp_path: Path) -> None:
    save_layers(model, tmp_path, max_file_bytes=100_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    names = [name for file in files for name in load_file(file)]
    assert len(names) == len(set(names))
    assert not [name for name in names if "embed" in name or "lm_head" in name]
    assert all(file.stat().st_size < 100_000 + 4096 for file in files)
    save_layers(model, tmp_path)  # a save in fewer files leaves none of the others
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    own, ids = load_shared_model(str(tmp_path), tiny_target(model).model)
    assert ids is not None
    assert ids.tolist() == IDS.tolist()
    assert own.num_layers == SIZES["num_hidden_layers"]


def change_config(folder: str, **changes: Any) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "hidden size 128, this one has 64"),
        ({"vocab_size": 98}, "vocabulary 98, this one has 97"),
    ],
)
def test_layers_of_another_target_are_refused(
    model: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = save_layers(model, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=words):
        load_shared_model(folder, tiny_target(model).model)


def test_damaged_layers_are_refused(model: Any, tmp_path: Path) -> None:
    folder = save_layers(model, tmp_path)
    own = tiny_target(model).model
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, words in (("norm.weight", "lacks the tensor"), ("d2t", "'d2t'")):
        save_file({k: t for k, t in tensors.items() if k != name}, file)
        with pytest.raises(WeightsError, match=words):
            load_shared_model(folder, own)
    save_file({**tensors, "more": torch.zeros(2)}, file)
    with pytest.raises(WeightsError, match="unknown tensor 'more'"):
        load_shared_model(folder, own)
    save_file({**tensors, "norm.weight": torch.zeros(3)}, file)
    with pytest.raises(WeightsError, match="shape"):
        load_shared_model(folder, own)
    save_file({**tensors, "d2t": tensors["d2t"] + VOCAB_SIZE}, file)
    with pytest.raises(WeightsError, match="does not have"):
        load_shared_model(folder, own)
    save_file(tensors, file)
    change_config(folder, model_type="nonesuch")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_shared_model(folder, own)


def test_a_head_without_its_output_head_has_to_say_so(tmp_path: Path) -> None:
    target = tiny_model("llama", scale=2.0, vocab_size=17, num_hidden_layers=6)
    files = HeadFiles(CASES["EAGLE-3, speculators"], target, tmp_path / "published")
    tensors = {k: t for k, t in files.stored().items() if k != "lm_head.weight"}
    files.write(tensors=tensors)
    with pytest.raises(WeightsError, match=r"lacks .lm_head\.weight."):
        load_head(files.path, "eagle3")
    files.write({**files.config(), "lm_head": "target"}, tensors)
    head = load_head(files.path, "eagle3")
    assert not head.spec.owns_lm_head
    save_head(str(tmp_path / "saved"), head, "target", shares_lm_head=True)
    again = load_head(str(tmp_path / "saved"), "eagle3")
    assert again.tensors.keys() == head.tensors.keys()
    assert again.target_ids is not None
    # What other readers load has the rows inside.
    rows = target.get_output_embeddings().weight.detach()[again.target_ids]
    save_head(str(tmp_path / "whole"), head, "target", lm_head=rows)
    assert load_head(str(tmp_path / "whole"), "eagle3").spec.owns_lm_head


def test_medusa_heads_may_share_the_targets_projection(tmp_path: Path) -> None:
    heads = random_medusa(2)
    for head in heads:
        head.projection = None
    save_medusa(tmp_path, heads, shares_lm_head=True)
    own = load_medusa(str(tmp_path), SIZES["hidden_size"], VOCAB_SIZE)
    assert all(head.projection is None for head in own)
    with pytest.raises(ConfigError, match="give it as lm_head"):
        save_medusa(tmp_path, heads)
