"""The stages `fit` and `eval` through the app; all stages on the real target, as a dry run."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

import experiments.train as app
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.train import load_train, register_train
from experiments.training.config import EvalConfig, FitConfig
from tests.training_cases import curve_of, save_dataset, save_target


def run_app(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", f"hydra.run.dir={folder}", *overrides])
    return app.main()


def composed(*overrides: str) -> dict[str, Any]:
    register_train()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return load_train(compose("train", overrides=list(overrides)))[1]


def test_every_method_has_an_option() -> None:
    names = sorted(path.stem for path in (CONF_DIR / "fit").glob("*.yaml"))
    assert names == ["block_parallel", "draft_model", "eagle3", "medusa"]
    for name in names:
        config = composed("stage=fit", f"fit={name}")["fit"]
        assert isinstance(config, FitConfig)
        assert config.method == name


def test_options_are_the_defaults() -> None:
    configs = composed("stage=all", "dataset=d")
    assert {**asdict(configs["fit"]), "data": ""} == asdict(FitConfig())
    assert isinstance(configs["fit"].eval, EvalConfig)
    assert configs["eval"].num_speculative_tokens == list(range(1, 9))


def test_fit_and_eval_leave_a_drafter_and_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, target = save_dataset(tmp_path / "data"), save_target(tmp_path / "target")
    common = [f"dataset={data}", f"target.name={target}", "target.dtype=float32", "train=dry_run"]
    common += ["fit.draft_vocab_size=60", "tracker=csv"]
    folder = tmp_path / "run"
    assert run_app(monkeypatch, folder, "stage=fit", *common) == 0
    assert run_app(monkeypatch, folder, "stage=eval", *common) == 0
    printed = capsys.readouterr().out
    assert "fit/num_steps: 4" in printed
    assert "eval/accept/length_eagle3_k2_t0: " in printed
    assert len(curve_of(folder / "fit")) == 4
    assert "| eagle3 |" in (folder / "eval" / "eval.md").read_text()
    assert "fit/loss" in (folder / "metrics.csv").read_text() + printed
    for name in ("fit/fit.json", "eval/eval.json"):  # a record is published
        record = json.loads((folder / name).read_text())
        assert str(tmp_path.parent) not in json.dumps(record["config"])


def test_a_wrong_option_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_app(monkeypatch, tmp_path, "stage=fit", "fit.loss=mse", "fit.lr=-1") == 1
    assert "fit.lr=-1" in capsys.readouterr().err
    assert run_app(monkeypatch, tmp_path, "stage=fit", "+fit.rate=1") == 1
    assert "unknown fit option 'rate'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_dry_run_ends_within_two_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # threads that wait for one another on shared cores measure the others
    started = time.monotonic()
    overrides = ["stage=all", "train=dry_run", f"dataset={tmp_path}/data"]
    assert run_app(monkeypatch, tmp_path / "run", *overrides) == 0
    assert time.monotonic() - started < 120
    (line, *_) = json.loads((tmp_path / "run" / "eval" / "eval.json").read_text())["lines"]
    assert line["accepted_length"] >= 1.0
    assert (tmp_path / "run" / "fit" / "drafter" / "config.json").exists()
