"""A request of n samples: n sequences with noise of their own, handed out together."""

import functools
from typing import Any

import pytest

from specdec import LLM, Engine, SamplingParams
from specdec.errors import CapacityError, ConfigError
from specdec.types import CompletionOutput, Increment, RequestOutput, RequestStats
from tests.models import byte_tokenizer, random_prompts, tiny_model, tiny_target

V = 17  # so few that prompt lookup often finds something, and is sometimes right
NUM_TOKENS = 14
PROMPTS = random_prompts((5, 33, 9), seed=2, vocab_size=V)
SEEDS = (1, -5, 2**63 - 1)
NUM_SAMPLES = (3, 1, 4)
TARGET_AS_DRAFT = {"name": "draft_model", "model": "target"}
NGRAM = {"name": "ngram", "min_n": 1, "max_n": 2}
PREEMPTING = {"num_kv_blocks": 16, "block_size": 6}
STEP = 0x9E3779B97F4A7C15  # what a seed grows by from one sample to the next


@functools.cache
def target() -> Any:
    """Return the target behind the runner."""
    return tiny_target(tiny_model("llama", vocab_size=V))


def make_llm(drafter: Any = NGRAM, verifier: str = "sampled_match", **options: Any) -> LLM:
    """Return an LLM over the random target."""
    return LLM(target(), drafter, verifier, 4, **{"max_model_len": 80, **options})


def params(n: int, seed: int | None = 1, **fields: Any) -> SamplingParams:
    """Return parameters of n samples."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.9, **fields}
    return SamplingParams(n=n, seed=seed, **fields)


def of_sample(seed: int, sample_index: int) -> int:
    """Return the seed with which a request's first sample is another request's sample."""
    value = (seed + sample_index * STEP) % 2**64
    return value - 2**64 if value >= 2**63 else value


@functools.cache
def expected_texts() -> list[list[list[int]]]:
    """Return each sample's text, as a request of one sample writes it, alone and without drafts."""
    llm = make_llm("none", max_num_reqs=1)
    texts = []
    for prompt, seed, n in zip(PROMPTS, SEEDS, NUM_SAMPLES, strict=True):
        alone = [params(1, of_sample(seed, index)) for index in range(n)]
        texts.append([out.token_ids for out in llm.generate([prompt] * n, alone)])
    return texts


def write(llm: LLM, **keywords: Any) -> list[RequestOutput]:
    """Write every request's samples."""
    requests = [params(n, seed) for n, seed in zip(NUM_SAMPLES, SEEDS, strict=True)]
    return llm.generate(PROMPTS, requests, **keywords)


def texts_of(output: RequestOutput) -> list[list[int]]:
    """Return the tokens of each sample."""
    return [sample.token_ids for sample in output.outputs]


OPTIONS: dict[str, dict[str, Any]] = {
    "one row": {"max_num_reqs": 1},
    "two rows": {"max_num_reqs": 2},
    "batch": {},
    "chunks": {"max_steps_in_flight": 2, "max_num_batched_tokens": 13},
    "fixed shape": {"graph_scope": "step", "max_steps_in_flight": 2},
    "preempted": PREEMPTING,
    "preempted in flight": {"max_steps_in_flight": 2, **PREEMPTING},
}


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        *(pytest.param(NGRAM, options, id=f"ngram, {name}") for name, options in OPTIONS.items()),
        pytest.param("none", OPTIONS["two rows"], id="none, two rows"),
        pytest.param(TARGET_AS_DRAFT, OPTIONS["batch"], id="target, batch"),
        pytest.param(TARGET_AS_DRAFT, OPTIONS["preempted in flight"], id="target, preempted"),
    ],
)
def test_each_sample_is_the_text_of_its_own_seed(drafter: Any, options: Any) -> None:
    outputs = write(make_llm(drafter, **options))
    assert [texts_of(output) for output in outputs] == expected_texts()
    for output, n in zip(outputs, NUM_SAMPLES, strict=True):
        assert [sample.index for sample in output.outputs] == list(range(n))
        assert output.token_ids == output.outputs[0].token_ids
    if "num_kv_blocks" in options:
        assert sum(output.stats.num_preemptions for output in outputs) > 0


def test_samples_of_a_request_differ() -> None:
    (output,) = make_llm().generate([PROMPTS[0]], params(8, seed=None))
    assert len({tuple(text) for text in texts_of(output)}) == 8


def test_greedy_samples_are_one_text() -> None:
    (output,) = make_llm(verifier="rejection").generate([PROMPTS[0]], params(3, temperature=0.0))
    assert texts_of(output) == [output.token_ids] * 3


@pytest.mark.parametrize("engine_seed", [5, 1_789_000_000_000_000_000])  # the time in ns, say
def test_recorded_seed_gives_all_samples_again(engine_seed: int) -> None:
    (output,) = make_llm("none", seed=engine_seed).generate([PROMPTS[0]], params(3, seed=None))
    (again,) = make_llm(seed=6).generate([PROMPTS[0]], params(3, seed=output.seed))
    assert texts_of(again) == texts_of(output)


@pytest.mark.parametrize("options", [{}, PREEMPTING], ids=["batch", "preempted"])
def test_statistics_are_the_sums_over_the_samples(options: Any) -> None:
    for output in write(make_llm(TARGET_AS_DRAFT, **options)):
        parts = [sample.stats for sample in output.outputs]
        total = RequestStats(drafted_per_position=[0] * 4, accepted_per_position=[0] * 4)
        for stats, sample in zip(parts, output.outputs, strict=True):
            # The prompt's last chunk gives a token, and so does every resumption.
            committed = len(sample.token_ids) - 1 - stats.num_preemptions
            assert stats.num_verify_tokens == committed
            assert stats.num_verify_tokens == stats.num_verify_steps + stats.num_accepted
            assert sum(stats.accepted_per_position) == stats.num_accepted > 0
            for i in range(4):
                total.drafted_per_position[i] += stats.drafted_per_position[i]
                total.accepted_per_position[i] += stats.accepted_per_position[i]
        for name in ("verify_steps", "verify_tokens", "drafted", "accepted", "preemptions"):
            summed = sum(getattr(stats, f"num_{name}") for stats in parts)
            setattr(total, f"num_{name}", summed)
        assert output.stats == total


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_increments_carry_the_sample_and_the_last_one_the_output(steps_in_flight: int) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    llm = LLM(
        tiny_target(model, tokenizer),
        NGRAM,
        "sampled_match",
        max_model_len=80,
        max_steps_in_flight=steps_in_flight,
    )
    seen: list[Increment] = []
    requests = [params(3, ignore_eos=True), params(2, stop=["e", "\x05"])]
    outputs = llm.generate(["a lamp", "b"], requests, on_increment=seen.append)
    names = list(dict.fromkeys(increment.request_id for increment in seen))
    for name, output in zip(names, outputs, strict=True):
        own = [increment for increment in seen if increment.request_id == name]
        assert [i for i in own if i.output is not None] == own[-1:]
        for sample in output.outputs:
            pieces = [i for i in own if i.sample_index == sample.index]
            assert "".join(i.new_text for i in pieces) == sample.text
            assert [t for i in pieces for t in i.new_token_ids] == sample.token_ids
            assert [i.finish_reason for i in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == sample.finish_reason


def _drive(engine: Engine) -> list[Increment]:
    increments = []
    while engine.has_requests:
        increments += engine.step()
    return increments


def _is_at_rest(engine: Engine) -> bool:
    state, blocks = engine.runner.state, engine.scheduler.blocks
    return (
        not engine.unfinished_ids
        and state.num_free_rows == state.max_num_reqs
        and blocks.num_free == blocks.num_blocks
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_ends_all_samples(num_steps: int, steps_in_flight: int) -> None:
    engine = make_llm(max_num_reqs=2, max_steps_in_flight=steps_in_flight).engine
    engine.add_request("a", PROMPTS[0], params(3))
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    engine.add_request("a", PROMPTS[1], params(2, SEEDS[1]))
    increments = _drive(engine)
    aborted = [i for i in increments if i.finish_reason == "abort"]
    assert [i.sample_index for i in aborted] == [0, 1, 2]
    assert [i.output is None for i in aborted] == [True, True, False]
    output = aborted[-1].output
    assert output is not None
    for sample, text in zip(output.outputs, expected_texts()[0], strict=True):
        assert sample.finish_reason == "abort"
        assert sample.token_ids == text[: len(sample.token_ids)]
    again = increments[-1].output
    assert again is not None
    assert texts_of(again)[0] == expected_texts()[1][0]
    assert _is_at_rest(engine)


def test_abort_leaves_samples_as_they_ended() -> None:
    # With one row the samples run one after another.
    engine = make_llm(max_num_reqs=1).engine
    engine.add_request("a", PROMPTS[0], params(3))
    ended: list[CompletionOutput | int] = []
    while not ended:
        ended += [i.sample_index for i in engine.step() if i.finish_reason is not None]
    assert ended == [0]
    engine.step()
    last = engine.discard("a")
    assert last.output is not None
    reasons = [sample.finish_reason for sample in last.output.outputs]
    assert reasons == ["length", "abort", "abort"]
    assert last.output.token_ids == expected_texts()[0][0]
    assert last.sample_index == 2
    assert _is_at_rest(engine)


def test_failed_step_is_started_over_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm().engine
    for i, (prompt, seed, n) in enumerate(zip(PROMPTS, SEEDS, NUM_SAMPLES, strict=True)):
        engine.add_request(str(i), prompt, params(n, seed))
    increments = engine.step() + engine.step()
    monkeypatch.setattr(engine.runner, "execute_model", _fail)
    with pytest.raises(OSError, match="lost"):
        engine.step()
    monkeypatch.undo()
    increments += _drive(engine)
    outputs = {i.request_id: i.output for i in increments if i.output is not None}
    assert [texts_of(outputs[str(i)]) for i in range(3)] == expected_texts()


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("lost")


def test_n_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="n=0 is not allowed; give an integer >= 1"):
        SamplingParams(n=0)


def test_request_that_never_fits_leaves_no_sample_queued() -> None:
    llm = make_llm(num_kv_blocks=2, block_size=6)
    with pytest.raises(CapacityError, match="takes 4 KV blocks of 6; there are 2"):
        llm.generate([PROMPTS[0]], params(3))
    assert not llm.engine.has_requests
    assert _is_at_rest(llm.engine)
