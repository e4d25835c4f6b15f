"""Prompts made to a length: it is exact, frame and question stay, random tokens are flagged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.context import fit_context, ladder
from experiments.prompts import Question
from experiments.schemas import PromptsConfig, load_config, register_schemas
from specdec.errors import ConfigError
from tests.models import byte_tokenizer
from tests.run_cases import run_tiny, save_tiny_target

QUESTIONS = [
    Question(1, "a", ("first question", "a second turn")),
    Question("two", "b", ("the other one",)),
    Question(3, "a", ("and a third",)),
]
LENGTHS = (40, 64, 300)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def encode(tokenizer: Any) -> Callable[[str], list[int]]:
    def encode_message(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"])

    return encode_message


def fitted(random_tokens: bool, encode: Any, tokenizer: Any, **changes: Any) -> list[Question]:
    lengths = changes.pop("lengths", LENGTHS)
    questions = ladder(QUESTIONS, lengths, random_tokens)
    return fit_context(questions, encode, tokenizer, len(tokenizer))


@pytest.mark.parametrize("random_tokens", [False, True])
def test_every_question_is_asked_at_every_length(
    random_tokens: bool, encode: Any, tokenizer: Any
) -> None:
    found = fitted(random_tokens, encode, tokenizer)
    assert [len(question.token_ids or ()) for question in found] == [
        length for length in LENGTHS for _ in QUESTIONS
    ]
    assert [question.question_id for question in found[:3]] == ["1@40", "two@40", "3@40"]
    suffix = " random" if random_tokens else ""
    assert {question.category for question in found} == {f"context {n}{suffix}" for n in LENGTHS}
    assert all(question.random_tokens == random_tokens for question in found)
    assert all(len(question.turns) == 1 for question in found)
    assert len({question.token_ids for question in found}) == len(found)
    assert fitted(random_tokens, encode, tokenizer) == found


def test_text_keeps_the_frame_and_ends_with_the_question(encode: Any, tokenizer: Any) -> None:
    for question in fitted(False, encode, tokenizer):
        text = tokenizer.decode(question.token_ids)
        own = question.turns[0]
        assert text.startswith("<turn>user:")
        assert text.endswith(f"{own}<turn>")
    long = tokenizer.decode(fitted(False, encode, tokenizer)[-2].token_ids)  # "two" at 300
    assert "and a third" in long
    assert long.count("first question") > 1  # too little text: it repeats itself
    assert long.count("the other one") == 1


def test_a_length_below_the_question_cuts_its_beginning(encode: Any, tokenizer: Any) -> None:
    length = len(encode("question"))
    question = fitted(False, encode, tokenizer, lengths=(length,))[0]
    assert list(question.token_ids or ()) == encode("question")  # of "first question"


def test_random_prompts_hold_usual_tokens_alone(encode: Any, tokenizer: Any) -> None:
    special = set(tokenizer.all_special_ids)
    frame = encode("")
    for question in fitted(True, encode, tokenizer):
        ids = list(question.token_ids or ())
        assert ids[: len(frame) - 1] == frame[:-1]
        body = ids[len(frame) - 1 : -1]
        assert not special & set(body)
        assert len(set(body)) > len(body) / 4
    # A target that knows fewer tokens than the tokenizer is asked for none of the others.
    small = fit_context(ladder(QUESTIONS, (300,), True), encode, tokenizer, 90)
    body = list(small[0].token_ids or ())[len(frame) - 1 : -1]
    assert max(body) < 90


def test_questions_without_a_length_stay_as_they_are(encode: Any, tokenizer: Any) -> None:
    assert fit_context(QUESTIONS, encode, tokenizer, 300) == QUESTIONS
    mixed = [QUESTIONS[0], *ladder(QUESTIONS, (40,), False)]
    assert fit_context(mixed, encode, tokenizer, 300)[0] is QUESTIONS[0]


def test_wrong_lengths_are_refused(encode: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"context_lengths holds 3.*template alone takes"):
        fitted(False, encode, tokenizer, lengths=(3,))
    for lengths in ([0], [64, 64]):
        with pytest.raises(ConfigError, match=r"prompts\.context_lengths"):
            PromptsConfig(path=None, context_lengths=lengths)
    with pytest.raises(ConfigError, match=r"random_tokens=true needs prompts\.context_lengths"):
        PromptsConfig(path=None, random_tokens=True)
    register_schemas()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        cfg = compose("run", overrides=["prompts=ladder", "engine.max_model_len=1024"])
    with pytest.raises(ConfigError, match=r"holds 1024.*max_model_len=1024"):
        load_config(cfg)


def test_a_run_flags_random_prompts_everywhere(tmp_path: Path) -> None:
    tiny = save_tiny_target(tmp_path / "tiny")
    options = ["prompts.context_lengths=[48,80]", "prompts.random_tokens=true"]
    folder = run_tiny(tiny, tmp_path, *options, "equality.max_tokens=4").folder
    entries = json.loads((folder / "arms.json").read_text())
    assert all(entry["random_tokens"] for entry in entries)
    assert all(entry["context_lengths"] == [48, 80] for entry in entries)
    assert {entry["verdict"]["status"] for entry in entries} == {"reference", "equal"}
    latencies = pd.read_parquet(folder / "latencies.parquet")
    assert latencies["random_tokens"].all()
    assert set(latencies["num_prompt_tokens"]) == {48, 80}
    requests = pd.read_parquet(folder / "requests.parquet")
    assert set(requests["label"]) == {"context 48 random", "context 80 random"}
    first = requests[~requests["is_verify"]]
    assert set(first["context_len"]) == {48, 80}
    assert pd.read_csv(folder / "latencies.csv")["random_tokens"].all()
