"""Structured output: texts that follow a JSON schema, a regular expression, a choice or a grammar.

The host walks the grammar. What may come after a text depends on all of it, so before a step it
walks over the drafts that the step verifies, and masks each of their lines by the drafts before it.
A draft that leaves the grammar is masked where it is judged, so it is rejected there, and the lines
behind it do not matter.

The walking is llguidance's, an optional package: `pip install "specdec-lab[structured]"`.
"""

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.config import check_types
from specdec.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_PACKAGE = "llguidance"
_FORMS = ("json", "regex", "choice", "grammar")
_KEPT_GRAMMARS = 64  # the last ones that were compiled


@dataclass
class StructuredOutputsParams:
    """What a text has to follow, by one of four forms; names are vLLM's.

    Args:
        json: a JSON schema, as text or as a dict.
        regex: a regular expression that the whole text matches (Rust's syntax).
        choice: the text is one of these strings.
        grammar: a context-free grammar, in Lark's syntax or GBNF.
        disable_any_whitespace: with `json`: no whitespace between the tokens of JSON.

    Raises:
        ConfigError: not exactly one form, or a value of a wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        """Check the types, and that there is one form."""
        check_types(type(self), vars(self), "structured_outputs key")
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs takes exactly one of {', '.join(_FORMS)}; "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.choice is not None and not all(self.choice):
            raise ConfigError(f"choice={self.choice!r} is not allowed; give non-empty strings")
        if self.choice == []:
            raise ConfigError("choice=[] is not allowed; give at least one string")

    def definition(self) -> str:
        """Return the grammar as llguidance takes it; nothing is checked here.

        Raises:
            ValueError: the text is no JSON, or a grammar that cannot be read.
        """
        from llguidance import LLMatcher, grammar_from

        if self.json is not None:
            spaces: Any = {"whitespace_flexible": not self.disable_any_whitespace}
            return LLMatcher.grammar_from_json_schema(self.json, overrides=spaces)
        if self.regex is not None:
            return grammar_from("regex", self.regex)
        if self.choice is not None:
            return grammar_from("choice", json.dumps(self.choice))
        assert self.grammar is not None
        # A rule of Lark has a colon behind its name, one of GBNF "::=".
        return grammar_from("gbnf" if "::=" in self.grammar else "lark", self.grammar)


def is_available() -> bool:
    """Return whether the package that walks grammars is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


class Grammar:
    """A grammar, and how far one text has come in it.

    Args:
        matcher: at the text's beginning, and nobody else's.
        eos_token_ids: end the text where the grammar is complete.
    """

    def __init__(self, matcher: "LLMatcher", eos_token_ids: frozenset[int]) -> None:
        self.matcher, self._eos_token_ids = matcher, eos_token_ids

    def copy(self) -> "Grammar":
        """Return the same for another text that has come as far."""
        return Grammar(self.matcher.deep_copy(), self._eos_token_ids)

    def restart(self, token_ids: list[int]) -> None:
        """Go to where the text so far ends, wherever the walk was before."""
        self.matcher.reset()
        self.matcher.consume_tokens(token_ids)

    def cut(self, run: list[int], end_token_ids: frozenset[int]) -> str | None:
        """Walk over a committed run, up to a token that ends the text.

        Masks keep a run inside the grammar unless they leave no token to choose, which happens
        where another parameter forbids all that the grammar allows.

        Args:
            run: in/out: the tokens from the first on that leaves the grammar are dropped.
            end_token_ids: what comes behind one of these is not looked at.

        Returns:
            Why the text cannot go on, None where nothing was dropped.
        """
        ends = (i for i, token_id in enumerate(run) if token_id in end_token_ids)
        length = next(ends, len(run) - 1) + 1
        matcher = self.matcher
        # A matcher that cannot go on takes EOS, but does not say so when asked whether it would.
        has_eos = length > 0 and run[length - 1] in self._eos_token_ids
        body = run[: length - has_eos]
        num_allowed = matcher.validate_tokens(body)
        if num_allowed == len(body):
            matcher.consume_tokens(body)
            if not has_eos or matcher.is_accepting():
                return None
        del run[num_allowed:]
        error = _one_line(matcher.get_error())
        return f"grammar: {error}" if error else "grammar: a token was drawn that it forbids"


class GrammarBackend:
    """Compiles grammars for one target's vocabulary, and computes masks.

    Args:
        tokenizer: of the target; None refuses every grammar.
        vocab_size: V.
        eos_token_ids: tokens that end a text; a grammar allows them where it is complete.
    """

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_words = -(-vocab_size // 32)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a grammar at its beginning.

        Raises:
            ConfigError: it is no valid grammar.
            UnsupportedError: the package is missing, or the target's tokenizer does not do.
        """
        if not is_available():
            raise UnsupportedError(
                f"structured_outputs needs the package {_PACKAGE}, which is not installed; "
                f'install it, or this project with the extra "structured"'
            )
        if self._tokenizer is None or not getattr(self._tokenizer, "is_fast", False):
            raise UnsupportedError(
                "structured_outputs needs a fast tokenizer, which this target has not"
            )
        if not self._eos_token_ids:
            raise UnsupportedError(
                "structured_outputs needs a target with an EOS token, which ends its texts"
            )
        try:
            definition = params.definition()
        except ValueError as error:
            raise ConfigError(f"structured_outputs cannot be read: {_one_line(error)}") from error
        return Grammar(self._matcher(definition).deep_copy(), self._eos_token_ids)

    def masks(self, walks: Sequence[tuple[Grammar, list[int]]], num_lines: int) -> np.ndarray:
        """Return which tokens each line of each text may choose.

        Args:
            walks: texts, all unlike, and the drafts that the next step verifies.
            num_lines: most lines of a text, more than it has drafts.

        Returns:
            [len(walks), num_lines, ceil(V / 32)] int32: bit t % 32 of word t // 32 is set where
            token t may be chosen in line i, which comes behind drafts 0..i-1. Lines behind a
            draft that leaves the grammar, or that ends the text, allow everything.
        """
        from llguidance import numpy as llguidance_numpy

        num_words = -(-self._vocabulary.vocab_size // 32)
        masks = np.full((len(walks) * num_lines, num_words), -1, dtype=np.int32)
        alone, walking = [], []
        for index, (grammar, drafts) in enumerate(walks):
            first_line = index * num_lines
            if drafts:
                walking.append((grammar.matcher, first_line, drafts))
            else:
                alone.append((grammar.matcher, first_line))
        fill_first = llguidance_numpy.fill_next_token_bitmask_par
        fill_all = llguidance_numpy.fill_next_token_bitmask_par_with_draft_tokens
        if alone:
            fill_first(self._executor, alone, masks)
        if walking:
            fill_all(self._executor, walking, masks)
        return masks.reshape(len(walks), num_lines, num_words)[:, :, : self._num_words]

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """Return the tokenizer as llguidance knows it; made with the first grammar."""
        from llguidance.hf import from_tokenizer

        assert self._tokenizer is not None
        size = max(self._vocab_size, len(self._tokenizer))
        ends = sorted(self._eos_token_ids)
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)

    @functools.cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    @functools.cached_property
    def _compiled(self) -> "dict[str, LLMatcher]":
        return {}

    def _matcher(self, definition: str) -> "LLMatcher":
        """Return the matcher of a grammar at its beginning, the same one for the same grammar."""
        from llguidance import LLMatcher

        matcher = self._compiled.pop(definition, None)
        if matcher is None:
            matcher = LLMatcher(self._vocabulary, definition, log_level=0)
            if matcher.is_error():
                raise ConfigError(
                    f"structured_outputs is no valid grammar: {_one_line(matcher.get_error())}"
                )
        self._compiled[definition] = matcher  # the newest comes last
        if len(self._compiled) > _KEPT_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return matcher


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
