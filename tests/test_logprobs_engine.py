"""Log-probabilities of an engine's texts against transformers' own logits, under speculation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from runner.loader import LoadedTarget
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.types import MAX_LOGPROBS, Increment, Logprob, RequestOutput
from tests.models import byte_tokenizer, random_prompts, scripted_model, tiny_model, tiny_target
from tests.parameter_oracle import mask, penalize, truncate
from tests.schedules import Arrival, draw_schedule, run_schedule

K = 3
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 80,
}
DRAFTERS: list[Any] = ["none", "ngram", {"name": "draft_model", "model": "target"}]
SCOPES: list[dict[str, Any]] = [
    {"graph_scope": "none"},
    {"graph_scope": "step", "graph_num_reqs": [1, 2, 5]},
    {"graph_scope": "step", "graph_num_reqs": [5], "max_steps_in_flight": 2},
]
RUNS = [*(("raw", scope) for scope in SCOPES), ("processed", SCOPES[2])]
# Ours and transformers' logits differ by about 1e-5.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def target(model: PreTrainedModel) -> LoadedTarget:
    return tiny_target(model)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return transformers' logits [T, V] float64 after each token."""
    output: Any = model(torch.tensor([list(token_ids)]))
    return output.logits[0].double()


def processed_like(
    logits: Tensor, params: SamplingParams, prompt: list[int], new: list[int]
) -> Tensor:
    """Return what tokens are drawn from, [number of new tokens, V], by the oracle of parameters."""
    lines = logits.clone()
    for i, line in enumerate(lines):
        mask(line, params, new[:i], eos=-1)
        penalize(line, params, prompt, new[:i])
        if params.temperature > 0:
            line /= params.temperature
            truncate(line, params)
    return lines


def check_token(
    entry: dict[int, Logprob], logits: Tensor, token_id: int, num_logprobs: int
) -> None:
    """Compare one token's entry with a line of logits [V]."""
    expected = torch.log_softmax(logits, 0)
    assert next(iter(entry)) == token_id, "the text's own token comes first"
    others = [other for i, other in enumerate(entry) if i > 0]
    num_best = len(others) + (entry[token_id].rank <= num_logprobs)
    assert num_best == num_logprobs, entry
    for other, (logprob, rank) in entry.items():
        assert logprob == pytest.approx(float(expected[other]), abs=TOLERANCE)
        # A neighbour that is closer than the tolerance may be on either side.
        least = int((logits > logits[other] + TOLERANCE).sum()) + 1
        most = int((logits > logits[other] - TOLERANCE).sum())
        assert least <= rank <= max(least, most), (other, rank)
    best = sorted(rank for rank in (e.rank for e in entry.values()) if rank <= num_logprobs)
    finite = [e.rank for e in entry.values() if e.logprob > float("-inf")]
    if len(finite) == len(entry):  # ties among tokens that are ruled out share a rank
        assert best == list(range(1, num_logprobs + 1))


def check_output(
    model: PreTrainedModel, output: RequestOutput, params: SamplingParams, processed: bool
) -> None:
    """Compare everything that an output says with transformers' logits."""
    prompt, new = output.prompt_token_ids, output.token_ids
    logits = reference_logits(model, [*prompt, *new])
    if params.logprobs is None:
        assert output.logprobs is None
    else:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(new)
        lines = logits[len(prompt) - 1 : -1]
        lines = processed_like(lines, params, prompt, new) if processed else lines
        for entry, line, token_id in zip(output.logprobs, lines, new, strict=True):
            check_token(entry, line, token_id, params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            check_token(entry, logits[i], prompt[i + 1], params.prompt_logprobs)


def asking(arrivals: list[Arrival]) -> list[Arrival]:
    """Let two in three requests of a schedule ask for log-probabilities, each for other ones."""
    wants = [(0, None), (3, 2), (None, None), (None, 0), (MAX_LOGPROBS, 5), (1, MAX_LOGPROBS)]
    changed = []
    for i, arrival in enumerate(arrivals):
        logprobs, prompt_logprobs = wants[i % len(wants)]
        params = dataclasses.replace(
            arrival.params, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        changed.append(dataclasses.replace(arrival, params=params, abort_after=None))
    return changed


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize(("mode", "scope"), RUNS, ids=str)
def test_every_token_has_transformers_log_probability(
    model: PreTrainedModel, target: LoadedTarget, drafter: Any, mode: str, scope: dict[str, Any]
) -> None:
    # Chunked prompts beside verifying rows, and few blocks: some requests are preempted.
    options = {**SIZES, "num_kv_blocks": 18, "logprobs_mode": mode, **scope}
    engine = Engine(target, drafter, "sampled_match", K, **options)
    arrivals = asking(draw_schedule(seed=2))
    result = run_schedule(engine, arrivals)
    assert result.num_preemptions > 0
    for name, output in result.outputs.items():
        check_output(model, output, arrivals[int(name)].params, mode == "processed")


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_mode_says_whether_parameters_count(
    model: PreTrainedModel, target: LoadedTarget, drafter: Any, mode: str
) -> None:
    changes: list[dict[str, Any]] = [
        {"temperature": 0.6, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.3, "frequency_penalty": 1.0, "logit_bias": {5: 4.0, 6: -3.0}},
        {"temperature": 0.0, "allowed_token_ids": [3, 4, 5, 50, 51]},
    ]
    every = [
        SamplingParams(**change, max_tokens=12, seed=i, logprobs=4)
        for i, change in enumerate(changes)
    ]
    prompts = random_prompts([9, 3, 14, 6])
    arrivals = [Arrival(0, *pair, None) for pair in zip(prompts, every, strict=True)]
    options = {**SIZES, **SCOPES[2], "logprobs_mode": mode}
    result = run_schedule(Engine(target, drafter, "sampled_match", K, **options), arrivals)
    for i, params in enumerate(every):
        check_output(model, result.outputs[str(i)], params, mode == "processed")


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_rejection_sampling_leaves_the_logits_alone(
    model: PreTrainedModel, target: LoadedTarget, mode: str
) -> None:
    drafter = {"name": "draft_model", "model": "target", "sampling": "gumbel"}
    options = {**SIZES, **SCOPES[1], "logprobs_mode": mode}
    arrivals = asking(draw_schedule(seed=3, num_requests=5))
    result = run_schedule(Engine(target, drafter, "rejection", K, **options), arrivals)
    for name, output in result.outputs.items():
        check_output(model, output, arrivals[int(name)].params, mode == "processed")


def test_they_change_no_token(target: LoadedTarget) -> None:
    arrivals = [dataclasses.replace(a, abort_after=None) for a in draw_schedule(seed=5)]
    texts = [
        run_schedule(Engine(target, "ngram", "sampled_match", K, **SIZES), schedule).texts()
        for schedule in (arrivals, asking(arrivals))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("budget", [4, 5, 7, 24])
@pytest.mark.parametrize("length", [1, 2, 5, 23, 30])
def test_prompts_of_any_length_in_chunks_of_any_size(
    model: PreTrainedModel, target: LoadedTarget, budget: int, length: int
) -> None:
    options = {**SIZES, "max_num_batched_tokens": budget}
    engine = Engine(target, "ngram", "sampled_match", K, **options)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, prompt_logprobs=2)
    prompt = random_prompts([length])[0]
    result = run_schedule(engine, [Arrival(0, prompt, params, None)])
    check_output(model, result.outputs["0"], params, processed=False)


def test_pieces_of_a_prompt_join(
    model: PreTrainedModel, target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.logprob_rows._PIECE_LINES", 7)
    engine = Engine(target, "none", "sampled_match", 0, **SIZES)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3)
    arrivals = [Arrival(0, prompt, params, None) for prompt in random_prompts([22, 15, 8])]
    for output in run_schedule(engine, arrivals).outputs.values():
        check_output(model, output, params, processed=False)


def test_a_resumed_prompt_is_not_taken_twice(
    target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sampler.logprob_rows as module

    taken: list[int] = []
    topk = module.topk_logprobs_of_prompt

    def counted(logits: Tensor, *args: Any) -> None:
        taken.append(len(logits))
        topk(logits, *args)

    monkeypatch.setattr(module, "topk_logprobs_of_prompt", counted)
    engine = Engine(target, "ngram", "sampled_match", K, **{**SIZES, "num_kv_blocks": 16})
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, prompt_logprobs=1)
    prompts = random_prompts([20, 21, 18])
    result = run_schedule(engine, [Arrival(0, prompt, params, None) for prompt in prompts])
    assert result.num_preemptions > 0
    assert sum(taken) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_nothing_behind_the_end_shows(drafter: Any) -> None:
    # The text counts 1, 2, 3, ... and is cut in the midst of accepted drafts.
    model = scripted_model([(i + 1) % 97 for i in range(97)])
    ends: list[tuple[dict[str, Any], int]] = [
        ({"stop_token_ids": [23]}, 13),
        ({"max_tokens": 6}, 6),
        ({"stop_token_ids": [11]}, 1),
    ]
    prompt = [*range(40), *range(11)]
    engine = Engine(tiny_target(model), drafter, "sampled_match", K, **SIZES)
    for name, (end, length) in enumerate(ends):
        params = SamplingParams(**{"max_tokens": 13, "temperature": 0, "logprobs": 2, **end})
        output = run_schedule(engine, [Arrival(0, prompt, params, None)]).outputs["0"]
        assert len(output.token_ids) == length, name
        check_output(model, output, params, processed=False)
        if drafter != "none" and length > K:
            assert output.stats.num_accepted > 0


def test_a_stop_string_cuts_them_with_the_tokens() -> None:
    tokenizer = byte_tokenizer()
    model = scripted_model([(i + 1) % 97 for i in range(len(tokenizer))])
    engine = Engine(tiny_target(model, tokenizer), "ngram", "sampled_match", K, **SIZES)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0, stop="EF")
    prompt = [*range(60, 75), *range(60, 64)]
    output = run_schedule(engine, [Arrival(0, prompt, params, None)]).outputs["0"]
    assert output.text == "@ABCD"
    check_output(model, output, params, processed=False)


def test_increments_carry_what_they_add(target: LoadedTarget) -> None:
    engine = Engine(target, "ngram", "sampled_match", K, **SIZES)
    asks = SamplingParams(max_tokens=9, seed=1, logprobs=1, n=2)
    silent = SamplingParams(max_tokens=9, seed=1)
    for name, params in (("asks", asks), ("silent", silent)):
        engine.add_request(name, random_prompts([6])[0], params)
    seen: list[Increment] = []
    while engine.has_requests:
        seen += engine.step()
    for increment in seen:
        assert (increment.logprobs is None) == (increment.request_id == "silent")
    output = next(i.output for i in seen if i.output is not None and i.request_id == "asks")
    for sample in output.outputs:
        mine = [i for i in seen if (i.request_id, i.sample_index) == ("asks", sample.index)]
        joined = [entry for i in mine for entry in i.logprobs or ()]
        assert joined == sample.logprobs
        assert [next(iter(entry)) for entry in joined] == sample.token_ids


def test_a_failed_step_loses_and_doubles_nothing(
    model: PreTrainedModel, target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, "ngram", "sampled_match", K, **SIZES, max_steps_in_flight=2)
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, prompt_logprobs=1)
    for name, prompt in enumerate(random_prompts([40, 5])):
        engine.add_request(str(name), prompt, params)
    execute, outputs, num_steps, fails = engine.runner.execute_model, {}, 0, [2, 5]

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        handle = execute(*args, **kwargs)
        if num_steps in fails:
            fails.remove(num_steps)
            raise RuntimeError("lost")
        return handle

    monkeypatch.setattr(engine.runner, "execute_model", failing)
    while engine.has_requests:
        try:
            increments = engine.step()
        except RuntimeError:
            continue
        outputs |= {i.request_id: i.output for i in increments if i.output is not None}
    assert not fails
    assert len(outputs) == 2
    for output in outputs.values():
        check_output(model, output, params, processed=False)


def test_nobody_asks_nothing_is_read(target: LoadedTarget) -> None:
    engine = Engine(target, "ngram", "sampled_match", K, **SIZES)
    logprobs = engine.runner.sampler.logprobs
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    run_schedule(engine, [Arrival(0, [1, 2, 3], params, None)])
    before = engine.runner.outputs.logprobs.clone()
    engine.add_request("silent", [1, 2, 3], SamplingParams(max_tokens=4))
    while engine.has_requests:
        engine.step()
        assert logprobs.places(torch.arange(5).int().numpy()) is None
    assert torch.equal(engine.runner.outputs.logprobs, before)


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_the_cap_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value} is not allowed.*0, {MAX_LOGPROBS}"):
        SamplingParams(**{name: value})


def test_an_unknown_mode_is_refused(target: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match="logprobs_mode='logits' is not allowed"):
        Engine(target, logprobs_mode="logits", **SIZES)
