"""What the ranks of the tests of tensor parallelism run: functions for `launch`.

A rank leaves what it saw in `<folder>/<rank>.json`; the tests look at that.
"""

import copy
import dataclasses
import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.loader import LoadedTarget
from specdec import LLM, Engine, SamplingParams
from tests.drafter_folders import save_drafters
from tests.head_cases import CASES, HeadFiles
from tests.models import tiny_model, tiny_target
from tests.parallel_cases import leave, this_rank
from tests.schedules import Arrival, draw_schedule, run_schedule

K = 3
# The last arrivals wait, and running requests are preempted.
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 18,
}
QUICK = ("none", "suffix", "draft_model, target", "eagle3", "mixed, host")
MODEL: dict[str, Any] = {"num_hidden_layers": 6}


def whole_target(**changes: Any) -> LoadedTarget:
    """Return a target of six layers that no rank has cut down."""
    return tiny_target(tiny_model("llama", **{**MODEL, **changes}))


def make_drafters(folder: Path, texts: list[list[int]]) -> dict[str, Any]:
    """Save what drafters load, and return what selects each of them.

    Args:
        folder: of this rank.
        texts: that the oracle knows.
    """
    model: Any = tiny_model("llama", **MODEL)
    draft = tiny_model("llama", num_hidden_layers=1)
    draft.get_input_embeddings().weight.data.copy_(model.get_input_embeddings().weight.data)
    draft.save_pretrained(folder / "draft")
    heads = {
        method: {"name": method, "path": HeadFiles(CASES[case], model, folder / method).path}
        for method, case in (("eagle", "EAGLE"), ("eagle3", "EAGLE-3"))
    }
    of_target = {"name": "draft_model", "model": "target"}
    layer_skip = {"name": "layer_skip", "num_layers": 2}
    return {
        "none": "none",
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model, target": of_target,
        "draft_model": {"name": "draft_model", "model": str(folder / "draft")},
        **save_drafters(folder),
        **heads,
        "eagle3, part of the vocabulary": {
            "name": "eagle3",
            "path": HeadFiles(CASES["EAGLE-3, speculators"], model, folder / "part").path,
        },
        "mixed": {"name": "mixed", "drafters": [{"name": "ngram"}, layer_skip]},
        "mixed, best": {
            "name": "mixed",
            "policy": "best",
            "drafters": [{"name": "ngram"}, heads["eagle3"]],
        },
        "mixed, host": {"name": "mixed", "drafters": [{"name": "suffix"}, of_target]},
        "oracle": {"name": "oracle", "texts": texts, "rates": [0.9, 0.7]},
        "record": {"name": "record", "folder": str(folder / "record")},
    }


def schedule_of(verifier: str, seed: int) -> list[Arrival]:
    """Draw arrivals; those for the verifier "greedy" are greedy."""
    arrivals = draw_schedule(seed)
    if verifier != "greedy":
        return arrivals
    return [
        dataclasses.replace(a, params=dataclasses.replace(a.params, temperature=0.0))
        for a in arrivals
    ]


def compare_drafters(
    folder: Path, names: list[str] | None, seeds: list[int], ranks: int = 2
) -> dict[str, Any]:
    """Play schedules on this rank's part of a target, and on a whole one.

    Args:
        folder: of this rank.
        names: of drafters; None takes all.
        seeds: of schedules; `max_steps_in_flight` and the graph scope change with them.
        ranks: that share the layers.

    Returns:
        What differs, how much was drafted, accepted and preempted, by drafter and verifier.
    """
    whole, part, found = whole_target(), whole_target(), {}
    for verifier in ("greedy", "sampled_match"):
        for seed in seeds:
            arrivals = schedule_of(verifier, seed)
            unaborted = [dataclasses.replace(a, abort_after=None) for a in arrivals]
            plain = Engine(whole, "none", verifier, K, **{**SIZES, "num_kv_blocks": 200})
            expected = run_schedule(plain, unaborted).texts()
            texts = [a.prompt + expected[str(i)] for i, a in enumerate(arrivals)]
            drafters = make_drafters(folder / f"{verifier}{seed}", texts)
            for name in names or drafters:
                own = {**SIZES, "tensor_parallel_size": ranks, "check_ranks_every": 2}
                if seed % 2:
                    own |= {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]}
                    if name not in ("suffix", "mixed, host"):
                        own |= {"max_steps_in_flight": 2}
                engine = Engine(part, drafters[name], verifier, K, **own)
                result = run_schedule(engine, arrivals)
                entry = found.setdefault(f"{name}, {verifier}", new_entry())
                for key, output in result.outputs.items():
                    begun = expected[key][: len(output.token_ids)]
                    whole_text = output.finish_reason == "abort" or len(begun) == len(expected[key])
                    if output.token_ids != begun or not whole_text:
                        entry["differences"].append([seed, key, output.token_ids, expected[key]])
                    entry["num_drafted"] += output.stats.num_drafted
                    entry["num_accepted"] += output.stats.num_accepted
                    entry["texts"].append(output.token_ids)
                entry["num_preemptions"] += result.num_preemptions
    return found


def new_entry() -> dict[str, Any]:
    """Return counts of a drafter under a verifier."""
    return {
        "differences": [],
        "num_drafted": 0,
        "num_accepted": 0,
        "num_preemptions": 0,
        "texts": [],
    }


def quick_checks(folder: str) -> None:
    """Run everything that takes moments, and leave what came of it."""
    faulthandler.dump_traceback_later(120, exit=True)
    own = Path(folder) / f"rank{this_rank()}"
    leave(folder, {"drafters": compare_drafters(own, list(QUICK), [0])})
    faulthandler.cancel_dump_traceback_later()
