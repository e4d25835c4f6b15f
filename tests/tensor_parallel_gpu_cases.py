"""What the ranks of the GPU tests of tensor parallelism run: functions for `launch`."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.tensor_parallel import TensorParallel
from specdec import Engine, SamplingParams
from specdec.errors import SpecdecError
from tests.parallel_cases import leave, this_rank
from tests.schedules import run_schedule
from tests.tensor_parallel_engine_cases import (
    PROMPTS,
    SIZES,
    K,
    plant_tokens,
    save_models,
    schedule_of,
    whole_target,
)

DRAFTERS = ("none", "ngram", "suffix", "draft_model, target", "layer_skip", "eagle3", "mixed")
SCOPES: dict[str, dict[str, Any]] = {
    "step": {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]},
    "draft": {"graph_scope": "draft", "graph_num_reqs": [2, 5]},
    "none": {"graph_scope": "none"},
}
CASES = [
    *((name, "step") for name in DRAFTERS),
    *(("draft_model, target", "draft"), ("eagle3", "draft"), ("eagle3", "none")),
]
LAUNCHES: dict[str, Any] = {**SCOPES["step"], "steps_per_launch": 3}
_STEADY_STEPS = 8
_device = "cuda"


def gpu_checks(folder: str, device: str = "cuda") -> None:
    """Run every check on this rank's GPU, and leave what came of it.

    Args:
        folder: where to.
        device: "cpu" for a dry run, in which what ought to be a graph is none.
    """
    global _device
    _device = device
    faulthandler.dump_traceback_later(240, exit=True)
    saved = save_models(Path(folder) / f"rank{this_rank()}")
    found: dict[str, Any] = {"drafters": {}}

    def keep(into: dict[str, Any], name: str, check: Callable[..., Any], *args: Any) -> None:
        # What comes first is told and kept: a check that hangs takes nothing else with it.
        print(f"rank {this_rank()}: {name}", file=sys.stderr, flush=True)
        into[name] = check(*args)
        leave(folder, found)

    for name, scope in CASES:
        keep(found["drafters"], f"{name}, {scope}", _compare, saved[name], SCOPES[scope])
    keep(found, "launches", _compare, saved["eagle3"], LAUNCHES)
    keep(found, "steady", _steady, saved["eagle3"])
    keep(found, "blocks", _blocks)
    keep(found, "goodput", _goodput, saved["eagle3"])
    keep(found, "planted", _planted)  # which ends the engines of both
    faulthandler.cancel_dump_traceback_later()


def _engine(size: int, drafter: Any, verifier: str, options: dict[str, Any]) -> Engine:
    """Build an engine of two ranks, or of this one alone, on its own GPU."""
    device = f"cuda:{this_rank()}" if _device == "cuda" and size == 1 else _device
    own = {**SIZES, "device": device, "tensor_parallel_size": size, "check_ranks_every": 1}
    return Engine(whole_target(_device), drafter, verifier, K, **{**own, **options})


def _compare(drafter: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Play schedules on two ranks and on one; returns what differs, and what was launched."""
    found: dict[str, Any] = {"differences": [], "launches": [], "texts": []}
    for verifier, seed in (("greedy", 0), ("sampled_match", 1)):
        arrivals = schedule_of(verifier, seed, 7)
        texts = []
        for size in (2, 1):
            engine = _engine(size, drafter, verifier, options)
            outputs = run_schedule(engine, arrivals).outputs
            texts.append({key: output.token_ids for key, output in outputs.items()})
            found["launches"].append(dict(engine.runner.graphs.launches))
        for key, text in texts[0].items():
            if text != texts[1][key]:
                found["differences"].append([verifier, key, text, texts[1][key]])
        found["texts"].append(texts[0])
    return found


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the collectives that the host asks for, those of a graph's launch not."""
    counts, originals = [0], {}

    def counting(original: Any) -> Any:
        def count(self: TensorParallel, *args: Any, **kwargs: Any) -> Any:
            counts[0] += 1
            return original(self, *args, **kwargs)

        return count

    for name in ("all_reduce", "all_gather_columns", "top1"):
        originals[name] = getattr(TensorParallel, name)
        setattr(TensorParallel, name, counting(originals[name]))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(TensorParallel, name, original)


def _steady(drafter: Any) -> dict[str, Any]:
    """Count launches and collectives of steps in which nothing joins or leaves."""
    engine = _engine(2, drafter, "greedy", {**SCOPES["step"], "num_kv_blocks": 90})
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with _counted() as counts:
        for i, prompt in enumerate(PROMPTS[:2]):
            engine.add_request(str(i), prompt, params)
        engine.step()
        of_prompts = counts[0]
        engine.step()
        engine.step()
        engine.runner.graphs.launches.clear()
        counts[0] = 0
        for _ in range(_STEADY_STEPS):
            engine.step()
        of_steps = counts[0]
    assert len(engine.unfinished_ids) == 2, "a request ended"
    launches = dict(engine.runner.graphs.launches)
    for name in sorted(engine.unfinished_ids):
        engine.discard(name)
    while engine.has_requests:
        engine.step()
    return {"of_prompts": of_prompts, "of_steps": of_steps, "launches": launches}


def _blocks() -> int:
    """Return the KV blocks that the memory of the poorer GPU allows."""
    engine = _engine(2, "none", "greedy", {**SCOPES["step"], "num_kv_blocks": None})
    return engine.scheduler.blocks.num_blocks


def _planted() -> list[str]:
    """Let the second rank read another token, and end each request by that."""
    engine, told = _engine(2, "ngram", "greedy", SCOPES["step"]), []
    if this_rank() == 1:
        plant_tokens(engine)
    engine.add_request("0", PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))
    for _ in range(2):
        try:
            while engine.has_requests:
                engine.step()
        except SpecdecError as error:
            told.append(str(error))
    return told


def _goodput(drafter: Any) -> dict[str, Any]:
    """Run a policy that goes by the clock, each rank's own."""
    options = {**SCOPES["step"], "draft_length": {"name": "goodput", "explore_steps": 1}}
    engine = _engine(2, drafter, "greedy", options)
    outputs = run_schedule(engine, schedule_of("greedy", 3, 7)).outputs
    counts = {str(length): n for length, n in engine.draft_length.counts.items()}
    return {"counts": counts, "texts": {key: o.token_ids for key, o in outputs.items()}}
