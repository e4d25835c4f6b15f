"""The public surface: forms of prompts, order, budgets, statistics, aborts."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.loader import LoadedTarget
from specdec import LLM, Engine, RequestOutput, SamplingParams
from specdec.errors import ConfigError
from specdec.trace import StepTrace
from tests.models import (
    byte_tokenizer,
    random_prompts,
    reference_greedy,
    scripted_model,
    tiny_model,
    tiny_target,
)

TOKENIZER = byte_tokenizer()
V = len(TOKENIZER)
K = 4
NUM_TOKENS = 16


def greedy(max_tokens: int = NUM_TOKENS, **fields: Any) -> SamplingParams:
    """Return greedy parameters; a random model writes EOS like any other token."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


GREEDY = greedy()
MESSAGES = [
    {"role": "user", "content": "where is the key?"},
    {"role": "keeper", "content": "in the lamp"},
    {"role": "user", "content": "and the lamp?"},
]
RENDERED = "<turn>user:where is the key?<turn>keeper:in the lamp<turn>user:and the lamp?<turn>"


@functools.cache
def target() -> Any:
    """Return a random target with a byte-level tokenizer."""
    return tiny_target(tiny_model("llama", vocab_size=V), TOKENIZER)


@functools.cache
def continuation(prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return transformers' greedy text after a prompt."""
    return reference_greedy(tiny_model("llama", vocab_size=V), prompt, num_tokens)


def make_llm(drafter: Any = "ngram", verifier: str = "greedy", k: int = K, **options: Any) -> LLM:
    """Return an LLM over the random target."""
    return LLM(target(), drafter, verifier, k, **{"max_model_len": 128, **options})


def encode(text: str) -> list[int]:
    """Return the ids of a string; special tokens in it are recognised."""
    return TOKENIZER(text)["input_ids"]


# --- prompts and outputs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("a lamp", "a lamp", encode("a lamp")),
        ([7, 8, 9], None, [7, 8, 9]),
        ((7, 8, 9), None, [7, 8, 9]),
        (MESSAGES, RENDERED, encode(RENDERED)),
    ],
    ids=["string", "ids", "tuple of ids", "messages"],
)
@pytest.mark.parametrize("in_a_list", [False, True])
def test_prompt_of_any_form_is_one_request(
    prompt: Any, text: str | None, token_ids: list[int], in_a_list: bool
) -> None:
    outputs = make_llm().generate([prompt] if in_a_list else prompt, GREEDY)
    assert len(outputs) == 1
    assert outputs[0].prompt == text
    assert outputs[0].prompt_token_ids == token_ids
    assert outputs[0].token_ids == continuation(tuple(token_ids))


def test_forms_of_prompts_mix_in_one_list() -> None:
    prompts = ["a lamp", [7, 8, 9], MESSAGES, "x", [3]]
    outputs = make_llm().generate(prompts, GREEDY)
    ids = [encode("a lamp"), [7, 8, 9], encode(RENDERED), encode("x"), [3]]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.token_ids for output in outputs] == [continuation(tuple(i)) for i in ids]


def test_chat_template_adds_no_second_beginning() -> None:
    # The rendered template already holds every special token.
    tokenizer = byte_tokenizer()
    tokenizer.add_bos_token = True
    llm = LLM(tiny_target(tiny_model("llama", vocab_size=V), tokenizer), max_model_len=128)
    (output,) = llm.generate([MESSAGES], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == encode(RENDERED)


def test_output_shows_its_first_sample() -> None:
    (output,) = make_llm().generate("a lamp", GREEDY)
    sample = output.outputs[0]
    assert output.token_ids is sample.token_ids
    assert output.text == sample.text == TOKENIZER.decode(sample.token_ids)
    assert output.finish_reason == sample.finish_reason == "length"
    assert output.logprobs is sample.logprobs is None


@pytest.mark.parametrize("max_num_reqs", [1, 3, 64])
def test_outputs_come_in_the_order_of_the_prompts(max_num_reqs: int) -> None:
    prompts = random_prompts((4, 4, 4, 4, 4, 4, 4), seed=8, vocab_size=V)
    lengths = [9, 1, 14, 3, 12, 2, 7]
    params = [greedy(n) for n in lengths]
    outputs = make_llm(max_num_reqs=max_num_reqs).generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    expected = [continuation(tuple(p))[:n] for p, n in zip(prompts, lengths, strict=True)]
    assert [output.token_ids for output in outputs] == expected


def test_second_call_starts_afresh() -> None:
    llm = make_llm()
    first = llm.generate(["a lamp", "a key"], GREEDY)
    second = llm.generate(["a key", "a lamp"], GREEDY)
    assert [o.token_ids for o in first] == [o.token_ids for o in second][::-1]
    assert not llm.engine.has_requests
    assert llm.engine.step() == []


def test_a_caller_may_change_parameters_for_its_next_request() -> None:
    llm, (prompt,) = make_llm(verifier="sampled_match"), random_prompts((5,), vocab_size=V)
    texts = []
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={7: -100.0})
    for temperature in (0, 5):
        params.temperature, params.seed, params.logit_bias[7] = temperature, 3, -float(temperature)
        texts.append(llm.generate([prompt], params)[0].token_ids)
        llm.engine.add_request(str(temperature), prompt, params)
    outputs = drive(llm.engine)
    assert [outputs["0"].token_ids, outputs["5"].token_ids] == texts
    assert texts[0] != texts[1]


def test_default_parameters_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    (output,) = make_llm(verifier="rejection").generate("a lamp")
    assert len(output.token_ids) == 16


# --- aborts ---------------------------------------------------------------------------------------


def drive(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end and return what finished."""
    outputs = {}
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                outputs[increment.request_id] = increment.output
    return outputs


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_aborted_row_passes_to_the_next_request_clean(num_steps: int, steps_in_flight: int) -> None:
    first, second, third = random_prompts((6, 9, 5), seed=4, vocab_size=V)
    engine = make_llm(max_num_reqs=2, max_steps_in_flight=steps_in_flight).engine
    engine.add_request("a", first, GREEDY)
    engine.add_request("b", second, GREEDY)
    engine.add_request("c", third, GREEDY)
    for _ in range(num_steps):
        engine.step()
    row = engine._groups["a"].samples[0].row
    engine.abort("a")
    # The same name again, for another prompt: outcomes in flight belong to the old owner.
    engine.add_request("a", third, GREEDY)
    increments = engine.step()
    aborted = increments[0].output
    assert aborted is not None
    assert (aborted.request_id, aborted.finish_reason) == ("a", "abort")
    assert continuation(tuple(first))[: len(aborted.token_ids)] == aborted.token_ids
    if num_steps > 0:
        assert engine._groups["c"].samples[0].row == row
    outputs = drive(engine)
    for name, prompt in (("a", third), ("b", second), ("c", third)):
        assert outputs[name].token_ids == continuation(tuple(prompt))
        assert outputs[name].finish_reason == "length"


def test_every_request_can_be_aborted_at_once() -> None:
    engine = make_llm(max_num_reqs=2, max_steps_in_flight=2).engine
    for name in "abcd":
        engine.add_request(name, [1, 2, 3], GREEDY)
    engine.step()
    for name in "abcd":
        engine.abort(name)
    outputs = drive(engine)
    assert {name: o.finish_reason for name, o in outputs.items()} == dict.fromkeys("abcd", "abort")
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    assert engine.runner.state.num_free_rows == 2


def test_abort_of_an_unknown_or_finished_request_is_an_error() -> None:
    engine = make_llm().engine
    with pytest.raises(ConfigError, match="no unfinished request has the id 'a'"):
        engine.abort("a")
    engine.add_request("a", [1, 2, 3], GREEDY)
    drive(engine)
    with pytest.raises(ConfigError, match="no unfinished request has the id 'a'"):
        engine.abort("a")


# --- budgets and statistics -----------------------------------------------------------------------


def check_counts(output: RequestOutput, num_drafts: int) -> None:
    """Check what holds for the statistics of every request."""
    stats = output.stats
    drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
    assert len(drafted) == len(accepted) == num_drafts
    assert sum(drafted) == stats.num_drafted
    assert sum(accepted) == stats.num_accepted
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    # A run: what is drafted or accepted at a place was so at every place before it.
    for counts in (drafted, accepted):
        assert all(a >= b for a, b in itertools.pairwise(counts))
    assert stats.num_verify_tokens == len(output.token_ids) - 1 - stats.num_preemptions
    assert stats.num_verify_tokens == stats.num_verify_steps + stats.num_accepted


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "drafter", ["ngram", {"name": "draft_model", "model": "target"}], ids=["ngram", "target"]
)
def test_statistics_have_k_places_and_add_up(drafter: Any, k: int) -> None:
    prompts = random_prompts((5, 30, 12), seed=5, vocab_size=V)
    for output in make_llm(drafter, k=k).generate(prompts, GREEDY):
        check_counts(output, k)


def test_draft_budget_of_a_request_is_kept_beside_others() -> None:
    prompt = encode("lamp lamp lamp")
    budgets: Sequence[int | None] = [None, 0, 1, 2, K]
    params = [greedy(num_speculative_tokens=budget) for budget in budgets]
    for steps_in_flight in (1, 2):
        llm = make_llm(
            {"name": "draft_model", "model": "target"}, max_steps_in_flight=steps_in_flight
        )
        outputs = llm.generate([prompt] * len(budgets), params)
        for budget, output in zip(budgets, outputs, strict=True):
            check_counts(output, K)
            allowed = K if budget is None else budget
            drafted = output.stats.drafted_per_position
            assert [n > 0 for n in drafted] == [i < allowed for i in range(K)]
            assert output.token_ids == continuation(tuple(prompt))
        assert outputs[1].stats.accepted_length == 1.0


def test_target_as_its_own_draft_is_always_accepted() -> None:
    prompts = random_prompts((5, 30, 12), seed=6, vocab_size=V)
    # The prompt gives one token, each step K + 1.
    params = greedy(1 + 3 * (K + 1))
    for steps_in_flight in (1, 2):
        llm = make_llm(
            {"name": "draft_model", "model": "target"}, max_steps_in_flight=steps_in_flight
        )
        for output in llm.generate(prompts, params):
            assert output.stats.num_verify_steps == 3
            assert output.stats.accepted_per_position == [3] * K
            assert output.stats.drafted_per_position == [3] * K
            assert output.stats.accepted_length == K + 1


@pytest.mark.parametrize(
    ("max_tokens", "drafted"), [(1, 0), (2, 0), (3, 1), (4, 2), (6, 4), (7, 4)]
)
def test_no_draft_is_made_that_could_not_be_used(max_tokens: int, drafted: int) -> None:
    llm = make_llm({"name": "draft_model", "model": "target"})
    (output,) = llm.generate([[1, 2, 3]], greedy(max_tokens))
    assert output.stats.num_drafted == drafted
    assert len(output.token_ids) == max_tokens


def test_no_draft_is_made_beyond_the_drafts_own_context(tmp_path: Path) -> None:
    context = 16
    model = tiny_model("llama", vocab_size=V, max_position_embeddings=context)
    model.save_pretrained(tmp_path)
    target_alone = LoadedTarget("tiny", target().model, None)
    trace = StepTrace()
    drafter = {"name": "draft_model", "model": str(tmp_path)}
    llm = LLM(target_alone, drafter, "greedy", K, max_model_len=128, trace=trace)
    prompts = random_prompts((5, 12, 40), seed=6, vocab_size=V)
    outputs = llm.generate(prompts, greedy(24))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == continuation(tuple(prompt), 24)
    assert [output.stats.num_drafted > 0 for output in outputs] == [True, True, False]
    steps = trace.requests().query("is_verify")
    assert (steps.context_len + steps.num_drafted)[steps.num_drafted > 0].max() == context


@functools.cache
def counting_target() -> Any:
    """Return a target whose greedy text counts up: no token comes twice."""
    return tiny_target(scripted_model([(i + 1) % 100 for i in range(100)]))


def test_prompt_lookup_without_a_match_drafts_nothing() -> None:
    llm = LLM(counting_target(), "ngram", "greedy", K, max_model_len=128)
    (output,) = llm.generate([[3, 4, 5]], greedy(40))
    assert output.token_ids == list(range(6, 46))
    assert output.stats.num_drafted == 0
    assert output.stats.accepted_length == 1.0
    assert output.stats.num_verify_steps == output.stats.num_verify_tokens == 39


def test_prompt_lookup_copies_what_followed_before() -> None:
    llm = LLM(counting_target(), "ngram", "greedy", K, max_model_len=128)
    # The prompt's first new token is 3, and what followed 3 before follows it again.
    (output,) = llm.generate([[*range(3, 40), 2]], greedy(1 + 4 * (K + 1)))
    assert output.token_ids == list(range(3, 24))
    assert output.stats.accepted_per_position == [4] * K


@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.8, 0.2], [0.6]])
def test_oracle_is_accepted_at_the_rates_that_were_set(rates: list[float]) -> None:
    num_requests = 250
    text = list(range(3, 60))
    trace = StepTrace()
    llm = LLM(
        counting_target(),
        {"name": "oracle", "texts": [text], "rates": rates},
        "greedy",
        K,
        max_model_len=128,
        max_num_reqs=num_requests,
        trace=trace,
    )
    params = greedy(40)
    outputs = llm.generate([text[:3]] * num_requests, params)
    assert all(output.token_ids == text[3:43] for output in outputs)
    steps = trace.requests().query("is_verify")
    for place in range(K):
        # Conditional on the drafts before it: those were kept, and there was one here.
        judged = steps[(steps.num_drafted > place) & (steps.num_accepted >= place)]
        rate = rates[min(place, len(rates) - 1)]
        deviation = (rate * (1 - rate) / len(judged)) ** 0.5
        assert len(judged) > 300
        assert abs((judged.num_accepted > place).mean() - rate) < 5 * deviation
