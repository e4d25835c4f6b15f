"""Tiny targets, drafters of every kind, and texts, for the tests of shadow runs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafters.block_parallel import BlockParallelHead, BlockParallelSizes, save_block_parallel
from drafters.medusa import MedusaHead, save_medusa
from experiments.shadow_score import Scorer, ScoreSizes, load_drafter
from experiments.shadow_texts import Law, TargetPass, Text
from experiments.shadow_walk import StartScores, StepOutcome
from runner.loader import LoadedTarget
from specdec import Engine, SamplingParams
from specdec.registry import build_config
from specdec.trace import StepTrace
from tests.head_cases import CASES, HeadFiles
from tests.models import random_prompts, tiny_model, tiny_target

LAYERS = 6
V = 12  # few tokens: drafters of random weights are right now and then
MAX_MODEL_LEN = 72
EOS = 3


def make_target(**changes: Any) -> tuple[Any, LoadedTarget]:
    """Return a random model of few tokens, and the same behind the runner."""
    model = tiny_model("llama", scale=2.5, vocab_size=V, num_hidden_layers=LAYERS, **changes)
    return model, tiny_target(model)


def drafter_specs(model: Any, folder: Path, sampling: str = "argmax") -> dict[str, dict[str, Any]]:
    """Write the files of random drafters; return what selects each of them."""
    size = model.config.hidden_size
    specs: dict[str, dict[str, Any]] = {
        "draft_model": {"model": str(_small_model(folder / "small"))},
        "layer_skip": {"num_layers": 4},
        "target itself": {"name": "draft_model", "model": "target"},
    }
    for name, case in (("eagle3", "EAGLE-3"), ("eagle", "EAGLE")):
        specs[name] = {"path": HeadFiles(CASES[case], model, folder / name).path}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        heads = [MedusaHead(size, 1, V) for _ in range(3)]
        save_medusa(folder / "medusa", heads)
        sizes = BlockParallelSizes(size, [0, 2, 4], 2, 4, 2, 16, 64, max_positions=60)
        save_block_parallel(folder / "block", BlockParallelHead(sizes))
    specs["medusa"] = {"path": str(folder / "medusa")}
    specs["block_parallel"] = {"path": str(folder / "block")}
    specs = {name: {"name": name, "sampling": sampling, **spec} for name, spec in specs.items()}
    chain = [{"name": "ngram", "min_n": 2}, specs["eagle3"]]
    return {"ngram": {"name": "ngram"}, **specs, "mixed": {"name": "mixed", "drafters": chain}}


def _small_model(folder: Path) -> Path:
    model = tiny_model("llama", seed=1, scale=2.5, vocab_size=V, num_hidden_layers=2)
    model.save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Played:
    """Texts of an engine, and the verifications that wrote them."""

    texts: list[Text]
    steps: list[list[StepOutcome]]


def play(
    target: LoadedTarget,
    drafter: Any,
    verifier: str,
    k: int,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] | None = None,
    max_num_reqs: int = 3,
) -> Played:
    """Run an engine, and keep texts and steps of each prompt."""
    prompts = (
        random_prompts([5, 9, 1, 14, 30], seed=3, vocab_size=V) if prompts is None else prompts
    )
    trace = StepTrace()
    engine = Engine(
        target, drafter, verifier, k, trace=trace, device="cpu", max_num_reqs=max_num_reqs,
        block_size=4, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=max(24, 6 * max_num_reqs),
    )  # fmt: skip
    outputs = {}
    for i, prompt in enumerate(prompts):
        own = dataclasses.replace(params, seed=100 + i)
        engine.add_request(str(i), list(prompt), own)
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                outputs[increment.request_id] = increment.output
    rows = trace.requests()
    rows = rows[rows["is_verify"].astype(bool)]
    texts, steps = [], []
    for i, prompt in enumerate(prompts):
        output = outputs[str(i)]
        most = min(len(prompt) + params.max_tokens, MAX_MODEL_LEN)
        token_ids = [*prompt, *output.token_ids]
        texts.append(Text(f"{i}/1", str(i), "any", 100 + i, token_ids, len(prompt), most))
        own = rows[rows["request_id"] == str(i)]
        columns = [own[name].tolist() for name in StepOutcome._fields]
        steps.append([StepOutcome(*values) for values in zip(*columns, strict=True)])
    return Played(texts, steps)


def score(
    target: LoadedTarget,
    drafter: Any,
    verifier: str,
    k: int,
    params: SamplingParams,
    texts: Sequence[Text],
    num_rows: int = 7,
    max_model_len: int = MAX_MODEL_LEN,
) -> list[StartScores]:
    """Score a drafter on texts."""
    entry, config = build_config("drafter", drafter)
    rule, rule_config = build_config("verifier", verifier)
    judge = rule.cls(rule_config)
    longest = max(len(text.token_ids) for text in texts)
    sizes = ScoreSizes(max_model_len, longest, k, num_rows)
    loaded: Any = load_drafter(entry.cls(config), target, sizes)
    scorer = Scorer(loaded, judge, target.model, params.temperature, sizes)
    law = None
    if params.temperature > 0 and not judge.text_equal:
        law = Law(params.temperature, params.top_p, params.top_k)
    layers = scorer.drafter.capabilities.aux_layers
    states = TargetPass(target.model, longest, layers, law, 11)
    return [scorer.score(text, states.run(text)) for text in texts]


def biased_steps(scores: StartScores, k: int) -> float:
    """Return the steps of a text were each position a start as often as any other: a bug."""
    num_starts = scores.length - scores.first
    kept = np.cumprod(scores.accept[:, :k], 1).sum(1)
    left = num_starts - np.arange(num_starts)
    return num_starts / float(np.minimum(kept + 1, left).mean())
