"""Question files: what the loader accepts, how it refuses, and the project's own prompts."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from experiments.prompts import (
    BUILTIN_PATH,
    Question,
    builtin_questions,
    load_questions,
    select_questions,
)
from specdec.errors import ConfigError

CATEGORIES = ["writing", "code", "maths", "question_answering", "summarising", "rewriting"]
BENCHMARKS = Path(__file__).parents[2] / "shared" / "data" / "prompts"
GOOD = {"question_id": 1, "category": "code", "turns": ["Print the date."]}


def _write(folder: Path, *lines: object) -> Path:
    """Write a question file; a text is written as it is, anything else as JSON."""
    path = folder / "little.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_builtin_file_has_six_categories_of_twelve_or_more_in_one_block_each():
    questions = builtin_questions()
    counts = Counter(question.category for question in questions)
    assert list(counts) == CATEGORIES
    assert min(counts.values()) >= 12
    assert len(questions) >= 72
    order = [CATEGORIES.index(question.category) for question in questions]
    assert order == sorted(order)


def test_first_four_builtin_questions_of_each_category_are_short_and_have_one_turn():
    for question in select_questions(builtin_questions(), per_category=4, limit=None):
        assert len(question.turns) == 1, question.question_id
        # About four characters make a token of English, so this is about 250 tokens.
        assert len(question.turns[0]) <= 1000, question.question_id


def test_some_builtin_questions_of_each_category_have_two_turns():
    lengths = defaultdict(set)
    for question in builtin_questions():
        lengths[question.category].add(len(question.turns))
    assert dict(lengths) == {category: {1, 2} for category in CATEGORIES}


def test_builtin_prompts_are_ascii_and_none_is_repeated():
    turns = [turn for question in builtin_questions() for turn in question.turns]
    assert BUILTIN_PATH.read_bytes().isascii()
    assert all(turn.isascii() for turn in turns)
    assert len({turn.casefold() for turn in turns}) == len(turns)


@pytest.mark.parametrize(
    ("category", "fewest", "most"), [("summarising", 80, 180), ("rewriting", 40, 150)]
)
def test_builtin_copy_heavy_prompts_carry_their_text(category: str, fewest: int, most: int):
    for question in select_questions(builtin_questions(), None, None, [category]):
        _, text = question.turns[0].split("\n\n", 1)
        # A table in CSV has few spaces, so the lower bound of rewriting is below that of prose.
        assert fewest <= len(text.split()) <= most, question.question_id


def test_loader_keeps_order_ids_and_turns(tmp_path: Path):
    rows = [
        {"question_id": 7, "category": "maths", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
        {"question_id": "b-2", "category": "code", "turns": ["Print the date."]},
    ]
    assert load_questions(_write(tmp_path, *rows)) == [
        Question(7, "maths", ("What is 2 + 2?", "And 3 + 3?")),
        Question("b-2", "code", ("Print the date.",)),
    ]


def test_loader_takes_a_path_as_text(tmp_path: Path):
    assert len(load_questions(str(_write(tmp_path, GOOD)))) == 1


def test_loader_ignores_further_keys_and_blank_lines(tmp_path: Path):
    path = _write(tmp_path, "", GOOD | {"reference": ["date"], "source": None}, "   ", "")
    assert load_questions(path) == [Question(1, "code", ("Print the date.",))]


def test_empty_category_becomes_the_file_stem(tmp_path: Path):
    assert load_questions(_write(tmp_path, GOOD | {"category": ""}))[0].category == "little"


def test_loader_keeps_unicode_line_separators_inside_a_turn(tmp_path: Path):
    turn = "first\u2028second\u0085third"
    line = json.dumps(GOOD | {"turns": [turn]}, ensure_ascii=False)
    assert load_questions(_write(tmp_path, line))[0].turns == (turn,)


def test_loader_accepts_a_byte_order_mark_and_carriage_returns(tmp_path: Path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert load_questions(path) == [Question(1, "code", ("Print the date.",))]


def test_loader_names_line_of_bad_json(tmp_path: Path):
    path = _write(tmp_path, GOOD, "", '{"question_id": 2,')
    with pytest.raises(ConfigError, match=r"little\.jsonl line 3: not valid JSON"):
        load_questions(path)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["a", "list"], r'found \["a", "list"\]'),
        ({"question_id": 2, "category": "code"}, "the key turns is missing"),
        ({"question_id": 2, "turns": ["Hi"]}, "the key category is missing"),
        ({"category": "code", "turns": ["Hi"]}, "the key question_id is missing"),
        ({}, "found no key"),
        ({"question_id": 2, "category": "code", "turns": []}, r"turns is \[\]"),
        ({"question_id": 2, "category": "code", "turns": "Hi"}, 'turns is "Hi"'),
        ({"question_id": 2, "category": "code", "turns": ["Hi", 5]}, "turn 2 is 5"),
        ({"question_id": 2, "category": "code", "turns": ["  "]}, 'turn 1 is "  "'),
        ({"question_id": 2, "category": None, "turns": ["Hi"]}, "category is null"),
        ({"question_id": 2.5, "category": "code", "turns": ["Hi"]}, r"question_id is 2\.5"),
        ({"question_id": True, "category": "code", "turns": ["Hi"]}, "question_id is true"),
        ({"question_id": "", "category": "code", "turns": ["Hi"]}, 'question_id is ""'),
        ({"question_id": 2, "category": "code", "turns": ["Hi \ud83d"]}, r'"\\ud83d" is half a'),
        ({"question_id": 2, "category": "\ud83d", "turns": ["Hi"]}, r'"\\ud83d" is half a'),
        ({"question_id": "\ud83d", "category": "code", "turns": ["Hi"]}, r'"\\ud83d" is half a'),
    ],
)
def test_loader_names_line_and_value_of_a_malformed_question(
    tmp_path: Path, line: object, found: str
):
    with pytest.raises(ConfigError, match=rf"little\.jsonl line 2: .*{found}"):
        load_questions(_write(tmp_path, GOOD, line))


def test_loader_names_both_lines_of_a_repeated_id(tmp_path: Path):
    path = _write(tmp_path, GOOD, GOOD | {"question_id": 2}, GOOD)
    with pytest.raises(ConfigError, match=r"line 3: question_id 1 was already used on line 1"):
        load_questions(path)


def test_loader_cuts_a_long_value_in_its_error(tmp_path: Path):
    path = _write(tmp_path, GOOD | {"turns": "word " * 500})
    with pytest.raises(ConfigError, match="must be a list") as caught:
        load_questions(path)
    assert len(str(caught.value)) < 200 + len(str(path))


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_loader_refuses_a_file_without_questions(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match=r"little\.jsonl line 1: no question found"):
        load_questions(_write(tmp_path, text))


def test_loader_refuses_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl: no such file"):
        load_questions(tmp_path / "absent.jsonl")


def test_loader_refuses_a_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder"):
        load_questions(tmp_path)


def test_loader_refuses_bytes_that_are_not_utf8(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question_id": "\xe9"}')
    with pytest.raises(ConfigError, match=r"latin\.jsonl: byte 17 is not UTF-8"):
        load_questions(path)


# Interleaved on purpose: the order of the file must survive the choice.
MIXED = [Question(n, "abc"[n % 3], (f"Question {n}",)) for n in range(9)]


def _ids(questions: list[Question]) -> list[int | str]:
    return [question.question_id for question in questions]


def test_selection_without_bounds_keeps_everything():
    assert select_questions(MIXED, None, None) == MIXED


def test_selection_takes_the_first_of_each_category_then_the_limit():
    assert _ids(select_questions(MIXED, 2, None)) == [0, 1, 2, 3, 4, 5]
    assert _ids(select_questions(MIXED, 2, 4)) == [0, 1, 2, 3]


def test_limit_counts_only_the_kept_categories():
    assert _ids(select_questions(MIXED, 2, 3, ["c", "a"])) == [0, 2, 3]


def test_selection_larger_than_the_file_keeps_everything():
    assert select_questions(MIXED, 100, 100) == MIXED


def test_selection_names_unknown_and_known_categories():
    with pytest.raises(ConfigError, match="'z' given, known are a, b, c"):
        select_questions(MIXED, None, None, ["a", "z"])


def test_selection_refuses_an_empty_list_of_categories():
    with pytest.raises(ConfigError, match="an empty list given, known are a, b, c"):
        select_questions(MIXED, None, None, [])


@pytest.mark.parametrize(
    ("per_category", "limit", "message"),
    [(0, None, "per_category=0"), (-1, None, "per_category=-1"), (None, 0, "limit=0")],
)
def test_selection_refuses_counts_below_one(
    per_category: int | None, limit: int | None, message: str
):
    with pytest.raises(ConfigError, match=message):
        select_questions(MIXED, per_category, limit)


@pytest.mark.skipif(
    not BENCHMARKS.is_dir(),
    reason="the benchmark question files are not part of the project; they lie beside it",
)
@pytest.mark.parametrize("name", ["alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"])
def test_loader_reads_each_benchmark_file(name: str):
    path = BENCHMARKS / f"{name}.jsonl"
    questions = load_questions(path)
    filled = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    assert len(questions) == len(filled)
    assert all(question.category for question in questions)
