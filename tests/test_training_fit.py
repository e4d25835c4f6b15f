"""The stage `fit`: what is learned, what is left in the folder, and going on after a kill."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments.training import fit as fit_module
from experiments.training.checkpoints import newest_checkpoint
from experiments.training.config import EvalConfig, FitConfig
from experiments.training.curve import rate_at
from experiments.training.dataset import (
    TokenDataset,
    TokenSequence,
    shard_name,
    write_meta,
    write_shard,
)
from experiments.training.fit import run_fit
from experiments.training.frozen_target import (
    PaddedBatch,
    TargetStates,
    load_frozen,
    pad_batch,
)
from experiments.training.stage import StageRun
from experiments.training.states_cache import StatesCache
from experiments.training.trainee import method_class
from experiments.training.vocabulary import choose_vocabulary
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, WeightsError
from tests.models import random_prompts
from tests.training_cases import VOCAB_SIZE, curve_of, save_dataset, save_target

METHODS = ("eagle3", "draft_model", "medusa", "block_parallel")
K = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save a target and a dataset."""
    folder = tmp_path_factory.mktemp("training")
    return {"target": save_target(folder / "target"), "data": save_dataset(folder / "data")}


def config(folders: dict[str, str], **changes: Any) -> FitConfig:
    values: dict[str, Any] = {
        "device": "cpu", "batch_tokens": 256, "unroll": K, "draft_vocab_size": 60, "lr": 3e-3,
        "log_every": 5, "save_every": 0, "max_steps": 20, "max_epochs": 0,
    }  # fmt: skip
    return FitConfig(**{**folders, **values, **changes})


def fit(values: FitConfig, folder: Path) -> dict[str, Any]:
    return run_fit(values, StageRun(folder, "test"))


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_the_folder_loads_by_name(
    folders: dict[str, str], method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        figures = fit(config(folders, method=method, warm_start=False), tmp_path)
    option = "model" if method == "draft_model" else "path"
    used = f"experiments.run drafter={method} drafter.{option}={tmp_path}/drafter"
    assert used in caplog.messages[-1]
    curve = curve_of(tmp_path)
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert figures["loss"] == curve[-1]["loss"]
    spec = {"name": method, option: f"{tmp_path}/drafter"}
    plain = LLM(folders["target"], "none", "greedy", dtype="float32", device="cpu", **SMALL)
    llm = LLM(folders["target"], spec, "greedy", K, dtype="float32", device="cpu", **SMALL)
    prompts = random_prompts([5, 9])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [[out.token_ids for out in own.generate(prompts, params)] for own in (plain, llm)]
    assert texts[0] == texts[1]
    # What is shipped does not tell where the target lay.
    assert "_name_or_path" not in (tmp_path / "drafter" / "config.json").read_text()
    # No embedding and no output head of the target's: what is shipped is small.
    names = [name for path in (tmp_path / "drafter").glob("*.safetensors") for name in shapes(path)]
    assert not [name for name in names if "lm_head" in name or "embed_tokens" in name]


SMALL: dict[str, Any] = {"max_num_reqs": 2, "max_model_len": 64}


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


def test_a_model_of_all_layers_starts_as_the_target(
    folders: dict[str, str], tmp_path: Path
) -> None:
    own = config(folders, method="draft_model", copied_layers=[0, 1, 2, 3, 4, -1], max_steps=1)
    figures = fit(dataclasses.replace(own, draft_vocab_size=0, lr=1e-9), tmp_path)
    assert figures["agreed"] == [1.0]
    assert figures["accepted"][0] > 0.999


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "block_parallel"])
def test_a_head_starts_as_the_targets_last_layer(folders: dict[str, str], method: str) -> None:
    # Its deepest feature is what the last layer reads, and the token is not looked at yet.
    target = load_frozen(folders["target"], "float32", "cpu")
    own = config(folders, method=method, aux_layers=[0, 2, 4], num_layers=1)
    trainee = method_class(method)(own, target, None)
    batch = pad_batch(TokenDataset(folders["data"]).batch([0, 1, 2]))
    states = target.states(batch, trainee.aux_layers)
    if method == "block_parallel":  # it does look at the token, a little, and norms its features
        trainee.head.merge.weight[:, : target.model.hidden_size].zero_()  # pyright: ignore
        trainee.head.feature_norm = torch.nn.Identity()
    torch.testing.assert_close(trainee(batch, states)[0], states.last, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_states_that_are_kept_are_those_that_are_computed(
    folders: dict[str, str], method: str, tmp_path: Path
) -> None:
    own = config(folders, method=method, max_steps=0, max_epochs=3, log_every=1)
    fit(own, tmp_path / "computed")
    fit(dataclasses.replace(own, cache_gb=0.1), tmp_path / "kept")
    curves = [curve_of(tmp_path / name) for name in ("computed", "kept")]
    assert len(curves[0]) == len(curves[1]) > 15
    for computed, kept in zip(*curves, strict=True):
        assert kept["loss"] == pytest.approx(computed["loss"], rel=1e-4)


def test_the_target_is_asked_about_a_sequence_once(folders: dict[str, str]) -> None:
    target, dataset = (
        load_frozen(folders["target"], "float32", "cpu"),
        TokenDataset(folders["data"]),
    )
    cache = StatesCache(target, dataset, (0, 2), 0.1)
    asked: list[int] = []
    plain = target.states

    def counted(batch: PaddedBatch, layers: Any) -> TargetStates:
        asked.append(len(batch.token_ids))
        return plain(batch, layers)

    target.states = counted
    # The last sequence with a shorter one: what stands behind its end is past the cache's, too.
    last = len(dataset) - 1
    shorter = int(np.argmin(dataset.lengths))
    longest = int(np.argmax(dataset.lengths))
    for members in ([3, last], [longest, last, shorter], [3, shorter], [longest]):
        batch = pad_batch(dataset.batch(members))
        found, computed = cache.states(members, batch), plain(batch, (0, 2))
        own = batch.is_token.flatten()
        torch.testing.assert_close(found.last[own], computed.last[own], rtol=1e-4, atol=1e-5)
        assert found.aux is not None
        assert computed.aux is not None
        torch.testing.assert_close(found.aux[own], computed.aux[own], rtol=1e-4, atol=1e-5)
    assert asked == [2, 3]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_goes_on_to_the_same_end(
    folders: dict[str, str], tmp_path: Path, optimizer: str
) -> None:
    own = config(folders, max_steps=30, save_every=4, accumulate=2, loss="kl", optimizer=optimizer)
    whole = fit(own, tmp_path / "whole")
    (tmp_path / "fit.json").write_text(json.dumps(dataclasses.asdict(own)))
    command = [sys.executable, "-m", "experiments.training.fit"]
    command += ["--config", str(tmp_path / "fit.json"), "--out", str(tmp_path / "killed")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        started = time.monotonic()
        while child.poll() is None and time.monotonic() - started < 120:
            found = newest_checkpoint(tmp_path / "killed" / "checkpoints")
            if found is not None and found.name >= "step-00000008":
                child.send_signal(signal.SIGKILL)
            time.sleep(0.002)
        child.wait()
    assert child.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-2000:]
    before = newest_checkpoint(tmp_path / "killed" / "checkpoints")
    assert before is not None
    assert before.name < "step-00000030"
    again = fit(own, tmp_path / "killed")
    assert again["num_tokens"] == whole["num_tokens"]
    assert again["loss"] == pytest.approx(whole["loss"], abs=1e-3)
    weights = [
        load_file(tmp_path / name / "checkpoints/step-00000030/weights.safetensors")
        for name in ("whole", "killed")
    ]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4)
    steps = [line["step"] for line in curve_of(tmp_path / "killed")]
    assert steps == sorted(set(steps))


def test_moments_that_are_lost_are_noticed(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Power of the test above: going on with weights alone ends elsewhere.
    own = config(folders, max_steps=16, max_epochs=0)
    whole = fit(own, tmp_path / "whole")
    fit(config(folders, max_steps=16, save_every=8), tmp_path / "part")
    later = tmp_path / "part" / "checkpoints" / "step-00000016"
    for path in later.iterdir():
        path.unlink()
    later.rmdir()

    def weights_alone(path: Path, model: Any, optimizer: Any) -> None:
        model.load_state_dict(fit_module.read_weights(path)[0])

    monkeypatch.setattr(fit_module, "restore", weights_alone)
    again = fit(own, tmp_path / "part")
    assert abs(again["loss"] - whole["loss"]) > 1e-3


def test_another_run_starts_from_a_checkpoint(folders: dict[str, str], tmp_path: Path) -> None:
    fit(config(folders, max_steps=8), tmp_path / "first")
    source = newest_checkpoint(tmp_path / "first" / "checkpoints")
    own = config(folders, max_steps=1, log_every=1, lr=0.0, init_from=str(source))
    fit(dataclasses.replace(own, draft_vocab_size=40), tmp_path / "second")
    parts = [
        load_file(tmp_path / name / "drafter/model.safetensors") for name in ("first", "second")
    ]
    assert len(parts[1]["d2t"]) == 60  # the vocabulary that the weights belong to
    for name, tensor in parts[0].items():
        torch.testing.assert_close(parts[1][name], tensor, rtol=0, atol=0)
    with pytest.raises(WeightsError, match="another drafter"):
        fit(dataclasses.replace(own, method="medusa"), tmp_path / "third")


def test_a_budget_of_seconds_ends_the_run_and_saves(
    folders: dict[str, str], tmp_path: Path
) -> None:
    figures = fit(config(folders, max_steps=0, max_seconds=0.5), tmp_path)
    assert 0.5 <= figures["seconds"] < 10
    assert figures["num_steps"] >= 1
    assert (tmp_path / "drafter" / "config.json").exists()
    assert curve_of(tmp_path)[-1]["lr"] < 3e-3 * 0.2  # the rate fell along with the time


def test_acceptance_is_measured_in_the_loop(folders: dict[str, str], tmp_path: Path) -> None:
    measure = EvalConfig(
        num_speculative_tokens=[1, K], temperatures=[0.0, 1.0], max_prompts=3, max_tokens=8
    )
    fit(config(folders, max_steps=6, eval_every=3, eval=measure), tmp_path)
    lines = [line for line in curve_of(tmp_path) if "length_k1_t0" in line]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        for name, value in line.items():
            assert name == "step" or 1.0 <= value <= K + 1
    assert {"length_k1_t1", "length_k3_t0", "length_k3_t1"} <= lines[0].keys()


def test_old_checkpoints_go_and_torn_ones_are_not_seen(
    folders: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / ".part").mkdir(parents=True)
    fit(config(folders, max_steps=7, save_every=2), tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000007"]


def test_vocabulary_is_that_of_the_answers(folders: dict[str, str]) -> None:
    dataset = TokenDataset(folders["data"])
    ids, covered = choose_vocabulary(dataset, 20, VOCAB_SIZE, frozenset([96]))
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for index in range(len(dataset)):
        for token in dataset.sequence(index).answer.tolist():
            counts[token] += 1
    left = [token for token in range(VOCAB_SIZE) if token not in ids.tolist()]
    assert 96 in ids
    assert len(ids) == 20
    assert ids.tolist() == sorted(ids.tolist())
    assert counts[left].max() <= counts[[i for i in ids.tolist() if i != 96]].min()
    assert covered == pytest.approx(float(counts[ids].sum() / counts.sum()))
    with pytest.raises(ConfigError, match="258 tokens"):
        choose_vocabulary(dataset, 259, VOCAB_SIZE)


def test_rate_rises_and_falls() -> None:
    rates = [rate_at(i / 100, 0.1, 0.05) for i in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "magic"}, "eagle3, draft_model"),
        ({"loss": "mse"}, "ce, kl, tv"),
        ({"aux_layers": [0, 9]}, "from 0 to 5"),
        ({"copied_layers": [6], "method": "draft_model"}, "target's 6"),
        ({"draft_vocab_size": 259}, "258 tokens"),
        ({"data": ""}, "needs data="),
        ({"optimizer": "sgd"}, "adamw, muon"),
        ({"cache_gb": 1e-6}, "give that, less data, or 0"),
        ({"data": "no/such-*"}, "no folder is named like"),
    ],
)
def test_wrong_options_are_told(
    folders: dict[str, str], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(config(folders, **changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 0}, "no end"),
        ({"step_decay": 1.5}, "from 0.0 to 1.0"),
        ({"accumulate": 0}, "give 1 or more"),
    ],
)
def test_values_out_of_range_are_told(
    folders: dict[str, str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config(folders, **changes)


def test_recorded_states_teach_as_those_that_are_computed(
    folders: dict[str, str], tmp_path: Path
) -> None:
    states = tmp_path / "states"
    record = {"name": "record", "folder": str(states), "aux_layers": [1, 2, 3]}
    llm = LLM(folders["target"], record, "greedy", dtype="float32", device="cpu", **SMALL)
    texts = [out.prompt_token_ids + out.token_ids for out in llm.generate(
        random_prompts([5, 9, 12, 7]), SamplingParams(temperature=0, max_tokens=20)
    )]  # fmt: skip
    llm.engine.drafter.flush()  # pyright: ignore
    known = [load_file(path)["token_ids"].tolist() for path in sorted(states.glob("*.safetensors"))]
    assert sorted(known) == sorted(text[: len(text) - 1] for text in texts)
    data = tmp_path / "data"
    data.mkdir()
    write_shard(data / shard_name("train", 0), [TokenSequence(np.array(t), 0) for t in known])
    write_meta(data, {})
    own = config(folders, aux_layers=[1, 2, 3], max_steps=6, log_every=1)
    online = fit(dataclasses.replace(own, data=str(data)), tmp_path / "online")
    dumped = fit(dataclasses.replace(own, data="", states=str(states)), tmp_path / "dumped")
    assert dumped["loss"] == pytest.approx(online["loss"], rel=1e-3)
    curves = [curve_of(tmp_path / name) for name in ("online", "dumped")]
    assert [line["num_tokens"] for line in curves[0]] == [line["num_tokens"] for line in curves[1]]
    other = dataclasses.replace(own, states=str(states), aux_layers=[0, 2, 3])
    with pytest.raises(ConfigError, match=r"layers \[1 2 3\], the head reads \[0 2 3\]"):
        fit(other, tmp_path / "other")
    with pytest.raises(ConfigError, match="holds no text"):
        fit(dataclasses.replace(own, states=str(tmp_path)), tmp_path / "none")
