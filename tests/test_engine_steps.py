"""What the engine makes of a step's outcome: outcomes are drawn at random, no model runs.

Runs that cannot hold an end are appended without the trim function; text is decoded only when
somebody reads it. Neither may show.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.async_output import StepOutput
from runner.input_batch import StepPlan
from runner.loader import LoadedTarget
from runner.states import NewRow
from specdec import Engine, SamplingParams
from specdec.ending import Detokenizer
from specdec.request import Request
from specdec.trace import StepTrace
from specdec.types import Increment, RequestOutput
from tests.models import byte_tokenizer, random_prompts, tiny_model, tiny_target

K = 3
PIECES = ["Once", " the", " lamp", " was", " lit"]
TOKENIZER = byte_tokenizer(PIECES)
EOS: int = TOKENIZER.eos_token_id
# Words, bytes of characters of two to four bytes (in any order), a lone letter, and EOS.
TOKENS = [*range(256, 261), *"\u00e9\u706f\U0001f642".encode(), ord("o"), EOS]


class CountingTokenizer:
    """Counts what it decodes."""

    eos_token_id = EOS

    def __init__(self) -> None:
        self.num_calls = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_calls += 1
        return str(TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens))


@dataclass
class Row:
    """What a device knows of a row."""

    total_len: int = 0
    max_total_len: int = 0
    budget: int = 0


class RandomRunner:
    """Draws the outcome of every step when it is enqueued, as a device would that is never late."""

    def __init__(self, seed: int, max_num_reqs: int, num_kv_blocks: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.state = SimpleNamespace(generation_np=np.zeros(max_num_reqs, dtype=np.int64))
        self.graphs = SimpleNamespace(launches=Counter())
        self.plans: list[StepPlan] = []
        self._rng = np.random.default_rng(seed)
        self._rows = [Row() for _ in range(max_num_reqs)]
        self._free = list(range(max_num_reqs))

    def add_request(self, new: NewRow, params: Any, seed: int, sample_index: int = 0) -> int:
        row = self._free.pop(0)
        self._rows[row] = Row(len(new.token_ids), new.max_total_len, new.draft_budget)
        self.state.generation_np[row] += 1
        return row

    def remove_request(self, row: int) -> None:
        self._free.append(row)

    def add_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        pass

    def execute_model(self, plan: StepPlan, timed: bool = False) -> Any:
        self.plans.append(plan)
        num_reqs = plan.num_reqs
        tokens = self._rng.choice(TOKENS, (num_reqs, K + 1), p=self._weights()).astype(np.int32)
        counts = np.zeros((4, num_reqs), dtype=np.int32)
        for place, index in enumerate(plan.rows_np.tolist()):
            counts[:, place] = self._draw(plan, place, self._rows[index])
        output = StepOutput(tokens, *counts)
        timer = SimpleNamespace(
            phases_ms=lambda: dict.fromkeys(("inputs", "target", "verify", "draft"), 0.0),
            total_ms=lambda: 0.0,
        )
        return SimpleNamespace(
            plan=plan,
            output=SimpleNamespace(wait=lambda: output),
            timer=timer if timed else None,
            generations=self.state.generation_np[plan.rows_np],
            num_computed_tokens=plan.num_tokens,
        )

    def _weights(self) -> list[float]:
        rare = 0.01  # EOS
        return [(1 - rare) / (len(TOKENS) - 1)] * (len(TOKENS) - 1) + [rare]

    def _draw(self, plan: StepPlan, place: int, row: Row) -> tuple[int, int, int, int]:
        """Return num_sampled, num_rejected, num_judged, num_drafts of a place."""
        query_len, room = int(plan.query_lens_np[place]), row.max_total_len - row.total_len
        num_judged, num_rejected = 0, 0
        num_sampled = int(not plan.is_prefill_np[place] or plan.is_last_chunk_np[place])
        if not plan.is_prefill_np[place]:
            num_judged = int(self._rng.integers(0, min(query_len - 1, row.budget) + 1))
            num_sampled += int(self._rng.integers(0, num_judged + 1))
        num_sampled = min(num_sampled, room)
        if not plan.is_prefill_np[place]:
            num_rejected = query_len - num_sampled
        row.total_len += num_sampled
        return num_sampled, num_rejected, num_judged, int(self._rng.integers(0, row.budget + 1))


class RandomEngine(Engine):
    """An engine over drawn outcomes."""

    seed = 0

    def _make_runner(self, max_num_reqs: int, target: LoadedTarget) -> Any:
        return RandomRunner(self.seed, max_num_reqs, self.config.num_kv_blocks or 1)


def make_engine(seed: int, tokenizer: Any = TOKENIZER, **options: Any) -> Engine:
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=len(TOKENIZER),
        max_position_embeddings=4096,
        tensor_parallel=None,
        model=SimpleNamespace(generation_config=None),
    )
    sizes: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 96,
        "max_num_reqs": 4,
        "max_num_batched_tokens": 24,
        "num_kv_blocks": 40,
        "block_size": 4,
    }
    make = type("SeededEngine", (RandomEngine,), {"seed": seed})
    target = LoadedTarget("random", model, tokenizer)
    return make(target, "ngram", "rejection", K, **{**sizes, **options})


@dataclass
class Life:
    """What came of a request."""

    increments: list[Increment] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # read with every step

    @property
    def output(self) -> RequestOutput:
        output = self.increments[-1].output
        assert output is not None
        return output


def draw_requests(seed: int) -> list[tuple[int, list[int], SamplingParams]]:
    """Draw requests: step of arrival, prompt and parameters."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(10):
        stops: list[int] = rng.choice(TOKENS, 1).tolist() if rng.random() < 0.3 else []
        strings = ["lamp", "o", "e l", "\u706f"]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 60)),
            ignore_eos=bool(rng.random() < 0.5),
            stop_token_ids=stops,
            stop=[str(s) for s in rng.choice(strings, 2)] if rng.random() < 0.3 else None,
            num_speculative_tokens=None if rng.random() < 0.6 else int(rng.integers(0, K + 1)),
        )
        prompt = rng.integers(0, 256, int(rng.integers(1, 50))).tolist()
        requests.append((i * int(rng.integers(0, 4)), prompt, params))
    return sorted(requests, key=lambda request: request[0])


def run(engine: Engine, seed: int, read_text: bool = False) -> dict[str, Life]:
    """Run drawn requests to their ends, aborting one of them on the way."""
    requests, lives, step = draw_requests(seed), {}, 0
    while step < 100 or engine.has_requests:
        for i, (arrival, prompt, params) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(i), prompt, params)
                lives[str(i)] = Life()
        if step == 12 and "3" in engine.unfinished_ids:
            engine.abort("3")
        for increment in engine.step():
            life = lives[increment.request_id]
            life.increments.append(increment)
            if read_text:
                life.texts.append(increment.new_text)
        step += 1
        assert step < 2000
    return lives


def facts(lives: dict[str, Life]) -> dict[str, Any]:
    """Return everything a caller can see of some requests."""
    return {
        name: (
            [(i.new_token_ids, i.new_text, i.finish_reason) for i in life.increments],
            life.output,
        )
        for name, life in lives.items()
    }


OPTIONS: list[dict[str, Any]] = [
    {"max_steps_in_flight": 1},
    {"max_steps_in_flight": 2},
    {"max_steps_in_flight": 2, "graph_scope": "step"},
    {"max_steps_in_flight": 3, "graph_scope": "draft", "num_kv_blocks": 26},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(8))
def test_runs_appended_at_once_are_what_trimming_each_of_them_gives(
    seed: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [StepTrace(), StepTrace()]
    lives = run(make_engine(seed, trace=traces[0], **options), seed)
    monkeypatch.setattr(Request, "trim_len", 0)  # now every run goes through the trim function
    trimmed = run(make_engine(seed, trace=traces[1], **options), seed)
    assert facts(lives) == facts(trimmed)
    assert traces[0].requests().equals(traces[1].requests())
    for name, life in lives.items():
        assert [t for i in life.increments for t in i.new_token_ids] == life.output.token_ids, name
        assert "".join(i.new_text for i in life.increments) == life.output.text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OPTIONS)
def test_statistics_are_sums_over_the_trace(seed: int, options: dict[str, Any]) -> None:
    trace = StepTrace()
    lives = run(make_engine(seed, trace=trace, **options), seed)
    steps: Any = trace.requests().query("is_verify").groupby("request_id")
    sums, sizes = steps.sum(numeric_only=True), steps.size()
    for name, life in lives.items():
        stats = life.output.stats
        if name not in sizes:
            assert stats.num_verify_steps == 0
            continue
        assert stats.num_verify_steps == sizes[name]
        assert stats.num_verify_tokens == sums.num_committed[name]
        assert stats.num_drafted == sums.num_drafted[name] == sum(stats.drafted_per_position)
        assert stats.num_accepted == sums.num_accepted[name] == sum(stats.accepted_per_position)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_text_is_the_same_whenever_it_is_read(seed: int, options: dict[str, Any]) -> None:
    streamed = run(make_engine(seed, **options), seed, read_text=True)
    late = run(make_engine(seed, **options), seed)
    for name, life in streamed.items():
        assert "".join(life.texts) == life.output.text == late[name].output.text
        # Read after the end, the last piece first, and read again.
        pieces = [i.new_text for i in reversed(late[name].increments)][::-1]
        assert pieces == life.texts == [i.new_text for i in life.increments]


def test_nothing_is_decoded_that_nobody_reads() -> None:
    calls = {}
    for stop in (None, "a string that never comes"):
        tokenizer = CountingTokenizer()
        engine = make_engine(0, tokenizer)
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=60, ignore_eos=True, stop=stop))
        while engine.has_requests:
            engine.step()
        calls[stop] = tokenizer.num_calls
    assert calls[None] <= 4, "the whole text at its end"
    assert calls["a string that never comes"] >= 60, "a stop string is looked for in every token"


def eager_pieces(runs: list[list[int]], stop: list[str]) -> list[str]:
    """Return the pieces of a text whose tokens are decoded and shown as they come."""
    hold = max((len(s) for s in stop), default=1) - 1
    token_ids: list[int] = []
    pieces, shown, text = [], 0, ""
    for run in runs:
        for token in run:
            token_ids.append(token)
            decoded = str(TOKENIZER.decode(token_ids, skip_special_tokens=True))
            if not decoded.endswith("\ufffd"):
                text = decoded
        end = max(shown, len(text) - hold)
        pieces.append(text[shown:end])
        shown = end
    whole = str(TOKENIZER.decode(token_ids, skip_special_tokens=True))
    return [*pieces, whole[shown:]]


@pytest.mark.parametrize("seed", range(60))
def test_piece_of_a_run_is_what_eager_decoding_would_have_shown(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Whole characters in order, so that every boundary falls inside one now and then.
    words = [TOKENIZER(c)["input_ids"] for c in ("o", "\u00e9", "\u706f", "\U0001f642")] + [[256]]
    story = [t for i in rng.integers(0, len(words), 12) for t in words[i]]
    cuts = sorted({0, len(story), *rng.integers(0, len(story), 6).tolist()})
    runs = [story[a:b] for a, b in itertools.pairwise(cuts)]
    stop = ["never there"] if seed % 2 else []
    expected = eager_pieces(runs, stop)

    def pieces(order: list[int], detokenizer: Detokenizer) -> list[str]:
        found = {n: detokenizer.piece(cuts[n], cuts[n + 1], final=False) for n in order}
        detokenizer.finish()
        last = detokenizer.piece(len(story), len(story), final=True)
        return [*(found[n] for n in sorted(found)), last]

    for order in (range(len(runs)), rng.permutation(len(runs))):
        detokenizer = Detokenizer(TOKENIZER, stop)
        for token in story:
            detokenizer.add(token)
        if seed % 3 == 0:
            assert detokenizer.text == TOKENIZER.decode(story)  # the whole text before any piece
        assert pieces([int(n) for n in order], detokenizer) == expected


# --- the shape of steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("scope", "uniform"), [("auto", False), ("none", False), ("draft", True), ("step", True)]
)
def test_decode_steps_of_a_captured_scope_are_uniform(
    scope: str, uniform: bool, steps_in_flight: int
) -> None:
    engine = make_engine(3, graph_scope=scope, max_steps_in_flight=steps_in_flight)
    assert engine.graph_scope == ("none" if scope == "auto" else scope)
    run(engine, 3)
    runner: Any = engine.runner
    lengths = {
        int(n) for p in runner.plans for n in p.query_lens_np[~p.is_prefill_np] if n != K + 1
    }
    assert (lengths == set()) == uniform


def test_batch_that_goes_on_hands_out_the_same_plan() -> None:
    engine = make_engine(
        0, graph_scope="step", max_steps_in_flight=2, num_kv_blocks=400, max_model_len=512
    )
    for name in "abc":
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        engine.add_request(name, [1, 2, 3], params)
    for _ in range(40):
        engine.step()
    runner: Any = engine.runner
    plans = runner.plans[2:]
    rows = {id(plan.rows_np) for plan in plans}
    assert len(rows) == 1, "the same arrays"
    assert 1 < len({id(plan) for plan in plans}) < 10, "a new plan only for new bounds"
    for plan in plans:
        assert plan.max_seq_len % 64 == plan.max_total_len % 64 == 0
        assert plan.max_total_len >= plan.max_seq_len


@pytest.mark.parametrize("drafter", ["none", "ngram", {"name": "draft_model", "model": "target"}])
def test_uniform_steps_give_the_same_greedy_text(drafter: Any) -> None:
    prompts = random_prompts((5, 20, 9))
    params = [
        SamplingParams(temperature=0, max_tokens=n, num_speculative_tokens=b)
        for n, b in ((20, None), (7, 0), (15, 2))
    ]
    texts = []
    for scope in ("none", "step"):
        engine = Engine(
            tiny_target(tiny_model()), drafter, "greedy", K, max_model_len=64, graph_scope=scope
        )
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, p)
        outputs = {}
        while engine.has_requests:
            for increment in engine.step():
                if increment.output is not None:
                    outputs[increment.request_id] = increment.output.token_ids
        texts.append(outputs)
    assert texts[0] == texts[1]
