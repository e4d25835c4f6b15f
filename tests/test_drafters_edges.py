"""Corners of the drafters: prompts in chunks, rows that change hands, and inputs that are wrong."""

import gc
import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.base import DrafterBase, DrafterConfig
from drafters.block_parallel import load_block_parallel
from drafters.heads.checkpoint import load_head
from drafters.medusa import load_medusa, save_medusa
from drafters.mixed import MixedConfig, MixedDrafter
from drafters.record import RecordConfig
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, WeightsError
from specdec.protocols import DraftContext, DrafterCapabilities
from specdec.registry import register_drafter
from tests.block_parallel_reference import save_random
from tests.drafter_folders import HIDDEN, VOCAB_SIZE, random_medusa
from tests.head_cases import CASES, HeadFiles
from tests.models import random_prompts, tiny_model, tiny_target
from tests.test_drafters_mixed import Bound, mixed, toy


@dataclass
class QuietConfig(DrafterConfig):
    """Never proposes; says that it runs on the host, where so asked."""

    name: str = "test_quiet"
    on_cpu: bool = False


@register_drafter("test_quiet", QuietConfig)
class Quiet(DrafterBase):
    """Does not split off a first pass; its capabilities are known once it is built."""

    config: QuietConfig

    def __init__(self, config: QuietConfig) -> None:
        super().__init__(config)
        self.capabilities = DrafterCapabilities(on_cpu=config.on_cpu)

    def propose(self, ctx: DraftContext) -> None:
        """Propose nothing."""


@pytest.mark.parametrize("scope", ["none", "step"])
def test_chunks_of_a_prompt_reach_the_kv_of_a_drafter_that_splits_nothing_off(scope: str) -> None:
    # No place of a step that runs a chunk alone can use a draft, but its tokens are needed later.
    itself = {"name": "draft_model", "model": "target"}
    drafter = mixed({"name": "test_quiet"}, itself)
    sizes = {"max_model_len": 96, "max_num_batched_tokens": 8, "graph_scope": scope}
    llm = LLM(tiny_target(tiny_model("llama")), drafter, "greedy", 3, **sizes)
    assert not llm.engine.drafter.capabilities.splits_first_pass
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for output in llm.generate(random_prompts((40, 33)), params):
        assert output.stats.num_accepted == output.stats.num_drafted > 10


class _Watch(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_row_changes_hands_in_a_mixture_without_a_copy_from_the_host() -> None:
    bound = Bound(mixed(toy(), toy(step=2), policy="best"))
    bound.propose()
    bound.observe([2] * len(bound.rows))
    row = bound.rows[2]
    with _Watch() as watch:
        bound.drafter.add_request(row)
    assert watch.names
    # A copy from the host into a cell of a GPU's tensor waits for all that was enqueued.
    assert not [name for name in watch.names if "copy" in name or "lift" in name]
    kept = bound.drafter.num_chosen.sum(1).tolist()
    assert bound.drafter.chosen[row] == -1
    assert kept[row] == 0
    assert kept[bound.rows[1]] == 1


def test_a_child_that_turns_out_to_run_on_the_host_is_refused() -> None:
    quiet = {"name": "test_quiet", "on_cpu": True}
    with pytest.raises(ConfigError, match=r"drafters\[1\]='test_quiet' runs on the host"):
        MixedDrafter(MixedConfig(drafters=["ngram", quiet]))
    with pytest.raises(ConfigError, match=r"drafters\[0\]='test_quiet' runs on the host"):
        MixedDrafter(MixedConfig(drafters=[quiet, "ngram"], policy="best"))


def test_recording_without_steps_of_a_drafter_is_refused(tmp_path: Path) -> None:
    drafter = {"name": "record", "folder": str(tmp_path / "texts")}
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(ConfigError, match="record sees no step with num_speculative_tokens=0"):
        LLM(target, drafter, "greedy", 0, max_model_len=64)


def test_medusa_heads_share_the_memory_of_a_shared_projection(tmp_path: Path) -> None:
    heads = random_medusa(3)
    for head in heads:
        head.projection = None
    projection = torch.randn(VOCAB_SIZE, HIDDEN)
    save_medusa(tmp_path, heads, projection)
    loaded: Any = load_medusa(str(tmp_path), HIDDEN, VOCAB_SIZE).to(dtype=torch.bfloat16)
    assert len({head.projection.weight.data_ptr() for head in loaded}) == 1
    assert torch.equal(loaded[2].projection.weight, projection.bfloat16())
    hidden = torch.randn(2, HIDDEN).bfloat16()
    assert loaded[0](hidden).shape == (2, VOCAB_SIZE)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": []},
        {"hidden_act": "none such"},
        {"rope_theta": "far"},
        {"draft_vocab_size": "some"},
        {"max_position_embeddings": None},
    ],
    ids=str,
)
def test_a_head_whose_config_is_nonsense_is_refused_in_one_sentence(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model("llama", vocab_size=20, num_hidden_layers=6)
    path = HeadFiles(CASES["EAGLE-3"], model, tmp_path).path
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(WeightsError, match="does not describe a head") as caught:
        load_head(path, "eagle3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"num_layers": "two"}, {"num_layers": 2.5}], ids=str)
def test_sizes_of_a_wrong_type_are_refused_in_one_sentence(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(WeightsError, match="does not describe a head") as caught:
        load_block_parallel(path, HIDDEN)
    assert "\n" not in str(caught.value)


def test_recorded_texts_are_written_with_the_end_of_an_engine_whose_memory_is_free(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "texts"
    target = tiny_target(tiny_model("llama"))
    drafter = {"name": "record", "folder": str(folder)}
    llm = LLM(target, drafter, "greedy", 1, max_model_len=64)
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=5))
    drafts = weakref.ref(llm.engine.runner.state.draft_tokens)
    assert not list(folder.glob("*"))
    del llm
    gc.collect()
    assert drafts() is None
    assert len(list(folder.glob("*.safetensors"))) == 2
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        RecordConfig(folder=str(folder / "000000.safetensors"))


def test_drafts_that_a_drafter_cannot_give_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.log._warned", set())  # a message is given once a process
    model = tiny_model("llama", max_position_embeddings=32)
    model.save_pretrained(tmp_path / "short")
    save_medusa(tmp_path / "heads", random_medusa(2))
    target = tiny_target(tiny_model("llama"))
    said = {}
    for drafter in (
        {"name": "draft_model", "model": str(tmp_path / "short")},
        {"name": "medusa", "path": str(tmp_path / "heads")},
    ):
        for k, length in ((2, 32), (3, 64)):
            caplog.clear()
            LLM(target, drafter, "greedy", k, max_model_len=length)
            said[drafter["name"], k] = [
                r.getMessage() for r in caplog.records if r.levelname == "WARNING"
            ]
    assert not said["draft_model", 2]
    assert not said["medusa", 2]
    assert "texts up to 32 tokens" in said["draft_model", 3][0]
    assert "2 heads" in said["medusa", 3][0]
