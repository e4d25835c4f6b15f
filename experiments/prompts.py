"""Question files: the project's own prompts and any JSON lines file in the Spec-Bench layout."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ConfigError

BUILTIN_PATH = Path(__file__).parent / "data" / "builtin_prompts.jsonl"


@dataclass(frozen=True)
class Question:
    """One conversation to answer: the user's turns, in order."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    # Of a prompt made to a length, see `experiments.context`.
    context_len: int | None = None  # tokens of the target
    random_tokens: bool = False
    filler: str = ""  # text that goes in front of the question
    token_ids: tuple[int, ...] | None = None  # the whole prompt, once a tokenizer is there


def load_questions(path: Path | str) -> list[Question]:
    """Read a question file, one JSON object a line; blank lines and further keys are ignored.

    Args:
        path: file whose objects have `question_id`, `category` and `turns`; an empty category
            becomes the file's stem.

    Returns:
        The questions in the order of the file.

    Raises:
        ConfigError: the path is no readable UTF-8 text file, a line is malformed, an id is used
            twice, or there is no question.
    """
    path = Path(path)
    questions: list[Question] = []
    line_of_id: dict[int | str, int] = {}
    for number, line in enumerate(read_text(path, "a .jsonl question file"), start=1):
        if not line.strip():
            continue
        question = _parse_line(line, where=f"{path} line {number}", default_category=path.stem)
        first = line_of_id.setdefault(question.question_id, number)
        if first != number:
            raise ConfigError(
                f"{path} line {number}: question_id {question.question_id!r} was already used on "
                f"line {first}; give every question an id of its own"
            )
        questions.append(question)
    if not questions:
        raise ConfigError(
            f"{path} line 1: no question found in the file; write one JSON object a line with "
            "question_id, category and turns"
        )
    return questions


def builtin_questions() -> list[Question]:
    """Return the project's own questions, which need no download."""
    return load_questions(BUILTIN_PATH)


def select_questions(
    questions: Sequence[Question],
    per_category: int | None,
    limit: int | None,
    categories: Sequence[str] | None = None,
) -> list[Question]:
    """Keep the first `per_category` questions of each category, then the first `limit` of these.

    Args:
        questions: the questions to choose from; their order is kept.
        per_category: most questions of one category, at least 1; None keeps all.
        limit: most questions altogether, at least 1; None keeps all.
        categories: the categories to keep; None keeps all.

    Returns:
        The chosen questions.

    Raises:
        ConfigError: a count is below 1, a category is unknown, or `categories` is empty.
    """
    for name, value in (("per_category", per_category), ("limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is too small; use 1 or more, or null for all")
    known = list(dict.fromkeys(question.category for question in questions))
    wanted = known if categories is None else list(categories)
    unknown = [name for name in wanted if name not in known]
    if unknown or (known and not wanted):
        given = ", ".join(map(repr, unknown)) if unknown else "an empty list"
        raise ConfigError(
            f"categories: {given} given, known are {', '.join(known) or 'none'}; name at least "
            "one of the known ones, or use null for all"
        )
    seen: Counter[str] = Counter()
    chosen: list[Question] = []
    for question in questions:
        seen[question.category] += 1
        if question.category in wanted and (
            per_category is None or seen[question.category] <= per_category
        ):
            chosen.append(question)
    return chosen[:limit]


def read_text(path: Path, what: str) -> list[str]:
    """Return the lines of a UTF-8 file, with or without a byte-order mark.

    Args:
        path: the file.
        what: it should be, for messages.

    Raises:
        ConfigError: the path is missing, a folder, unreadable or not UTF-8.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give the path of {what}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the path of {what}")
    try:
        # At "\n" alone: str.splitlines would also cut at U+2028, which may stand inside a turn.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; save it as UTF-8 text"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the path of {what}"
        ) from error


def _parse_line(line: str, where: str, default_category: str) -> Question:
    """Turn one line into a question.

    Raises:
        ConfigError: the line is not a JSON object, or a key is missing or of the wrong type.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not valid JSON ({error}); write one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: found {_shown(row)}; write a JSON object with question_id, category and "
            "turns"
        )
    for key in ("question_id", "category", "turns"):
        if key not in row:
            raise ConfigError(
                f"{where}: the key {key} is missing, found {', '.join(map(repr, row)) or 'no key'};"
                " each line needs question_id, category and turns"
            )
    question_id, category, turns = row["question_id"], row["category"], row["turns"]
    try:
        json.dumps([question_id, category, turns], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {_shown(error.object[error.start])} is half a character; write it whole, or "
            "leave it out"
        ) from error
    # bool is a subclass of int, and true would silently be the same id as 1.
    if isinstance(question_id, bool) or not isinstance(question_id, int | str) or question_id == "":
        raise ConfigError(
            f"{where}: question_id is {_shown(question_id)}; it must be a whole number or a "
            "text that is not empty"
        )
    if not isinstance(category, str):
        raise ConfigError(
            f"{where}: category is {_shown(category)}; it must be a text, and an empty one "
            "stands for the file's name"
        )
    if not isinstance(turns, list) or not turns:
        raise ConfigError(
            f"{where}: turns is {_shown(turns)}; it must be a list of one or more texts"
        )
    for position, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise ConfigError(
                f"{where}: turn {position} is {_shown(turn)}; each turn must be a text that is "
                "not empty"
            )
    return Question(question_id, category.strip() or default_category, tuple(turns))


def _shown(value: object) -> str:
    """Return a value as JSON, cut to a length that fits into one sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
