"""What a caller gives and gets: sampling parameters, requests' outputs and their statistics."""

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, NamedTuple, Protocol

from specdec.config import check_types
from specdec.errors import ConfigError
from specdec.grammar import StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20  # most likely tokens that can be named beside a token


@dataclass
class SamplingParams:
    """How the tokens of one request are drawn and when it ends; names and defaults are vLLM's.

    Args:
        temperature: 0 takes the argmax; larger values flatten the distribution.
        top_p: keep the smallest set of most probable tokens whose mass reaches this, in (0, 1].
        top_k: keep the `top_k` most probable tokens; 0 or -1 keeps all.
        min_p: keep the tokens that are at least this times as probable as the likeliest, in [0, 1].
        repetition_penalty: divides the positive logits of tokens that are in the prompt or in the
            text so far, and multiplies their negative ones; 1 changes nothing.
        frequency_penalty: subtracted from a token's logit as often as the new text holds it.
        presence_penalty: subtracted once where the new text holds the token.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: no other token is drawn.
        bad_words: strings whose last token is not drawn after the others of them, in the new text.
        min_tokens: before so many new tokens neither EOS nor a stop token is drawn.
        max_tokens: new tokens at most.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text, beside EOS.
        ignore_eos: go on after EOS.
        n: samples of the request, each with noise of its own; they are handed out together.
        logprobs: most likely tokens to name at each new token's place, with their
            log-probabilities, beside the new token itself; 0 names that alone, None nothing.
        prompt_logprobs: the same for the prompt's tokens, all but the first.
        seed: fixes the request's noise; None takes one from the engine's seed, and records it.
        structured_outputs: what the text has to follow: a JSON schema, a regular expression, a
            choice of strings, or a grammar.
        num_speculative_tokens: this request's own draft budget; None takes the engine's, 0 turns
            speculation off for the request.

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check every type and range; see the class docstring."""
        check_types(type(self), vars(self), "sampling parameter")
        # Below 1e-5 a float32 logit divided by it may overflow, and 1e39 is none in float32.
        small_or_huge = self.temperature != 0 and not 1e-5 <= self.temperature <= 1e30
        _check(not small_or_huge, "temperature", self.temperature, "0, or a number in [1e-5, 1e30]")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for all tokens")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        self._check_processors()
        no_end = self.structured_outputs is not None and self.ignore_eos
        allowed = "False: with structured_outputs EOS ends the text"
        _check(not no_end, "ignore_eos", self.ignore_eos, allowed)
        _check(self.n >= 1, "n", self.n, "an integer >= 1")
        for name in ("logprobs", "prompt_logprobs"):
            value, allowed = getattr(self, name), f"an integer in [0, {MAX_LOGPROBS}], or None"
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, allowed)
        budget = self.num_speculative_tokens
        _check(budget is None or budget >= 0, "num_speculative_tokens", budget, "an integer >= 0")
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed",
            self.seed,
            "a 64-bit signed integer",
        )
        if self.seed is not None:
            self.seed = int(self.seed)  # numpy's integers overflow where the seed is mixed
        sound = all(isinstance(string, str) and string for string in self.stop_strings)
        _check(sound, "stop", self.stop, "non-empty strings")

    def _check_processors(self) -> None:
        """Check what changes logits; ids are held to the vocabulary when a request is added."""
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        repetition = self.repetition_penalty
        sound = 1e-5 <= repetition <= 1e5
        _check(sound, "repetition_penalty", repetition, "a number in [1e-5, 1e5]")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, name, value, "a number in [-2, 2]")
        for token_id, bias in (self.logit_bias or {}).items():
            sound = _is_id(token_id) and isinstance(bias, Real) and abs(bias) <= 1e30
            _check(sound, "logit_bias", self.logit_bias, "token ids with finite numbers")
        allowed = self.allowed_token_ids
        sound = allowed is None or (len(allowed) > 0 and all(_is_id(i) for i in allowed))
        _check(sound, "allowed_token_ids", allowed, "at least one token id, or None")
        sound = all(isinstance(word, str) and word.strip() for word in self.bad_words or ())
        _check(sound, "bad_words", self.bad_words, "strings that are not blank")
        at_most = f"an integer in [0, max_tokens={self.max_tokens}]"
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, at_most)

    @property
    def stop_strings(self) -> list[str]:
        """Return `stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")


@dataclass
class RequestStats:
    """Counts of one request's verification steps (`specdec/metrics.py`); lists have length K.

    Drafts of -1 are never counted, nor is anything after the token that ended the request.
    """

    num_verify_steps: int = 0
    num_verify_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def accepted_length(self) -> float:
        """Committed tokens per verification step, bonus included; 1.0 where none ran."""
        return self.num_verify_tokens / self.num_verify_steps if self.num_verify_steps else 1.0


class Logprob(NamedTuple):
    """A token's log-probability, and its rank in the vocabulary: 1 + how many are likelier."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # by token id, the text's own token first


@dataclass
class CompletionOutput:
    """One sample of a request; `token_ids` include the stop token or EOS, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] | None = None  # one a token


@dataclass
class RequestOutput:
    """A finished (or aborted) request; `out.<field>` reads `out.outputs[0].<field>`.

    `stats` are the sums over all samples.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    seed: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one a token, None for the first

    @property
    def token_ids(self) -> list[int]:
        """Return the first sample's new tokens."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """Return the first sample's text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why the first sample ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Return the first sample's log-probabilities."""
        return self.outputs[0].logprobs


class TextSource(Protocol):
    """What knows the text of a request's tokens, such as `specdec.ending.Detokenizer`."""

    def piece(self, start: int, end: int, final: bool) -> str: ...


class Increment:
    """What one engine step added to one sample of a request.

    Args:
        request_id: whose it is.
        new_token_ids: the tokens.
        source: knows their text.
        start: new tokens of the sample that came before.
        sample_index: which of the request's `n` samples.
        finish_reason: why the sample ended, None while it goes on.
        output: everything about a request whose samples all ended, else None.
    """

    __slots__ = (
        "_source",
        "_start",
        "finish_reason",
        "logprobs",
        "new_token_ids",
        "output",
        "request_id",
        "sample_index",
    )

    def __init__(
        self,
        request_id: str,
        new_token_ids: list[int],
        source: TextSource,
        start: int,
        sample_index: int = 0,
        finish_reason: FinishReason | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        self.request_id = request_id
        self.new_token_ids = new_token_ids
        self.sample_index = sample_index
        self.finish_reason: FinishReason | None = finish_reason
        self.output = output
        self.logprobs: list[TokenLogprobs] | None = None  # of the new tokens, where asked for
        self._source = source
        self._start = start

    @property
    def new_text(self) -> str:
        """Return the text they added; it is decoded when it is read, now or later."""
        end = self._start + len(self.new_token_ids)
        return self._source.piece(self._start, end, self.finish_reason is not None)

    def __repr__(self) -> str:
        """Show what came, without the text."""
        return (
            f"Increment({self.request_id!r}, {self.new_token_ids}, "
            f"finish_reason={self.finish_reason!r})"
        )
