"""The drafters that come with the project: their files, and how they are found."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from drafters.shipped import shipped_folder
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from specdec.protocols import TargetView
from specdec.testing import tiny_target

ROOT = Path(__file__).parent.parent
TRAINED = ROOT / "drafters" / "trained" / "smollm2-135m-instruct"
DRAFTERS = ("draft_model", "eagle3")
MAX_BYTES, MAX_FILE_BYTES = 28_000_000, 12_000_000


def view(hidden_size: int = 576, num_layers: int = 30) -> TargetView:
    """Return what `shipped_folder` reads of a target."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="llama"), layers=[None] * num_layers)
    return cast(TargetView, SimpleNamespace(model=model, hidden_size=hidden_size, vocab_size=49152))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_shipped_drafter_is_found_for_its_target_alone(name: str) -> None:
    assert Path(shipped_folder(name, view(), "path")) == TRAINED / name
    for other in (view(hidden_size=960), view(num_layers=32)):
        with pytest.raises(ConfigError, match=r"only for smollm2-135m-instruct; give path=<"):
            shipped_folder(name, other, "path")
    with pytest.raises(ConfigError, match="no medusa comes with the project"):
        shipped_folder("medusa", view(), "path")
    with pytest.raises(ConfigError, match=f"no {name} comes with the project for this target"):
        LLM(tiny_target(), name, max_model_len=64)


def test_shipped_files_are_small() -> None:
    sizes = [path.stat().st_size for path in TRAINED.rglob("*.safetensors")]
    assert len(sizes) >= len(DRAFTERS)
    assert sum(sizes) <= MAX_BYTES
    assert max(sizes) <= MAX_FILE_BYTES


@pytest.mark.parametrize("name", DRAFTERS)
def test_shipped_files_hold_a_drafter_alone(name: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in (TRAINED / name).glob("*.safetensors"):
        tensors |= load_file(path)
    assert not [key for key in tensors if "lm_head" in key or "embed_tokens" in key]
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights)
    assert all(bool(tensor.isfinite().all()) for tensor in weights)
    text = (TRAINED / name / "config.json").read_text()
    assert json.loads(text)["draft_vocab_size"] == 16384
    assert "_name_or_path" not in text
    assert (TRAINED / name / "README.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("eagle3", 2.1), ("draft_model", 1.8)])
def test_a_shipped_drafter_works_by_name(name: str, least: float) -> None:
    prompts: Any = [
        [{"role": "user", "content": text}]
        for text in (
            "Explain to a child why the sky is blue.",
            "A box holds 12 eggs. How many eggs are in 7 boxes?",
            "Write a Python function that returns the largest number of a list.",
            "Write a short letter to a friend about a walk in the forest.",
        )
    ]
    params = SamplingParams(temperature=0, max_tokens=48)
    options: dict[str, Any] = {"dtype": "float32", "max_num_reqs": 4, "max_model_len": 256}
    plain = LLM("smollm2-135m-instruct", "none", "greedy", **options).generate(prompts, params)
    found = LLM("smollm2-135m-instruct", name, "greedy", 5, **options).generate(prompts, params)
    assert [out.token_ids for out in found] == [out.token_ids for out in plain]
    tokens = sum(out.stats.num_verify_tokens for out in found)
    steps = sum(out.stats.num_verify_steps for out in found)
    assert tokens / steps > least
