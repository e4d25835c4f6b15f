"""The app `experiments.train`: stages, presets, the run's folder, and mistakes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import experiments.train as app
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.train import STAGES, load_train, register_train
from experiments.training.data import DataConfig
from experiments.training.dataset import TokenDataset
from tests.models import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
# As many as a byte-level prompt with three short passages may need.
TINY = ["data.max_model_len=800", "data.prompts_per_shard=10", "train=dry_run"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 1024}
    tiny_model("llama", eos_token_id=TOKENIZER.eos_token_id, **sizes).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def run_app(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> int:
    given = [f"hydra.run.dir={folder}", f"dataset={folder}/data", *overrides]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    return app.main()


def test_presets_compose_into_typed_options() -> None:
    register_train()
    for preset in sorted(path.stem for path in (CONF_DIR / "train").glob("*.yaml")):
        with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
            loaded, configs = load_train(compose("train", overrides=[f"train={preset}"]))
        assert list(configs) == list(STAGES)
        assert loaded.name == preset
        assert all(isinstance(c, STAGES[name].config_cls) for name, c in configs.items())


def test_the_yaml_options_are_the_defaults_of_the_stage() -> None:
    register_train()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        _, configs = load_train(compose("train", overrides=["stage=data"]))
    assert configs["data"] == DataConfig()


def test_a_run_writes_a_dataset_and_its_figures_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chat_model: Path,
    tmp_path: Path,
) -> None:
    overrides = ["stage=data", *TINY, f"target.name={chat_model}", "target.dtype=float32"]
    assert run_app(monkeypatch, tmp_path, *overrides, "data.num_shards=1", "tracker=csv") == 0
    assert "data/shards: 1" in capsys.readouterr().out
    first = (tmp_path / "data" / "train-00000.safetensors").read_bytes()
    assert len(TokenDataset(tmp_path / "data")) > 5
    assert "data/tokens_per_s" in (tmp_path / "metrics.csv").read_text()
    assert run_app(monkeypatch, tmp_path, *overrides) == 0
    assert "data/shards: 2" in capsys.readouterr().out
    assert (tmp_path / "data" / "train-00000.safetensors").read_bytes() == first
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    assert str(chat_model.parent) not in json.dumps(meta)  # a record is published


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stage=dat"], "stage 'dat' is not known; did you mean 'data'?"),
        (["data.sed=1"], "key data.sed is not known; did you mean 'seed'?"),
        (["+data.sed=1"], "unknown data option 'sed'; did you mean 'seed'?"),
        (["data.num_shards=0"], "data.num_shards=0 is not allowed; give an integer >= 1"),
        (["data.seed=one"], "data option seed='one' is not allowed"),
        (["+data.shares.poems=1"], "data.shares names 'poems', which is no kind"),
        (["data.writing.max_answer_tokens=0"], "max_answer_tokens=0 is not allowed"),
        (["train=dry"], "option train=dry is not known; did you mean 'dry_run'?"),
        (["data.device=tpu"], "device='tpu' is not allowed"),
    ],
)
def test_mistakes_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    message: str,
) -> None:
    assert run_app(monkeypatch, tmp_path, "stage=data", *overrides) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "data").exists() or not any((tmp_path / "data").iterdir())


@pytest.mark.slow
def test_the_dry_run_writes_texts_of_the_embedded_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    assert run_app(monkeypatch, tmp_path, "stage=data", "train=dry_run") == 0
    dataset = TokenDataset(tmp_path / "data")
    assert len(dataset) > 15
    assert dataset.num_tokens > 1000
