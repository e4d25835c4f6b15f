"""What a caller gives and gets: sampling parameters, requests' outputs and their statistics."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from specdec.config import check_types
from specdec.errors import ConfigError, UnsupportedError

FinishReason = Literal["stop", "length", "abort"]

# Parameters that exist by name but do not work under speculation yet: (field, neutral value).
_NOT_YET: tuple[tuple[str, Any], ...] = (
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
    ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0),
    ("logit_bias", None),
    ("allowed_token_ids", None),
    ("bad_words", None),
    ("min_tokens", 0),
    ("n", 1),
    ("logprobs", None),
    ("prompt_logprobs", None),
)


@dataclass
class SamplingParams:
    """How the tokens of one request are drawn and when it ends; names and defaults are vLLM's.

    Args:
        temperature: 0 takes the argmax; larger values flatten the distribution.
        top_p: keep the smallest set of most probable tokens whose mass reaches this, in (0, 1].
        top_k: keep the `top_k` most probable tokens; 0 or -1 keeps all.
        max_tokens: new tokens at most.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text, beside EOS.
        ignore_eos: go on after EOS.
        seed: fixes the request's noise; None takes one from the engine's seed, and records it.
        num_speculative_tokens: this request's own draft budget; None takes the engine's, 0 turns
            speculation off for the request.

    The other fields are accepted by name and refused with a clear error while set to anything but
    their neutral value.

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
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check every type and range; see the class docstring."""
        check_types(type(self), vars(self), "sampling parameter")
        # Below that a float32 logit divided by it may overflow.
        small_or_huge = self.temperature != 0 and not 1e-5 <= self.temperature < float("inf")
        _check(not small_or_huge, "temperature", self.temperature, "0, or a number >= 1e-5")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for all tokens")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
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

    @property
    def stop_strings(self) -> list[str]:
        """Return `stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def check_supported(self) -> None:
        """Refuse what cannot be honoured yet.

        Raises:
            UnsupportedError: a parameter that is not implemented is set.
        """
        for name, neutral in _NOT_YET:
            value = getattr(self, name)
            if value not in (neutral, None):
                raise UnsupportedError(
                    f"sampling parameter {name}={value!r} is not supported yet; "
                    f"leave it at {neutral!r}"
                )


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")


@dataclass
class RequestStats:
    """Counts of one request's verification steps (DESIGN: metrics); lists have length K.

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


@dataclass
class CompletionOutput:
    """One sample of a request; `token_ids` include the stop token or EOS, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, tuple[float, int]]] | None = None


@dataclass
class RequestOutput:
    """A finished (or aborted) request; `out.<field>` reads `out.outputs[0].<field>`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    seed: int
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None = None

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
    def logprobs(self) -> list[dict[int, tuple[float, int]]] | None:
        """Return the first sample's log-probabilities."""
        return self.outputs[0].logprobs


class TextSource(Protocol):
    """What knows the text of a request's tokens, such as `specdec.ending.Detokenizer`."""

    def piece(self, start: int, end: int, final: bool) -> str: ...


class Increment:
    """What one engine step added to one request.

    Args:
        request_id: whose it is.
        new_token_ids: the tokens.
        source: knows their text.
        start: new tokens of the request that came before.
        finish_reason: why the request ended, None while it goes on.
        output: everything about a request that ended, None while it goes on.
    """

    __slots__ = ("_source", "_start", "finish_reason", "new_token_ids", "output", "request_id")

    def __init__(
        self,
        request_id: str,
        new_token_ids: list[int],
        source: TextSource,
        start: int,
        finish_reason: FinishReason | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        self.request_id = request_id
        self.new_token_ids = new_token_ids
        self.finish_reason: FinishReason | None = finish_reason
        self.output = output
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
