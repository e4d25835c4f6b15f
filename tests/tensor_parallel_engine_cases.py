"""What the ranks of the tests of tensor parallelism run: functions for `launch`.

A rank leaves what it saw in `<folder>/<rank>.json`; the tests look at that.
"""

import dataclasses
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import runner.capture
import runner.memory
from drafters.base import DrafterBase, DrafterConfig
from runner.loader import LoadedTarget
from specdec import LLM, Engine, SamplingParams
from specdec.errors import SpecdecError
from specdec.parallel.replicas import DataParallelEngine
from specdec.protocols import DrafterCapabilities, HostRow
from specdec.registry import register_drafter
from specdec.step_times import StepClock
from tests.drafter_folders import save_drafters
from tests.head_cases import HeadCase, HeadFiles
from tests.models import VOCAB_SIZE, random_prompts, tiny_model, tiny_target
from tests.parallel_cases import draw_events, leave, play_events, this_rank
from tests.rank_loads import unlike_loads
from tests.schedules import Arrival, draw_schedule, run_schedule

K = 3
# Of eighteen blocks there are too few for all rows: running requests are preempted.
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 18,
}
TWO: dict[str, Any] = {**SIZES, "tensor_parallel_size": 2, "check_ranks_every": 1}
QUICK = ("none", "eagle3", "mixed, host")
PROMPTS = random_prompts((4, 9, 2, 17, 5))
EAGLE3 = {
    "eagle3": HeadCase("eagle3", "SpecForge", (2, 1, 0)),
    "eagle3, part of the vocabulary": HeadCase("eagle3", "speculators", (1, 0, 2), 13),
}


def whole_target(device: str = "cpu") -> LoadedTarget:
    """Return a target that no rank has cut down.

    Args:
        device: "cpu", or "cuda": then it is on this rank's GPU.
    """
    own: Any = f"cuda:{this_rank()}" if device == "cuda" else device
    return tiny_target(tiny_model().to(own))


def save_models(folder: Path) -> dict[str, Any]:
    """Save what drafters load, and return what selects each of them.

    Transformers saves on the first rank alone, once ranks know one another; so this comes before.

    Args:
        folder: of this rank.
    """
    model: Any = tiny_model()
    draft = tiny_model(num_hidden_layers=1)
    draft.get_input_embeddings().weight.data.copy_(model.get_input_embeddings().weight.data)
    draft.save_pretrained(folder / "draft")
    cases = {"eagle": HeadCase("eagle", "EAGLE", fc_bias=True), **EAGLE3}
    heads = {
        name: {"name": case.method, "path": HeadFiles(case, model, folder / name).path}
        for name, case in cases.items()
    }
    of_target = {"name": "draft_model", "model": "target"}
    shallow = {"name": "layer_skip", "num_layers": 2}
    return {
        "none": "none",
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model, target": of_target,
        "draft_model": {"name": "draft_model", "model": str(folder / "draft")},
        **save_drafters(folder),
        **heads,
        "mixed": {"name": "mixed", "drafters": [{"name": "ngram"}, shallow]},
        "mixed, best": {
            "name": "mixed",
            "policy": "best",
            "drafters": [{"name": "ngram"}, heads["eagle3"]],
        },
        "mixed, host": {"name": "mixed", "drafters": [{"name": "suffix"}, of_target]},
        "record": {"name": "record", "folder": str(folder / "record")},
    }


def schedule_of(verifier: str, seed: int, num_requests: int) -> list[Arrival]:
    """Draw arrivals; those for the verifier "greedy" are greedy."""
    arrivals = draw_schedule(seed, num_requests, max_tokens=16)
    if verifier != "greedy":
        return arrivals
    return [
        dataclasses.replace(a, params=dataclasses.replace(a.params, temperature=0.0))
        for a in arrivals
    ]


def compare_drafters(
    saved: dict[str, Any],
    names: Sequence[str] | None,
    runs: Sequence[tuple[str, int]],
    num_requests: int,
) -> dict[str, Any]:
    """Play schedules on this rank's part of a target, and on a whole one.

    Args:
        saved: drafters.
        names: of those that play; None takes all, and the oracle of each schedule's texts.
        runs: verifier and seed of each schedule; seeds that are odd run the shapes of graphs, and
            two steps in flight where the drafter allows it.
        num_requests: of a schedule.

    Returns:
        What differs, how much was drafted, accepted and preempted, by drafter and verifier.
    """
    whole, part, found = whole_target(), whole_target(), {}
    for verifier, seed in runs:
        arrivals = schedule_of(verifier, seed, num_requests)
        unaborted = [dataclasses.replace(a, abort_after=None) for a in arrivals]
        plain = Engine(whole, "none", verifier, K, **{**SIZES, "num_kv_blocks": 200})
        expected = run_schedule(plain, unaborted).texts()
        texts = [a.prompt + expected[str(i)] for i, a in enumerate(arrivals)]
        drafters = saved | {
            "oracle": {"name": "oracle", "texts": texts, "rates": [0.9, 0.7]},
            "record": {**saved["record"], "folder": f"{saved['record']['folder']}{verifier}{seed}"},
        }
        for name in names or drafters:
            options = dict(TWO)
            if seed % 2:
                options |= {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]}
                if name not in ("suffix", "mixed, host"):
                    options["max_steps_in_flight"] = 2
            engine = Engine(part, drafters[name], verifier, K, **options)
            result = run_schedule(engine, arrivals)
            entry = found.setdefault(f"{name}, {verifier}", _new_entry())
            for key, output in result.outputs.items():
                is_whole = output.finish_reason != "abort"
                upto = None if is_whole else len(output.token_ids)
                if output.token_ids != expected[key][:upto]:
                    entry["differences"].append([seed, key, output.token_ids, expected[key]])
                entry["num_drafted"] += output.stats.num_drafted
                entry["num_accepted"] += output.stats.num_accepted
                entry["outputs"].append([output.token_ids, output.stats.accepted_per_position])
            entry["num_preemptions"] += result.num_preemptions
    return found


def _new_entry() -> dict[str, Any]:
    """Return what is told of a drafter under a verifier."""
    counts = dict.fromkeys(("num_drafted", "num_accepted", "num_preemptions"), 0)
    return {"differences": [], "outputs": [], **counts}


def all_drafters(folder: str, seeds: Sequence[int], limit_s: int) -> None:
    """Compare every drafter, inside a hard limit of time."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    saved = save_models(Path(folder) / f"rank{this_rank()}")
    runs = [(verifier, seed) for verifier in ("greedy", "sampled_match") for seed in seeds]
    leave(folder, compare_drafters(saved, None, runs, 9))
    faulthandler.cancel_dump_traceback_later()


# --- the quick tests, in one pair of processes ----------------------------------------------------


def quick_checks(folder: str) -> None:
    """Run everything that takes moments, and leave what came of it."""
    faulthandler.dump_traceback_later(120, exit=True)
    saved = save_models(Path(folder) / f"rank{this_rank()}")
    found = {
        "drafters": compare_drafters(saved, QUICK, [("sampled_match", 1)], 5)
        | compare_drafters(saved, ("eagle3",), [("greedy", 2)], 5),
        "generate": _generate(),
        "target": _target(),
        "blocks": _blocks(),
        "clock": _clock(),
        "host": _host_drafts(),
        "shared": _engine().share({"from": this_rank()}),
        "planted": {kind: _planted(plant) for kind, plant in PLANTS.items()},
        "options": _refused(lambda: _engine(max_num_batched_tokens=24 + this_rank())),
        "verifiers": _refused(
            lambda: _engine(verifier={"name": "typical", "epsilon": 0.1 + 0.2 * this_rank()})
        ),
        "packed": _refused(_packed),
        "captured": _captured(),
        "failed": _failed(),
        "ended": _ended(),
        "loaded": {
            "equal": _refused(_engine),
            **{name: _refused(load) for name, load in unlike_loads(_engine, saved).items()},
        },
    }
    leave(folder, found)
    faulthandler.cancel_dump_traceback_later()


def _engine(drafter: Any = "ngram", verifier: Any = "greedy", **options: Any) -> Engine:
    draft_length = options.pop("draft_length", "fixed")
    target = options.pop("target", None) or whole_target()
    own = {**TWO, **options}
    return Engine(target, drafter, verifier, K, draft_length=draft_length, **own)


def _refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except SpecdecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _generate() -> dict[str, Any]:
    """Compare `LLM.generate` of two ranks and of one, unseeded."""
    params = [
        SamplingParams(temperature=0.9 * (i % 2), max_tokens=4 + i, n=1 + (i == 3))
        for i in range(len(PROMPTS))
    ]
    llms = [LLM(whole_target(), "ngram", "sampled_match", K, **options) for options in (TWO, SIZES)]
    outputs, expected = (llm.generate(PROMPTS, params) for llm in llms)
    return {
        "tokens": [[s.token_ids for s in o.outputs] for o in outputs],
        "expected": [[s.token_ids for s in o.outputs] for o in expected],
        "seeds_equal": [o.seed for o in outputs] == [o.seed for o in expected],
        "steps": [llm.engine.num_steps for llm in llms if isinstance(llm.engine, Engine)],
    }


def _target() -> dict[str, Any]:
    """Give a whole target to engines, and look at what became of it."""
    target = whole_target()
    heads, sizes = [target.model.num_kv_heads], []
    for _ in range(2):
        engine = Engine(target, "none", "greedy", 0, **TWO)
        assert engine.target.model is target.model
        heads.append(target.model.num_kv_heads)
        sizes.append(target.model.fused.layers[0].attention.qkv.weight.shape[0])
    refused = _refused(lambda: Engine(target, "none", "greedy", 0, **SIZES))
    return {"num_kv_heads": heads, "rows": sizes, "refused": refused}


def _packed() -> None:
    """Give a target that a CPU has packed."""
    target = tiny_target(tiny_model().to(torch.bfloat16))
    assert target.model.is_packed
    Engine(target, "none", "greedy", 0, **TWO)


def _blocks() -> int:
    """Return the KV blocks of an engine where the second rank has memory for a quarter of them."""
    limit = runner.memory._CPU_LIMIT_BYTES
    if this_rank() == 1:
        runner.memory._CPU_LIMIT_BYTES = 20 * 2 * 3 * 4 * 16 * 4  # of 20 blocks
    try:
        return _engine("none", num_kv_blocks=None).scheduler.blocks.num_blocks
    finally:
        runner.memory._CPU_LIMIT_BYTES = limit


def _clock() -> dict[str, Any]:
    """Run a policy that goes by the clock, where the ranks' clocks tell unlike times."""
    times = np.random.default_rng(this_rank())
    read = StepClock.read
    StepClock.read = lambda self, started: float(times.random())
    try:
        policy = {"name": "goodput", "explore_steps": 1, "probe_every": 3}
        engine = _engine(draft_length=policy)
        outputs = run_schedule(engine, schedule_of("greedy", 3, 5)).outputs
    finally:
        StepClock.read = read
    counts = {str(length): n for length, n in engine.draft_length.counts.items()}
    return {"counts": counts, "texts": {key: o.token_ids for key, o in outputs.items()}}


@register_drafter("by_the_clock", DrafterConfig)
class ClockDrafter(DrafterBase):
    """Proposes on the host what no other rank does."""

    capabilities = DrafterCapabilities(on_cpu=True, variable_length=True, reads_token_table=False)

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        """Return a run of random length for each row."""
        rng = np.random.default_rng(time.perf_counter_ns() + this_rank())
        lengths = [int(rng.integers(0, row.num_drafts + 1)) for row in rows]
        return [rng.integers(0, VOCAB_SIZE, n).tolist() for n in lengths]

    def propose(self, ctx: Any) -> None:
        """Propose nothing on the device."""

    def end_request(self, request: Any) -> None:
        """Forget nothing."""


def _host_drafts() -> dict[str, Any]:
    """Run drafts of the host that no two ranks have alike."""
    outputs = run_schedule(_engine("by_the_clock"), schedule_of("greedy", 3, 5)).outputs
    drafted = {key: o.stats.num_drafted for key, o in outputs.items()}
    return {"texts": {key: o.token_ids for key, o in outputs.items()}, "drafted": drafted}


def _plant_kernels(engine: Engine) -> None:
    """Let the kernels of attention be chosen by coarser bounds."""
    engine._planner._bound_step = 64


def _plant_drafts(engine: Engine) -> None:
    """Propose another token in one step."""
    propose, calls = engine.drafter.propose, iter(range(1000))

    def propose_odd(ctx: Any) -> None:
        propose(ctx)
        if next(calls) == 2:
            drafts = engine.runner.state.draft_tokens
            drafts.copy_((drafts + 1) % VOCAB_SIZE)

    engine.drafter.propose = propose_odd


def plant_tokens(engine: Engine) -> None:
    """Read another token in the third step."""
    execute, calls = engine.runner.execute_model, iter(range(1000))

    def execute_odd(*args: Any, **kwargs: Any) -> Any:
        handle = execute(*args, **kwargs)
        if next(calls) == 2:
            output = handle.output.wait()
            tokens = output.sampled_tokens.copy()
            tokens[0, 0] ^= 1
            handle.output.wait = lambda: dataclasses.replace(output, sampled_tokens=tokens)
        return handle

    engine.runner.execute_model = execute_odd


def _plant_request(engine: Engine) -> None:
    """Ask for another token than the other rank."""
    engine.add_request("odd", [7 + this_rank()], SamplingParams(temperature=0, max_tokens=2))


PLANTS: dict[str, Callable[[Engine], None]] = {
    "kernel choices": _plant_kernels,
    "drafts": _plant_drafts,
    "tokens": plant_tokens,
    "requests": _plant_request,
}


def _planted(plant: Callable[[Engine], None]) -> list[str]:
    """Let the second rank do something else; returns how that ended, and what comes after."""
    engine = _engine({"name": "draft_model", "model": "target"})
    if this_rank() == 1 or plant is _plant_request:
        plant(engine)
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12))

    def run() -> None:
        while engine.has_requests:
            engine.step()

    return [_refused(run), _refused(engine.step)]


def _captured() -> str:
    """Capture other parts of a step on the second rank."""
    parts = runner.capture.graph_parts
    if this_rank() == 1:
        runner.capture.graph_parts = lambda *args: []
    try:
        return _refused(lambda: _engine("none", graph_scope="step", graph_num_reqs=[2]))
    finally:
        runner.capture.graph_parts = parts


def _failed() -> list[str]:
    """Let a step fail on both ranks before they meet, ask for another, and end the request."""
    engine = _engine(max_steps_in_flight=2)
    engine.add_request("0", PROMPTS[0], SamplingParams(temperature=0, max_tokens=4))
    engine.step()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    def wait() -> None:
        told.append("waited for the device, where a sum may wait for a rank that has ended")

    engine.runner.execute_model, engine.runner.abandon_steps = fail, wait
    told = []
    try:
        engine.step()
    except ZeroDivisionError as error:
        told.append(str(error))
    engine.discard("0")
    return [*told, _refused(engine.step)]


def _ended() -> dict[str, Any]:
    """End requests in another order on each rank, and run more of them in what that frees."""
    params = SamplingParams(temperature=0, max_tokens=9)
    engine = _engine()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    engine.step()
    engine.step()
    for name in sorted(("1", "2", "3"), reverse=this_rank() == 1):
        engine.discard(name)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"later {i}", prompt[::-1], params)
    texts = {}
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
    one = LLM(whole_target(), "ngram", "greedy", K, **SIZES)
    expected = one.generate([prompt[::-1] for prompt in PROMPTS], params)
    rows = {name: text for name, text in texts.items() if name.startswith("later")}
    return {"texts": rows, "expected": [output.token_ids for output in expected]}


# --- replicas of two ranks each -------------------------------------------------------------------


def replicas_of_two(folder: str, num_schedules: int, limit_s: int) -> None:
    """Play schedules on two replicas of two ranks each and, on every rank, on one engine."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    sizes = {**SIZES, "max_model_len": 96, "num_kv_blocks": 25}
    reference = Engine(whole_target(), "ngram", "sampled_match", K, **sizes)
    own = {**TWO, **sizes, "data_parallel_size": 2}
    engine = DataParallelEngine(whole_target(), "ngram", "sampled_match", K, **own)
    differences, told = [], []
    for seed in range(num_schedules):
        events = draw_events(seed)
        outputs = play_events(engine, events, ends_early=True)
        expected = play_events(reference, events, ends_early=False)
        for name, output in outputs.items():
            for sample, whole in zip(output.outputs, expected[name].outputs, strict=True):
                upto = len(sample.token_ids) if sample.finish_reason == "abort" else None
                if sample.token_ids != whole.token_ids[:upto]:
                    differences.append([name, sample.token_ids, whole.token_ids])
        told.append([(n, [s.token_ids for s in o.outputs]) for n, o in outputs.items()])
    groups = engine.groups
    leave(
        folder,
        {
            "differences": differences,
            "told": told,
            "place": [groups.dp_rank, groups.tp_rank],
            "num_steps": engine.engine.num_steps,
        },
    )
    faulthandler.cancel_dump_traceback_later()


# --- ranks that die -------------------------------------------------------------------------------


def die_in_generate(folder: str, how: str, device: str = "cpu") -> None:
    """Generate, and let the second rank die or raise in the middle; keep what was finished."""
    (Path(folder) / f"pid{this_rank()}").write_text(str(os.getpid()))
    finished = Path(folder) / f"finished{this_rank()}"
    llm = LLM(whole_target(device), "ngram", "greedy", K, **{**TWO, "device": device})
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 12, 40, 40)]
    num_finished = 0

    def note(increment: Any) -> None:
        nonlocal num_finished
        if increment.output is None:
            return
        num_finished += 1
        if this_rank() == 1 and num_finished == 2:
            (Path(folder) / "died_at").write_text(str(time.time()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")
        with finished.open("a") as file:
            file.write(f"{increment.output.token_ids}\n")

    llm.generate(PROMPTS[:4], params, on_increment=note)
