"""Errors of a tokenizer, a policy and a caller: the engine that meets one stays whole."""

import functools
from typing import Any

import pytest

from specdec import LLM, Engine, SamplingParams
from specdec.config import EngineConfig
from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig
from specdec.errors import ConfigError
from specdec.registry import register_draft_length
from specdec.types import Increment
from tests.models import byte_tokenizer, tiny_model, tiny_target

GREEDY = SamplingParams(max_tokens=12, temperature=0)
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 64}


class Unreliable:
    """A tokenizer whose `decode` fails once, in its n-th call from now."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self._calls_left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def fail(self, call: int) -> None:
        self._calls_left = call

    def decode(self, *args: Any, **options: Any) -> str:
        self._calls_left -= 1
        if self._calls_left == 0:
            raise IndexError("piece id is out of range")
        return self._tokenizer.decode(*args, **options)


@functools.cache
def model() -> Any:
    return tiny_model("llama", vocab_size=len(byte_tokenizer()))


def make_target(tokenizer: Any) -> Any:
    return tiny_target(model(), tokenizer)


def test_a_text_that_cannot_be_decoded_at_its_end_leaves_nothing_behind() -> None:
    tokenizer = Unreliable()
    llm = LLM(make_target(tokenizer), "ngram", "greedy", 3, **SIZES)
    tokenizer.fail(1)
    with pytest.raises(IndexError):
        llm.generate([[1, 2, 3]], GREEDY)
    assert not llm.engine.unfinished_ids
    assert not llm.engine.has_requests
    again = llm.generate([[1, 2, 3]], GREEDY)[0]
    fresh = LLM(make_target(byte_tokenizer()), "none", "greedy", **SIZES)
    assert again.token_ids == fresh.generate([[1, 2, 3]], GREEDY)[0].token_ids


@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_text_with_stop_strings_is_whole_after_decode_failed_once(call: int) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, stop=["never there"])
    plain = LLM(make_target(byte_tokenizer()), "ngram", "greedy", 3, **SIZES)
    expected = plain.generate([[1, 2, 3]], params)[0]
    tokenizer = Unreliable()
    engine = Engine(make_target(tokenizer), "ngram", "greedy", 3, **SIZES)
    engine.add_request("a", [1, 2, 3], params)
    tokenizer.fail(call)
    told: list[Increment] = []
    num_failed = 0
    while engine.has_requests:
        try:
            told += engine.step()
        except IndexError:
            num_failed += 1
    output = told[-1].output
    assert num_failed == 1
    assert output is not None
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert "".join(increment.new_text for increment in told) == expected.text


@register_draft_length("fails_after_preemption", DraftLengthConfig)
class FailsAfterPreemption(DraftLengthBase):
    """Raises once, in the first step that preempts."""

    engine: Engine | None = None
    failed = False

    def choose(self, num_reqs: int) -> int:
        groups = [] if self.engine is None else self.engine._groups.values()
        preempted = sum(s.stats.num_preemptions for group in groups for s in group.samples)
        if preempted and not self.failed:
            self.failed = True
            raise ZeroDivisionError("of a plug-in")
        return self.num_speculative_tokens


def test_a_request_preempted_in_a_step_that_fails_has_no_row() -> None:
    sizes = {**SIZES, "block_size": 4, "num_kv_blocks": 20, "max_num_reqs": 4}
    target = make_target(byte_tokenizer())
    engine = Engine(
        target, "ngram", "greedy", 3, draft_length={"name": "fails_after_preemption"}, **sizes
    )
    policy = engine.draft_length
    assert isinstance(policy, FailsAfterPreemption)
    policy.engine = engine
    params = SamplingParams(max_tokens=40, temperature=0)
    for i in range(3):
        engine.add_request(str(i), [1, 2, 3 + i], params)
    while not policy.failed:
        try:
            engine.step()
        except ZeroDivisionError:
            break
    assert policy.failed
    assert [request.row for request in engine.scheduler.waiting] == [None] * 3
    engine.step()
    for request in list(engine.scheduler.waiting):
        engine.abort(request.request_id)
    engine.add_request("new", [9, 9], params)
    ended = {}
    while engine.has_requests:
        rows = [request.row for request in engine.scheduler.running]
        assert len(set(rows)) == len(rows)
        ended |= {i.request_id: i.output for i in engine.step() if i.output is not None}
    alone = LLM(target, "none", "greedy", **SIZES).generate([[9, 9]], params)[0]
    assert ended["new"].token_ids == alone.token_ids


def test_generate_says_so_where_its_callback_discards_a_request() -> None:
    llm = LLM(make_target(byte_tokenizer()), "ngram", "greedy", 3, **SIZES)

    def discard(increment: Increment) -> None:
        if increment.request_id in llm.engine.unfinished_ids:
            llm.engine.discard(increment.request_id)

    with pytest.raises(ConfigError, match="was discarded meanwhile; end it by abort"):
        llm.generate([[1, 2, 3]], GREEDY, on_increment=discard)
    assert len(llm.generate([[1, 2, 3]], GREEDY)) == 1


@pytest.mark.parametrize("values", [{"max_model_len": "64"}, {"steps_per_launch": 2.5}])
def test_a_config_object_is_checked_like_options(values: dict[str, Any]) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(ConfigError, match=f"{name}.*{value!r}"):
        EngineConfig(**values)


def test_replicas_of_a_config_object_are_replicas() -> None:
    target = make_target(byte_tokenizer())
    with pytest.raises(ConfigError, match="start it by `torchrun --nproc-per-node 2"):
        LLM(target, config=EngineConfig(device="cpu", data_parallel_size=2, max_model_len=64))
