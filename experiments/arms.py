"""Arms: a drafter and its draft length on a target that all share; how questions are played."""

import dataclasses
import json
import logging
import math
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.context import ladder
from experiments.prompts import (
    Question,
    builtin_questions,
    load_questions,
    select_questions,
)
from experiments.ranks import gather_trace
from experiments.schemas import Plugin, PromptsConfig, RunConfig, load_plugin
from experiments.workload import Latency, Pace
from runner.loader import LoadedTarget
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError
from specdec.log import warn_once
from specdec.parallel.replicas import DataParallelEngine
from specdec.trace import StepTrace
from specdec.types import RequestOutput, RequestStats, SamplingParams

logger = logging.getLogger(__name__)

# Neutral, and in no question file: a drafter that learns from what it sees must not learn from it.
_WARMUP_PROMPT = "Name the days of the week."
_LABEL_VALUE_CHARS = 24  # of a parameter in an arm's name


@dataclass(frozen=True)
class ArmSpec:
    """What tells an arm from the others."""

    name: str
    drafter: Plugin
    k: int
    draft_length: Plugin
    phase_events: bool = False  # see `specdec.config.EngineConfig`

    @property
    def is_recorder(self) -> bool:
        """Return whether the drafter keeps what it is given; see `drafters.base.DrafterConfig`."""
        return getattr(self.drafter.config, "is_recorder", False) is True


@dataclass(frozen=True)
class Turn:
    """One answered turn of a question."""

    question_id: str
    category: str
    turn: int  # from 1
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    seed: int
    stats: RequestStats

    @property
    def request_id(self) -> str:
        """Return the id under which the turn is traced: the same in every arm."""
        return request_id(self.question_id, self.turn)


@dataclass
class Played:
    """What playing a group of questions gave."""

    turns: list[Turn] = field(default_factory=list)
    num_skipped: int = 0  # turns that did not fit, and the later turns of their questions
    wall_s: float = 0.0
    latencies: list[Latency] = field(default_factory=list)  # one a turn


@dataclass
class Arm:
    """An arm while it is timed."""

    spec: ArmSpec
    engine: Engine | DataParallelEngine
    trace: StepTrace
    turns: list[Turn] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    latencies: list[dict[str, Any]] = field(default_factory=list)
    num_skipped: int = 0
    gathered: list[tuple[pd.DataFrame, pd.DataFrame]] = field(default_factory=list)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes reserved for KV, the drafter's included."""
        return sum(kv.num_bytes for kv in self.engine.runner.kv_caches)

    @property
    def launching(self) -> dict[str, Any]:
        """Return how the timed steps were launched, what they drafted, and what capturing took.

        `launches` counts parts of steps by name, and "<part> eager: <reason>" for those that no
        graph held (`runner.cuda_graphs`).
        """
        runner = self.engine.runner
        return {
            "device": runner.device.type,
            "graph_scope": runner.config.graph_scope,
            "phase_events": runner.config.phase_events,
            "launches": dict(runner.graphs.launches),
            "capture": dataclasses.asdict(runner.graphs.cost),
            "draft_length": self.engine.draft_length.report(),
        }

    @property
    def accepted_length(self) -> float:
        """Return committed tokens per verification step so far, bonus included."""
        steps = sum(t.stats.num_verify_steps for t in self.turns)
        return sum(t.stats.num_verify_tokens for t in self.turns) / steps if steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Return new tokens per second of wall time so far."""
        wall_s = sum(t["wall_s"] for t in self.timings)
        return sum(t["num_tokens"] for t in self.timings) / wall_s if wall_s else 0.0

    def add(self, played: Played, group: int) -> None:
        """Take up the outcome of a group of questions."""
        self.turns += played.turns
        self.num_skipped += played.num_skipped
        if not played.turns:
            return
        arm = {"arm": self.spec.name, "k": self.spec.k, "group": group}
        self.latencies += [arm | vars(latency) for latency in played.latencies]
        categories = {turn.category for turn in played.turns}
        self.timings.append(
            {
                **arm,
                # None belongs to no category, whatever theirs are called.
                "category": categories.pop() if len(categories) == 1 else None,
                "num_prompts": len({turn.question_id for turn in played.turns}),
                "num_tokens": sum(len(turn.token_ids) for turn in played.turns),
                "wall_s": played.wall_s,
            }
        )

    def gather(self) -> None:
        """Bring together what all replicas traced, where there are several."""
        if isinstance(self.engine, DataParallelEngine):
            self.gathered.append(gather_trace(self.engine.groups, self.trace))
            self.trace = self.engine.trace = StepTrace()

    def requests(self) -> pd.DataFrame:
        """Return the trace per request and step, with arm, k and turn; of answered turns alone."""
        frame = _behind([rows for rows, _ in self.gathered], self.trace.requests())
        frame = frame[frame["request_id"].isin([turn.request_id for turn in self.turns])]
        turn = [int(name.rpartition("/")[2]) for name in frame["request_id"]]
        return frame.assign(arm=self.spec.name, k=self.spec.k, turn=turn)

    def steps(self) -> pd.DataFrame:
        """Return the trace per step, with the arm."""
        rows = _behind([steps for _, steps in self.gathered], self.trace.steps())
        return rows.assign(arm=self.spec.name)


def _behind(gathered: list[pd.DataFrame], last: pd.DataFrame) -> pd.DataFrame:
    """Return rows behind those that were gathered before."""
    frames = [frame for frame in [*gathered, last] if len(frame)]
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else (frames or [last])[0]


def request_id(question_id: str, turn: int) -> str:
    """Name a turn of a question."""
    return f"{question_id}/{turn}"


def request_seed(config: RunConfig, name: str) -> int:
    """Return a request's noise seed: a function of the run's seed and the request's name alone."""
    if config.sampling.seed is not None:
        return config.sampling.seed
    return config.seed * 1_000_003 + zlib.crc32(name.encode())


def plan_arms(config: RunConfig) -> list[ArmSpec]:
    """Return the arms of a run, the autoregressive one first, each with a name of its own."""
    fixed = load_plugin("draft_length", "fixed", "draft_length")
    usual = bool(config.engine.phase_events)
    chosen = [(load_plugin("drafter", "none", "drafter"), 0, fixed, usual)]
    wanted = [(config.drafter, config.num_speculative_tokens, config.draft_length, usual)]
    for item in config.compare:
        k, length = item.num_speculative_tokens, item.draft_length or config.draft_length
        events = usual if item.phase_events is None else item.phase_events
        k = config.num_speculative_tokens if k is None else k
        wanted.append((item.drafter, k, length, events))
    for drafter, k, length, events in wanted:
        arm = (drafter, 0, fixed, events) if drafter.never_drafts else (drafter, k, length, events)
        if arm not in chosen:
            chosen.append(arm)
        elif not drafter.never_drafts:
            warn_once(logger, f"the arm {drafter.entry.name} K={k} is given twice; it runs once")
    bases = [
        _base_name(*arm[:3]) + ("" if arm[3] == usual else " events" if arm[3] else " no events")
        for arm in chosen
    ]
    used: Counter[str] = Counter()
    specs: list[ArmSpec] = []
    for i, (drafter, k, length, events) in enumerate(chosen):
        rivals = [chosen[j] for j in range(len(chosen)) if bases[j] == bases[i]]
        name = bases[i] + _difference(drafter, [rival[0] for rival in rivals])
        name += _difference(length, [rival[2] for rival in rivals])
        used[name] += 1
        unique = name if used[name] == 1 else f"{name} #{used[name]}"
        specs.append(ArmSpec(unique, drafter, k, length, events))
    return specs


def advise_on_sampling(specs: Sequence[ArmSpec], config: RunConfig) -> str | None:
    """Return where drafts that are drawn would be kept more often, None where all is well."""
    rule = config.verifier.entry
    temperature = config.sampling.temperature
    if temperature <= 0 or not getattr(rule.cls, "favours_drawn", False):
        return None
    names = [spec.name for spec in specs if spec.drafter.spec.get("sampling") == "argmax"]
    if not names:
        return None
    return (
        f"{', '.join(names)}: drafts are the likeliest tokens (sampling=argmax); at temperature "
        f"{temperature:g} {rule.name} keeps more of drawn ones: drafter.sampling=gumbel "
        "(docs/verifiers.md)"
    )


def _base_name(drafter: Plugin, k: int, draft_length: Plugin) -> str:
    if drafter.never_drafts:
        return drafter.entry.name
    policy = draft_length.entry.name
    return f"{drafter.entry.name} K={k}" + ("" if policy == "fixed" else f" {policy}")


def _difference(plugin: Plugin, rivals: Sequence[Plugin]) -> str:
    """Return the parameters in which a plug-in differs from those of arms named alike."""
    text = ""
    for key, value in plugin.spec.items():
        if any(rival.spec[key] != value for rival in rivals):
            shown = Path(value).name if isinstance(value, str) else str(value)
            if len(shown) <= _LABEL_VALUE_CHARS:
                text += f" {key}={shown}"
    return text


def choose_questions(config: PromptsConfig) -> list[Question]:
    """Return the questions that a configuration asks for.

    Raises:
        ConfigError: the file, a category or an id cannot be used.
    """
    questions = builtin_questions() if config.path is None else load_questions(config.path)
    try:
        chosen = select_questions(questions, config.per_category, config.limit, config.categories)
    except ConfigError as error:
        raise ConfigError(f"prompts.{error}") from error
    seen: set[str] = set()
    for question in chosen:
        if str(question.question_id) in seen:
            raise ConfigError(
                f"question_id {question.question_id!r} stands for two questions once as a number "
                "and once as a text; give every question an id of its own"
            )
        seen.add(str(question.question_id))
    if config.context_lengths:
        return ladder(chosen, config.context_lengths, config.random_tokens)
    return chosen


def build_engine(
    spec: ArmSpec, config: RunConfig, target: LoadedTarget, trace: StepTrace | None = None
) -> Engine | DataParallelEngine:
    """Build an arm's engine on a target that is already loaded."""
    several = config.engine.data_parallel_size > 1
    return (DataParallelEngine if several else Engine)(
        target,
        spec.drafter.spec,
        config.verifier.spec,
        spec.k,
        config=dataclasses.replace(config.engine, phase_events=spec.phase_events),
        trace=trace,
        draft_length=spec.draft_length.spec,
    )


def build_arm(spec: ArmSpec, config: RunConfig, target: LoadedTarget) -> Arm:
    """Build an arm and run its untimed warm-up, which leaves no trace and counts no launch.

    A recorder has none: it would record it.
    """
    trace = StepTrace()
    arm = Arm(spec, build_engine(spec, config, target), trace)
    if config.warmup_tokens and not spec.is_recorder:
        params = dataclasses.replace(
            config.sampling.params(seed=config.seed, max_tokens=config.warmup_tokens),
            ignore_eos=True,
        )
        token_ids = encode(arm.engine, [{"role": "user", "content": _WARMUP_PROMPT}])
        token_ids = token_ids[: config.engine.max_model_len - 1]
        for i in range(config.batch_size):
            arm.engine.add_request(f"warm-up {i}", token_ids, params)
        while arm.engine.has_requests:
            arm.engine.step()
    arm.engine.trace = trace
    arm.engine.runner.graphs.launches.clear()
    arm.engine.draft_length.counts.clear()
    return arm


def groups_of(questions: Sequence[Question], batch_size: int) -> list[list[Question]]:
    """Cut questions into groups that run together."""
    return [list(questions[i : i + batch_size]) for i in range(0, len(questions), batch_size)]


def encode(
    engine: Engine | DataParallelEngine | LoadedTarget, messages: Sequence[dict[str, str]]
) -> list[int]:
    """Return a conversation's tokens, ready for the next answer."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "a loaded target brings its tokenizer"
    if not getattr(tokenizer, "chat_template", None):
        warn_once(logger, "the target has no chat template; turns are joined by blank lines")
        text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        return list(tokenizer(text)["input_ids"])
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _Conversation:
    """A question while it is played: its own answers become its history."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.messages: list[dict[str, str]] = []
        self.turn = 0
        # Of the turn, in seconds after the start: its arrival, its admission, its first token.
        self.arrival_s = self.admitted_s = self.first_s = 0.0

    def ask(self) -> list[dict[str, str]] | None:
        """Move to the next turn and return the conversation up to it; None after the last."""
        if self.turn == len(self.question.turns):
            return None
        self.messages.append({"role": "user", "content": self.question.turns[self.turn]})
        self.turn += 1
        return self.messages

    def answer(self, output: RequestOutput) -> Turn:
        """Take an answer into the history and return it."""
        self.messages.append({"role": "assistant", "content": output.text})
        return Turn(
            question_id=str(self.question.question_id),
            category=self.question.category,
            turn=self.turn,
            prompt_token_ids=output.prompt_token_ids,
            token_ids=output.token_ids,
            text=output.text,
            finish_reason=output.finish_reason,
            seed=output.seed,
            stats=output.stats,
        )

    def latency(self, turn: Turn, now_s: float) -> Latency:
        """Return what the user waited for a turn whose last token has just come."""
        return Latency(
            request_id=turn.request_id,
            turn=turn.turn,
            category=turn.category,
            arrival_s=self.arrival_s,
            queue_s=self.admitted_s - self.arrival_s,
            ttft_s=self.first_s - self.arrival_s,
            e2e_s=now_s - self.arrival_s,
            num_prompt_tokens=len(turn.prompt_token_ids),
            num_tokens=len(turn.token_ids),
            finish_reason=turn.finish_reason or "",
            random_tokens=self.question.random_tokens,
        )


def play(
    engine: Engine | DataParallelEngine,
    questions: Iterable[Question],
    make_params: Callable[[str], SamplingParams],
    pace: Pace | None = None,
) -> Played:
    """Run questions to their ends, each turn as soon as the one before is answered.

    A turn that does not fit is told and skipped, with the later turns of its question.

    Args:
        engine: idle.
        questions: their ids, as texts, differ.
        make_params: gives a request's sampling parameters from its name.
        pace: when each question arrives, and how many run together; None starts all at once.
    """
    played = Played()
    running: dict[str, _Conversation] = {}
    silent: set[str] = set()  # of them, those without a token
    conversations = [_Conversation(question) for question in questions]
    arrivals = [0.0] * len(conversations) if pace is None else pace.arrivals
    waiting = deque(zip(arrivals, conversations, strict=True))
    limit = len(conversations) if pace is None else pace.most_running
    started = time.perf_counter()

    def advance(conversation: _Conversation, arrival_s: float) -> None:
        messages = conversation.ask()
        if messages is None:
            return
        question = conversation.question
        name = request_id(str(question.question_id), conversation.turn)
        conversation.arrival_s, conversation.first_s = arrival_s, math.nan
        try:
            token_ids = _prompt(engine, question, messages)
            engine.add_request(name, token_ids, make_params(name), question.category)
        except CapacityError as error:
            played.num_skipped += len(question.turns) - conversation.turn + 1
            warn_once(
                logger,
                f"question {question.question_id!r} turn {conversation.turn} is skipped: {error}",
            )
            return
        conversation.admitted_s = time.perf_counter() - started
        running[name] = conversation
        silent.add(name)

    while waiting or engine.has_requests:
        now_s = time.perf_counter() - started
        if waiting:
            now_s = engine.share(now_s)  # all ranks have to see a question arrive at once
        while waiting and waiting[0][0] <= now_s and len(running) < limit:
            arrival_s, conversation = waiting.popleft()
            advance(conversation, arrival_s)
        if not engine.has_requests:
            if waiting:
                time.sleep(max(0.0, waiting[0][0] - now_s))
            continue
        increments = engine.step()
        now_s = time.perf_counter() - started
        for increment in increments:
            name = increment.request_id
            if silent and name in silent and increment.new_token_ids:
                silent.remove(name)
                running[name].first_s = now_s
            if increment.output is not None:
                silent.discard(name)
                conversation = running.pop(name)
                turn = conversation.answer(increment.output)
                played.turns.append(turn)
                played.latencies.append(conversation.latency(turn, now_s))
                advance(conversation, now_s)
    played.wall_s = time.perf_counter() - started
    return played


def _prompt(
    engine: Engine | DataParallelEngine, question: Question, messages: Sequence[dict[str, str]]
) -> list[int]:
    """Return the tokens of a conversation up to its next answer.

    Raises:
        CapacityError: they do not fit.
    """
    token_ids = question.token_ids
    token_ids = encode(engine, messages) if token_ids is None else list(token_ids)
    limit = engine.config.max_model_len - 1
    if len(token_ids) > limit:
        raise CapacityError(
            f"{len(token_ids)} tokens, at most {limit} fit with "
            f"max_model_len={engine.config.max_model_len}"
        )
    return token_ids


def turn_line(arm: ArmSpec, turn: Turn) -> str:
    """Return a turn as one line of JSON."""
    values = dataclasses.asdict(turn)
    return json.dumps({"arm": arm.name, "k": arm.k, "request_id": turn.request_id, **values})
