"""The stage data with a tiny target: determinism, resuming, splits, what is dropped, mistakes."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import experiments.training.data as data_stage
from experiments.training.data import DataConfig, run_data
from experiments.training.dataset import (
    SPLITS,
    TokenDataset,
    TokenSequence,
    read_sequences,
    shard_paths,
)
from experiments.training.filters import prompt_key
from experiments.training.player import Player, Text
from experiments.training.seeds import ALONE_KINDS
from experiments.training.shard import (
    FAMILIES,
    SOURCES,
    ChatFormat,
    ShardWriter,
    WritingConfig,
    counts_of,
)
from experiments.training.stage import StageRun, read_config, stage_main
from runner.loader import LoadedTarget
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError
from tests.models import bigram_model, byte_tokenizer, tiny_target

TOKENIZER = byte_tokenizer()
V = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
LETTERS = range(ord("a"), ord("z") + 1)


@functools.cache
def target() -> LoadedTarget:
    """Return a target that writes letters, and ends a text after about 16 of them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((V, V), -30.0)
    letters = torch.tensor(LETTERS)
    logits[:, letters] = torch.randn(V, 26, generator=generator)
    logits[:, EOS] = 0.9
    logits[:, EOS] = logits[:, letters].logsumexp(1) - np.log(15)
    return tiny_target(bigram_model(logits), TOKENIZER)


def config(**changes: Any) -> DataConfig:
    writing = WritingConfig(
        temperature_shares=[0.25] * 4,
        question_temperature=1.0,
        max_question_tokens=40,
        max_passage_tokens=60,
        max_answer_tokens=20,
        max_repeated_share=0.9,  # few letters repeat themselves more than words
    )
    fixed: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "num_shards": 3,
        "prompts_per_shard": 40,
        "shares": {"passages": 0.5} | dict.fromkeys((*ALONE_KINDS, "free"), 0.08),
        "valid_share": 0.3,
        "max_num_reqs": 20,
        "max_model_len": 500,
        "writing": writing,
    }
    return DataConfig(**{**fixed, **changes})


def write(folder: Path, **changes: Any) -> Path:
    run_data(config(**changes), StageRun(folder, "test"), target())
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def sequences(folder: Path, split: str) -> list[TokenSequence]:
    return [s for path in shard_paths(folder, split) for s in read_sequences(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole"))


def test_the_same_seed_writes_the_same_files(whole: Path, tmp_path: Path) -> None:
    assert files(write(tmp_path / "again")) == files(whole)
    other = files(write(tmp_path / "other", seed=1, num_shards=1))
    assert other["train-00000.safetensors"] != files(whole)["train-00000.safetensors"]


@pytest.mark.parametrize("num_texts", [0, 30])
def test_a_run_killed_inside_a_shard_goes_on_with_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_texts: int
) -> None:
    left = [1, num_texts]  # whole shards, then texts
    play = Player.play

    def killed(self: Player, on_text: Callable[[], None] = lambda: None) -> None:
        def counted() -> None:
            on_text()
            left[1] -= 1
            if left[1] < 0:
                raise KeyboardInterrupt

        left[0] -= 1
        play(self, on_text if left[0] >= 0 else counted)

    with monkeypatch.context() as patch:
        patch.setattr(Player, "play", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    assert len(json.loads((tmp_path / "meta.json").read_text())["shards"]) == 1
    assert len(TokenDataset(tmp_path)) > 0  # what is there can be read
    write(tmp_path)
    assert files(tmp_path) == files(whole)


def test_a_run_killed_between_a_shards_files_writes_it_anew(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, meta: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_stage, "write_meta", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    assert len(files(tmp_path)) == 2
    write(tmp_path)
    assert files(tmp_path) == files(whole)


def test_complete_shards_are_not_written_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, num_shards=2)
    two = files(tmp_path)
    write(tmp_path, num_shards=3)
    assert files(tmp_path) == files(whole)
    assert two.items() <= files(whole).items()
    monkeypatch.setattr(data_stage, "load_target", lambda *_: pytest.fail("the target was loaded"))
    run_data(config(), StageRun(tmp_path, "test"))


def test_no_shard_begins_after_max_seconds(tmp_path: Path) -> None:
    write(tmp_path, max_seconds=1e-9)
    assert len(shard_paths(tmp_path, "train")) == 1  # there is always a first one


def test_splits_share_no_prompt_and_no_passage(whole: Path) -> None:
    train, valid = sequences(whole, "train"), sequences(whole, "valid")
    keys = [
        {prompt_key(s.token_ids[: s.num_prompt]) for s in part if s.num_prompt > len(opening())}
        for part in (train, valid)
    ]
    assert keys[0].isdisjoint(keys[1])
    assert sum(map(len, keys)) == sum(s.num_prompt > len(opening()) for s in train + valid)
    for own, others in ((train, valid), (valid, train)):
        passages = [text_of(s.answer) for s in own if SOURCES[s.source] == "passages"]
        assert passages
        prompts = [text_of(s.token_ids[: s.num_prompt]) for s in others]
        long = [passage for passage in passages if len(passage) > 12]
        assert not any(passage in prompt for passage in long for prompt in prompts)
    # About three tenths of the families.
    assert 0.15 < len(valid) / (len(train) + len(valid)) < 0.45


def opening() -> list[int]:
    return ChatFormat(TOKENIZER).opening


def text_of(token_ids: np.ndarray) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=True)


def test_prompts_and_answers_follow_the_chat_template(whole: Path) -> None:
    kinds = set()
    for sequence in sequences(whole, "train"):
        prompt = TOKENIZER.decode(sequence.token_ids[: sequence.num_prompt])
        kind, answer = SOURCES[sequence.source], sequence.answer.tolist()
        kinds.add(kind)
        assert prompt.startswith("<turn>user:")
        if prompt != "<turn>user:":
            assert prompt.endswith("<turn>")
        else:
            assert kind == "free"
            assert answer[-1] != EOS
        assert EOS not in answer[:-1]
        assert set(answer[:-1]) <= set(LETTERS)
        assert answer[-1] == EOS or len(answer) in (20, 40, 60)
    assert kinds == set(SOURCES)


def test_work_on_passages_has_them_in_its_prompt(whole: Path) -> None:
    everything = [s for split in SPLITS for s in sequences(whole, split)]
    passages = [text_of(s.answer) for s in everything if SOURCES[s.source] == "passages"]
    tasks = [s for s in everything if SOURCES[s.source] in ("summary", "answers", "rewrite")]
    assert len(tasks) > 10
    for task in tasks:
        prompt = text_of(task.token_ids[: task.num_prompt])
        assert any(passage in prompt for passage in passages)


def test_meta_counts_what_the_files_hold(whole: Path) -> None:
    meta = json.loads((whole / "meta.json").read_text())
    assert meta["sources"] == list(SOURCES)
    for split in SPLITS:
        counts, read = meta["counts"][split], sequences(whole, split)
        assert counts["sequences"] == len(read)
        assert counts["tokens"] == sum(map(len, read))
        assert counts["answer_tokens"] == sum(len(s.answer) for s in read)
        assert sum(counts["by_source"].values()) == len(read)
        temperatures = {f"{s.temperature:g}" for s in read}
        assert set(counts["by_temperature"]) == temperatures
    assert meta["provenance"]["seed"] == 0
    assert all(shard["tokens_per_s"] > 0 for shard in meta["shards"])


def test_greedy_answers_are_those_of_the_target(whole: Path) -> None:
    greedy = [s for s in sequences(whole, "train") if s.temperature == 0]
    assert len(greedy) > 5
    model = target().model.model
    successor = [int(i) for i in bigram_successors(model)]
    for sequence in greedy:
        tokens = sequence.token_ids.tolist()
        for i in range(sequence.num_prompt, len(tokens)):
            assert tokens[i] == successor[tokens[i - 1]]


@torch.inference_mode()
def bigram_successors(model: Any) -> torch.Tensor:
    """Return the likeliest token behind each one; layers of this target add nothing."""
    hidden = model.get_decoder().norm(model.get_input_embeddings().weight)
    return model.get_output_embeddings()(hidden).argmax(-1)


def test_loops_short_texts_and_copies_are_dropped() -> None:
    chat = ChatFormat(TOKENIZER)
    seen = data_stage.SeenTexts(0.5)
    writer = ShardWriter(WritingConfig(), chat, data_stage.SeedPrompts(0), seen, 500)
    rng = np.random.default_rng(0)
    answer = rng.integers(97, 123, 60).tolist()
    prompts = chat.prompts([f"question {i}" for i in range(5)])
    answers = [answer, [97] * 60, [97, 98], answer, rng.integers(97, 123, 60).tolist()]
    for i, (prompt, words) in enumerate(zip(prompts, answers, strict=True)):
        writer._keep((i, 0), prompt, words, 0.0, "maths", f"question {i}")
    writer._keep((5, 0), prompts[0], rng.integers(97, 123, 60).tolist(), 0.0, "maths", "again")
    kept = writer.finish()
    assert [written.place[0] for written in kept] == [0, 4]
    assert writer.dropped == {"loop": 1, "short": 1, "copy": 1, "same prompt": 1}


def test_a_player_keeps_its_rows_busy_and_starts_texts_together() -> None:
    engine = Engine(
        target(), "none", num_speculative_tokens=0, device="cpu", max_num_reqs=8, max_model_len=64
    )
    player, running, written = Player(engine, 8, [EOS]), [], []
    for i in range(40):
        player.add(Text([97, 98], 1.0, 20, i, lambda ids, ended: written.append((ids, ended))))
    step = engine.step

    def watched() -> Any:
        running.append(len(engine.unfinished_ids))
        return step()

    engine.step = watched  # type: ignore[method-assign]
    player.play()
    assert len(written) == 40
    assert max(running) == 8
    assert np.mean(running) > 6
    for ids, ended in written:
        assert ended == (ids[-1] == EOS)
        assert ended or len(ids) == 20
    assert player.num_tokens == sum(len(ids) for ids, _ in written)


def test_shares_give_about_as_many_texts_as_asked_for() -> None:
    shares = {"free": 0.5, "maths": 0.25, "passages": 0.25}
    counts = counts_of(shares, 1000)
    assert counts["free"] == 500
    assert counts["maths"] == 250
    assert counts["passages"] == round(250 / 4.8)
    assert counts["code"] == 0
    assert set(counts) == set(FAMILIES)


# --- mistakes -------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: config(num_shards=0), r"data\.num_shards=0 is not allowed; give an integer >= 1"),
    (lambda: config(valid_share=1.0), r"data\.valid_share=1\.0 is not allowed"),
    (lambda: config(max_seconds=0.0), r"data\.max_seconds=0\.0 is not allowed"),
    (lambda: config(shares={"poems": 1.0}), "'poems', which is no kind; known: free, writing"),
    (lambda: config(shares={"free": -1.0}), r"data\.shares\.free=-1\.0 is not allowed"),
    (lambda: config(shares={}), "leave no prompt"),
    (lambda: config(max_model_len=100), r"data\.max_model_len=100 is too little"),
    (lambda: WritingConfig(temperatures=[0.0]), "do not belong together"),
    (lambda: WritingConfig(passage_temperature=-1.0), "temperature -1.0 is not allowed"),
    (lambda: WritingConfig(temperature_shares=[0.0] * 4), "temperature_shares"),
    (lambda: WritingConfig(max_shared=2.0), r"writing\.max_shared=2\.0 is not allowed"),
    (lambda: WritingConfig(min_answer_tokens=999), r"min_answer_tokens=999 is not allowed"),
]


@pytest.mark.parametrize(("build", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_folder_of_other_options_is_left_alone(whole: Path) -> None:
    before = files(whole)
    with pytest.raises(ConfigError, match="holds a dataset of other options"):
        write(whole, seed=5)
    assert files(whole) == before


def test_a_target_that_does_not_chat_is_refused(tmp_path: Path) -> None:
    mute = LoadedTarget("mute", target().model, None)
    with pytest.raises(ConfigError, match="has no chat template; the stage data needs a chat"):
        run_data(config(), StageRun(tmp_path, "test"), mute)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="cannot be written"):
        write(tmp_path / "file")


def test_options_come_from_json_without_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"max_seconds": 3, "writing": {"max_answer_tokens": 9}}))
    read = read_config(DataConfig, path, "data")
    assert read.max_seconds == 3.0
    assert read.writing.max_answer_tokens == 9
    assert read.writing.max_passage_tokens == WritingConfig().max_passage_tokens
    for content, message in (
        ({"writing": {"max_answer": 9}}, "unknown data.writing option 'max_answer'"),
        ({"seed": "one"}, "data option seed='one' is not allowed"),
        ([1], "holds no JSON object"),
    ):
        path.write_text(json.dumps(content))
        arguments = ["data.py", "--config", str(path), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        assert stage_main("data", DataConfig, run_data) == 1
        assert message in capsys.readouterr().err
