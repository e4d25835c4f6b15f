"""What is dropped from training text, what two texts share, and the instructions."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.training.dataset import TokenSequence
from experiments.training.filters import (
    SeenTexts,
    loop_start,
    ngram_hashes,
    plain_words,
    prompt_key,
    repeated_share,
    share_of,
)
from experiments.training.overlap import overlap_report
from experiments.training.seeds import ALONE_KINDS, PASSAGE_KIND, TASK_KINDS, SeedPrompts
from specdec.errors import ConfigError
from tests.models import byte_tokenizer


def text(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


def noise(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, length)


def answer_to(prompt: np.ndarray, answer: np.ndarray) -> TokenSequence:
    return TokenSequence(text(prompt, answer), len(prompt))


@pytest.mark.parametrize("n", [1, 4, 13])
def test_hashes_are_equal_where_ngrams_are(n: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 400)
    hashes = ngram_hashes(tokens, n)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes.tolist(), strict=True))) == len(set(grams))
    assert len(set(hashes.tolist())) == len(set(grams))
    assert len(ngram_hashes(tokens[: n - 1], n)) == 0


def test_order_and_leading_zeros_change_a_hash() -> None:
    hashes = {int(ngram_hashes(np.array(gram), 3)[0]) for gram in ([0, 0, 1], [0, 1, 0], [1, 0, 0])}
    assert len(hashes) == 3
    assert prompt_key([0, 1]) != prompt_key([0, 0, 1])


def test_loops_repeat_themselves_and_other_texts_do_not() -> None:
    assert repeated_share(noise(200, 0)) == 0
    assert repeated_share(text(noise(40, 0), np.tile(noise(10, 1), 20))) > 0.5
    assert repeated_share(np.zeros(200, dtype=np.int32)) > 0.9
    assert repeated_share(np.zeros(5, dtype=np.int32)) == 0  # too short to tell


def test_a_loop_begins_behind_what_is_new() -> None:
    unlike, loop = noise(60, 0), noise(10, 1)
    looped = text(unlike, np.tile(loop, 9))
    # The first round of the loop, and the step back to its start, are new.
    assert loop_start(looped) == 60 + 10 + 3
    assert repeated_share(looped[: loop_start(looped)]) == 0
    assert loop_start(unlike) == 60
    assert loop_start(text(unlike, loop, loop)) == 80  # said twice, which is no loop
    # It goes on behind a repetition that is no longer than a sentence.
    assert loop_start(text(unlike, unlike[10:30], noise(40, 2))) == 120


def test_copies_are_found_and_others_are_not() -> None:
    seen, answer = SeenTexts(0.5), noise(120, 0)
    assert seen.add_new(answer_to(noise(10, 1), answer))
    changed = answer.copy()
    changed[40] = 7
    assert not seen.add_new(answer_to(noise(12, 2), answer))
    assert not seen.add_new(answer_to(noise(12, 2), changed))
    assert not seen.has_prompt(noise(12, 2))  # what is refused is not remembered
    assert seen.add_new(answer_to(noise(12, 3), text(answer[:20], noise(100, 3))))
    assert seen.add_new(answer_to(noise(12, 4), noise(120, 4)))


def test_what_an_earlier_run_kept_is_known() -> None:
    seen, kept = SeenTexts(0.5), [answer_to(noise(10, i), noise(120, 50 + i)) for i in range(3)]
    seen.add_all(kept)
    for i in range(3):
        assert not seen.add_new(answer_to(noise(12, 9), noise(120, 50 + i)))
        assert seen.has_prompt(noise(10, i))


def test_what_is_copied_from_the_own_prompt_makes_no_copy() -> None:
    seen, passage = SeenTexts(0.5), noise(120, 0)
    assert seen.add_new(answer_to(noise(10, 1), passage))
    assert seen.add_new(answer_to(text(noise(5, 2), passage), passage))


def test_prompts_are_known_whole() -> None:
    seen = SeenTexts(0.5)
    assert seen.add_new(answer_to(noise(10, 1), noise(30, 0)))
    assert seen.has_prompt(noise(10, 1))
    assert not seen.has_prompt(noise(10, 1)[:9])


def test_the_split_of_a_text_is_that_of_its_words() -> None:
    assert share_of("What is  rain?") == share_of("what is rain")
    assert plain_words("Don't stop!") == "don t stop"
    shares = [share_of(f"question {i}") for i in range(4000)]
    assert abs(np.mean(np.array(shares) < 0.1) - 0.1) < 0.02


# --- instructions ---------------------------------------------------------------------------------


def test_prompts_are_distinct_and_fixed_by_the_seed() -> None:
    for kind in (*ALONE_KINDS, PASSAGE_KIND):
        prompts = SeedPrompts(0).take(kind, 0, 1500)
        assert len(set(prompts)) == 1500
        assert not any("{" in prompt for prompt in prompts)
        assert SeedPrompts(0).take(kind, 700, 50) == prompts[700:750]
        assert SeedPrompts(1).take(kind, 0, 50) != prompts[:50]


def test_every_slot_is_known_and_every_task_takes_its_passage() -> None:
    seeds = SeedPrompts(0)
    assert seeds.unknown_slots == set()
    for kind in TASK_KINDS:
        for template in seeds.templates[kind]:
            assert template.count("{passage}") == 1


def test_a_slot_is_drawn_once_a_template() -> None:
    import random

    seeds = SeedPrompts(0)
    for i in range(50):
        draw = random.Random(i)
        first, again, other, number, same = seeds.fill(
            "{name}|{name}|{name:2}|{5-60}|{5-60}", draw
        ).split("|")
        assert first == again != other
        assert number == same
        assert 5 <= int(number) <= 60
    filled = seeds.fill("<{passage}>", random.Random(0), "a {name} and {5-60}")
    assert filled == "<a {name} and {5-60}>"


def test_used_up_templates_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = SeedPrompts(0)
    monkeypatch.setitem(seeds.templates, "maths", ["What is {1-9} plus one?"])
    assert len(seeds.take("maths", 0, 9)) == 9
    with pytest.raises(ConfigError, match="no more than about 9 prompts of the kind 'maths'"):
        seeds.take("maths", 9, 1)


# --- overlap --------------------------------------------------------------------------------------


def test_overlap_counts_ngrams_and_whole_prompts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    turns = ["abcdefghijklmnop", "0123456789"]
    rows = [{"question_id": i, "category": "x", "turns": [turn]} for i, turn in enumerate(turns)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt, answer = "Abcdefghijklmnop", "zz012345678zz"

    def encode(words: str) -> np.ndarray:
        return np.array(tokenizer(words)["input_ids"], dtype=np.int32)

    sequence = answer_to(encode(prompt), encode(answer))
    report = overlap_report([sequence], [prompt], [str(path)], tokenizer)["questions.jsonl"]
    assert report["num_turns"] == 2
    assert report["num_training_prompts"] == 1  # the same words, but for a capital
    eight, thirteen = report["ngrams"]["8"], report["ngrams"]["13"]
    assert eight["num_train"] == 16 + 13 - 7
    # b...p holds 8 of them, 0...8 two.
    assert eight["train_share"] == pytest.approx((8 + 2) / 22)
    assert eight["question_share"] == pytest.approx((8 + 2) / (9 + 3))
    assert thirteen["train_share"] == pytest.approx(3 / 17)
    assert thirteen["question_share"] == pytest.approx(3 / 4)
