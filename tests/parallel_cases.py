"""What the ranks of the parallel tests run: functions for `specdec.parallel.launch.launch`.

A rank leaves what it saw in `<folder>/<rank>.json`; the tests look at that.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runner.loader import LoadedTarget
from specdec import LLM, Engine, RequestOutput, SamplingParams
from specdec.errors import SpecdecError
from specdec.parallel.exchange import gather_bytes, share
from specdec.parallel.groups import ParallelConfig, _make_groups, init_groups
from specdec.parallel.rank_check import RankCheck
from specdec.parallel.replicas import DataParallelEngine
from tests.models import VOCAB_SIZE, byte_tokenizer, random_prompts, tiny_model, tiny_target
from tests.rank_loads import other_storage, unlike_targets

K = 3
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_reqs": 3}
PROMPTS = random_prompts((4, 9, 2, 17, 5, 30, 3))
TIMEOUT = timedelta(seconds=60)


def this_rank() -> int:
    """Return this process's rank."""
    return int(os.environ["RANK"])


def leave(folder: str, values: Any) -> None:
    """Write what this rank saw."""
    (Path(folder) / f"{this_rank()}.json").write_text(json.dumps(values))


def read(folder: Path) -> list[Any]:
    """Return what the ranks saw, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


# --- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A call of a schedule, made before a step."""

    step: int
    call: str  # "add", "abort" or "discard"
    name: str
    prompt: list[int]
    params: SamplingParams


def draw_events(seed: int) -> list[Event]:
    """Draw arrivals and aborts from a seed; requests have no seeds of their own."""
    rng = np.random.default_rng(seed)
    events, step = [], 0
    for i in range(int(rng.integers(1, 6))):
        step += int(rng.choice([0, 0, 1, 4]))
        params = SamplingParams(
            temperature=0.8 if rng.random() < 0.5 else 0.0,
            max_tokens=int(rng.integers(1, 12)),
            n=int(rng.choice([1, 1, 1, 2])),
            num_speculative_tokens=None if rng.random() < 0.7 else 0,
        )
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 20))).tolist()
        events.append(Event(step, "add", f"{seed}-{i}", prompt, params))
        if rng.random() < 0.3:
            call = "abort" if rng.random() < 0.7 else "discard"
            later = step + int(rng.integers(0, 6))
            events.append(Event(later, call, f"{seed}-{i}", prompt, params))
    return sorted(events, key=lambda event: event.step)


def play_events(
    engine: Engine | DataParallelEngine, events: list[Event], ends_early: bool
) -> dict[str, RequestOutput]:
    """Make the calls of a schedule and step to its end; returns the outputs by request.

    Args:
        engine: at rest.
        events: in the order of their steps.
        ends_early: make the calls that end requests, too.
    """
    outputs: dict[str, RequestOutput] = {}
    left, step = list(events), 0
    while left or engine.has_requests:
        while left and left[0].step <= step:
            event = left.pop(0)
            if event.call == "add":
                engine.add_request(event.name, event.prompt, event.params)
            elif ends_early and event.name in engine.unfinished_ids:
                getattr(engine, event.call)(event.name)
        for increment in engine.step():
            if increment.output is not None:
                outputs[increment.request_id] = increment.output
        step += 1
        assert step < 2000, "the schedule does not end"
    return outputs


def meet_in_every_step(engine: DataParallelEngine) -> list[int]:
    """Put a collective into every `execute_model`; returns a list that counts the steps."""
    runner, counts = engine.runner, [0]
    execute = runner.execute_model

    def execute_and_meet(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        met = torch.tensor([1, counts[0]], device=runner.device)
        dist.all_reduce(met, group=engine.groups.dp)
        size = engine.groups.world_size
        assert met.tolist() == [size, size * counts[0]], f"step {counts[0]} met another: {met}"
        return execute(*args, **kwargs)

    runner.execute_model = execute_and_meet
    return counts


def run_schedules(first: int, last: int, device: str = "cpu") -> dict[str, Any]:
    """Play schedules on replicas and, on the first rank, on one engine; returns what differs.

    Args:
        first, last: seeds of the schedules, `last` left out.
        device: "cpu", or "cuda": then each rank has its own GPU.
    """
    own_device = f"cuda:{this_rank()}" if device == "cuda" else device
    target = tiny_target(tiny_model().to(own_device))
    options = {**OPTIONS, "device": own_device, "num_kv_blocks": 5, "block_size": 8}
    pairs = []
    for every in (1, 2, 3):
        own = {**options, "device": device, "data_parallel_size": 2, "exchange_every": every}
        engine = DataParallelEngine(target, "ngram", "sampled_match", K, **own)
        reference = Engine(target, "ngram", "sampled_match", K, **options)
        pairs.append((engine, reference, meet_in_every_step(engine)))
    differences: list[str] = []
    told: list[Any] = []
    num_preemptions = num_aborted = 0
    for seed in range(first, last):
        engine, reference, _ = pairs[seed % 3]
        events = draw_events(seed)
        outputs = play_events(engine, events, ends_early=True)
        told.append([(n, [s.token_ids for s in o.outputs]) for n, o in outputs.items()])
        assert engine.loads == [0, 0], engine.loads
        num_preemptions += sum(o.stats.num_preemptions for o in outputs.values())
        if this_rank() == 0:
            expected = play_events(reference, events, ends_early=False)
            differences += _differences(expected, outputs, events)
        num_aborted += sum(o.outputs[0].finish_reason == "abort" for o in outputs.values())
    steps = [(engine.engine.num_steps, counts[0]) for engine, _, counts in pairs]
    return {
        "differences": differences,
        "told": told,
        "num_preemptions": num_preemptions,
        "num_aborted": num_aborted,
        "steps": steps,
    }


def _differences(
    expected: dict[str, RequestOutput], outputs: dict[str, RequestOutput], events: list[Event]
) -> list[str]:
    """Return how the replicas' outputs differ from those of one engine."""
    discarded = {event.name for event in events if event.call == "discard"}
    found = []
    for name, whole in expected.items():
        if name not in outputs:
            if name not in discarded:
                found.append(f"{name}: no output")
            continue
        for sample, other in zip(outputs[name].outputs, whole.outputs, strict=True):
            upto = len(sample.token_ids) if sample.finish_reason == "abort" else None
            if sample.token_ids != other.token_ids[:upto] or outputs[name].seed != whole.seed:
                found.append(f"{name}: {sample.token_ids} is not {other.token_ids}")
    return found


def many_schedules(folder: str, num_schedules: int, limit_s: int, device: str = "cpu") -> None:
    """Play many schedules, inside a hard limit of time."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    leave(folder, run_schedules(0, num_schedules, device))
    faulthandler.cancel_dump_traceback_later()


# --- the quick tests, in one pair of processes ----------------------------------------------------


def quick_checks(folder: str) -> None:
    """Run everything that takes moments, and leave what came of it."""
    faulthandler.dump_traceback_later(120, exit=True)
    found = {
        "generate": _generate(),
        "texts": _texts(),
        "exchange": _exchange(),
        "rank_check": _rank_check(),
        "groups": _groups(),
        "schedules": run_schedules(1000, 1006),
        "options": _refused(_different_options),
        "verifiers": _refused(_different_verifiers),
        "loaded": {
            "equal": _refused(_replicas),
            "storage": _refused(lambda: _replicas(other_storage())),
            **{name: _refused(load) for name, load in unlike_targets(_replicas).items()},
        },
        "failure": _refused(_failing_step),
        "calls": _refused(_different_calls),
    }
    leave(folder, found)
    faulthandler.cancel_dump_traceback_later()


def _generate() -> dict[str, Any]:
    """Compare `LLM.generate` of one engine and of two replicas, unseeded, greedy and sampled."""
    target, found = tiny_target(tiny_model()), {}
    for verifier, temperature in (("greedy", 0.0), ("sampled_match", 0.9)):
        params = [
            SamplingParams(temperature=temperature, max_tokens=2 + 3 * i, logprobs=i % 3 or None)
            for i in range(len(PROMPTS))
        ]
        one = LLM(target, "ngram", verifier, K, **OPTIONS)
        two = LLM(target, "ngram", verifier, K, data_parallel_size=2, **OPTIONS)
        expected, outputs = one.generate(PROMPTS, params), two.generate(PROMPTS, params)
        found[verifier] = {
            "tokens": [output.token_ids for output in outputs],
            "expected": [output.token_ids for output in expected],
            "seeds_equal": [o.seed for o in outputs] == [o.seed for o in expected],
            # Of a near tie the sampled log-probabilities are those of another batch shape.
            "has_logprobs": [o.logprobs is not None for o in outputs],
            "num_own_steps": two.engine.engine.num_steps,
        }
    return found


def _texts() -> dict[str, Any]:
    """Compare texts, pieces of texts, stop strings and samples, with a tokenizer."""
    tokenizer = byte_tokenizer()
    target = tiny_target(tiny_model(vocab_size=len(tokenizer)), tokenizer)
    one = LLM(target, "ngram", "sampled_match", K, **OPTIONS)
    whole = one.generate(["a lamp"], SamplingParams(max_tokens=30, ignore_eos=True, seed=3))[0]
    stop = next(c for c in whole.text if c.isascii() and c.isprintable())
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=3),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=3, stop=stop),
        SamplingParams(max_tokens=9, seed=4, n=3),
        SamplingParams(max_tokens=30, seed=3, stop_token_ids=[whole.token_ids[4]]),
        SamplingParams(max_tokens=5, prompt_logprobs=2, logprobs=0, seed=1),
    ]
    prompts = ["a lamp"] * len(params)
    two = LLM(target, "ngram", "sampled_match", K, data_parallel_size=2, **OPTIONS)
    pieces: dict[str, str] = {}

    def collect(increment: Any) -> None:
        name = f"{increment.request_id}/{increment.sample_index}"
        pieces[name] = pieces.get(name, "") + increment.new_text

    outputs, expected = two.generate(prompts, params, None, collect), one.generate(prompts, params)
    texts = {f"{o.request_id}/{s.index}": s.text for o in outputs for s in o.outputs}
    for output, other in zip(outputs, expected, strict=True):
        output.request_id = other.request_id  # `one` had a request before
        _round_logprobs(output), _round_logprobs(other)
    return {
        "equal": [a == b for a, b in zip(outputs, expected, strict=True)],
        "pieces_equal": pieces == texts,
        "num_texts": len(texts),
        "stopped": outputs[1].outputs[0].stop_reason == stop,
    }


def _round_logprobs(output: RequestOutput) -> None:
    """Round log-probabilities: their last digits depend on the shape of the batch."""
    for places in (output.prompt_logprobs, *(s.logprobs for s in output.outputs)):
        for place in places or ():
            for token_id, named in (place or {}).items():
                assert place is not None
                place[token_id] = named._replace(logprob=round(named.logprob, 1))


def _exchange() -> dict[str, Any]:
    groups = init_groups(ParallelConfig(2))
    assert groups.control is not None
    rank, lengths = groups.rank, [(0, 5), (8184, 8185), (100_000, 3), (8184, 8184)]
    sound = []
    for pair in lengths:
        messages = [bytes([i + 1]) * n for i, n in enumerate(pair)]
        sound.append(gather_bytes(groups.control, messages[rank]) == messages)
    return {"sound": sound, "shared": share(groups.control, {"from": rank, "t": 0.1 + rank})}


def _rank_check() -> dict[str, Any]:
    """Plant a disagreement of one token in step 6, and another of drafts in step 12."""
    groups = init_groups(ParallelConfig(2))
    check, told = RankCheck(groups.control, 4), []
    for step in range(1, 17):
        tokens, drafts = np.arange(5) * step, np.full((2, 3), step)
        if groups.rank == 1:
            tokens[3] += step == 6
            drafts[1, 2] -= step == 12
        check.add("tokens", tokens)
        check.add("drafts", drafts[:, ::2])
        try:
            check.compare(step)
        except SpecdecError as error:
            told.append([step, str(error)])
            check = RankCheck(groups.control, 4)
    return {"told": told}


def _groups() -> dict[str, Any]:
    """Return who meets whom, as two replicas and as one replica of two ranks."""
    found = {}
    for name, sizes in (("dp", (2, 1)), ("tp", (1, 2))):
        groups = init_groups(ParallelConfig(2))
        if name == "tp":
            groups = _make_groups(ParallelConfig(*sizes), groups.local_rank, TIMEOUT)
        met = torch.tensor([1 + groups.rank])
        dist.all_reduce(met, group=groups.tp if name == "tp" else groups.dp)
        alone = groups.dp is None if name == "tp" else groups.tp is None
        found[name] = [groups.dp_rank, groups.tp_rank, int(met), alone]
    return found


def _refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except SpecdecError as error:
        return str(error)
    return "nothing was refused"


def _different_options() -> None:
    own = {**OPTIONS, "data_parallel_size": 2, "max_num_batched_tokens": 64 + this_rank()}
    DataParallelEngine(tiny_target(tiny_model()), "none", **own)


def _different_verifiers() -> None:
    """Give a verifier's parameter another value on each rank."""
    verifier = {"name": "typical", "epsilon": 0.1 + 0.2 * this_rank()}
    own = {**OPTIONS, "data_parallel_size": 2}
    DataParallelEngine(tiny_target(tiny_model()), "ngram", verifier, K, **own)


def _replicas(target: LoadedTarget | None = None) -> DataParallelEngine:
    own = {**OPTIONS, "data_parallel_size": 2}
    target = target or tiny_target(tiny_model())
    return DataParallelEngine(target, "ngram", "greedy", K, **own)


def _different_calls() -> None:
    engine = _replicas()
    params = SamplingParams(temperature=0, max_tokens=4)
    for i in range(1 + this_rank()):
        engine.add_request(str(i), [1, 2, 3 + i], params)
    while engine.has_requests:
        engine.step()


def _failing_step() -> None:
    """Let the second rank's third step fail, and its caller catch that."""
    engine = _replicas()
    for i in range(2):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    engine.step()
    if this_rank() == 1:
        engine.engine.runner.execute_model = _fail
    try:
        engine.step()
    except ZeroDivisionError:
        engine.step()  # refused: the others have gone


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


# --- ranks that die -------------------------------------------------------------------------------


def die_in_generate(folder: str, how: str) -> None:
    """Generate, and let the second rank die or raise in the middle; keep what was finished."""
    (Path(folder) / f"pid{this_rank()}").write_text(str(os.getpid()))
    finished = Path(folder) / f"finished{this_rank()}"
    llm = LLM(tiny_target(tiny_model()), "ngram", "greedy", K, data_parallel_size=2, **OPTIONS)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 60, 60, 60)]

    def note(increment: Any) -> None:
        if increment.output is None:
            return
        with finished.open("a") as file:
            file.write(f"{increment.output.token_ids}\n")
        if this_rank() == 1:
            (Path(folder) / "died_at").write_text(str(time.time()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")

    llm.generate(PROMPTS[:4], params, on_increment=note)


def end_before_joining(folder: str, how: str) -> None:
    """Let the second rank end while the first one waits for it to join."""
    (Path(folder) / f"pid{this_rank()}").write_text(str(os.getpid()))
    if this_rank() == 1:
        (Path(folder) / "died_at").write_text(str(time.time()))
        if how == "exit":
            sys.exit(0)
        elif how == "exit at once":
            os._exit(0)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    init_groups(ParallelConfig(2, timeout_s=60))


def end_one_by_one(joins: bool) -> None:
    """Meet the other rank, or do not, and let the first one work on once the second has ended."""
    if joins:
        share(init_groups(ParallelConfig(2)).control, 0)
    if this_rank() == 0:
        time.sleep(3)  # several looks of the launcher, which must find nothing wrong


def wait_for_ever(folder: str) -> None:
    """Meet the other rank once, then wait for what never comes."""
    groups = init_groups(ParallelConfig(2))
    share(groups.control, 0)
    path = Path(folder) / f"pid{this_rank()}"
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    if this_rank() == 0:
        share(groups.control, 0)
    signal.pause()


def save_when_interrupted(folder: str) -> None:
    """Wait for an interrupt, and write slowly that it came."""
    path = Path(folder) / f"pid{this_rank()}"
    try:
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
        while True:
            time.sleep(0.1)
    finally:
        time.sleep(1)
        (Path(folder) / f"saved{this_rank()}").touch()
