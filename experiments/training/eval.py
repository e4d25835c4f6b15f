"""Stage `eval`: mean accepted length through the engine, by drafter, K, temperature and file.

    python -m experiments.training.eval --config eval.json --out folder

Prompts are the first turns of question files, or the prompts of a dataset's split "valid". Each
line of the table pools the requests of a file, or of one of its categories (`specdec/metrics.py`),
with an interval from a bootstrap over prompts. Needs torch, transformers and numpy.
"""

import gc
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.prompts import load_questions
from experiments.provenance import collect_provenance
from experiments.training.config import EvalConfig, shown_config
from experiments.training.dataset import TokenDataset
from experiments.training.stage import StageRun, stage_main
from experiments.training.trainee import method_class
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.intake import PromptReader
from specdec.intervals import estimate, ratio
from specdec.types import RequestStats, SamplingParams

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_ALL = "all"


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt, and what its line of the table is called."""

    token_ids: list[int]
    file: str
    category: str


def read_prompts(config: EvalConfig, target: LoadedTarget) -> list[EvalPrompt]:
    """Return the prompts of a configuration that fit, the longest left out.

    Raises:
        ConfigError: there are none.
    """
    room = config.max_model_len - config.max_tokens
    reader = PromptReader(target.tokenizer, target.model.vocab_size, config.max_model_len)
    prompts: list[EvalPrompt] = []
    for path in config.files:
        for question in load_questions(path)[: config.max_prompts]:
            message = [{"role": "user", "content": question.turns[0]}]
            try:
                _, token_ids = reader.read(message)
            except ConfigError as error:
                logger.warning("question %r is left out: %s", question.question_id, error)
                continue
            prompts.append(EvalPrompt(token_ids, Path(path).stem, question.category))
    if not config.files:
        prompts = _held_out(config)
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
    if len(fitting) < len(prompts):
        logger.warning(
            "%d prompts of more than %d tokens are left out", len(prompts) - len(fitting), room
        )
    if not fitting:
        raise ConfigError(
            f"no prompt fits: with eval.max_model_len={config.max_model_len} and "
            f"eval.max_tokens={config.max_tokens} at most {room} tokens do; give other numbers"
        )
    return fitting


def _held_out(config: EvalConfig) -> list[EvalPrompt]:
    """Return prompts of a dataset's held-out split; they end where the answer begins."""
    if not config.data:
        raise ConfigError("eval needs files=[<question files>] or data=<dataset folder>, got none")
    dataset, prompts = TokenDataset(config.data, "valid"), []
    seen: set[tuple[int, ...]] = set()
    for index in range(len(dataset)):
        sequence = dataset.sequence(index)
        token_ids = sequence.token_ids[: sequence.num_prompt or 1].tolist()
        # Answers at several temperatures have one prompt.
        if len(token_ids) > config.max_prompt_len or tuple(token_ids) in seen:
            continue
        seen.add(tuple(token_ids))
        name = dataset.sources[sequence.source] if dataset.sources else "valid"
        prompts.append(EvalPrompt(token_ids, "valid", str(name)))
        if len(prompts) == config.max_prompts:
            break
    return prompts


def measure(
    target: LoadedTarget,
    drafter: str | Mapping[str, Any] | object,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    k: int,
) -> dict[float, list[RequestStats]]:
    """Answer prompts and return what was accepted of each, by temperature.

    Args:
        target: as it serves.
        drafter: what `Engine` takes.
        prompts: of one drafter and K.
        config: lengths, temperatures and seed.
        k: drafts a step.
    """
    num_reqs = min(len(prompts), config.max_num_reqs)
    longest = max(len(prompt.token_ids) for prompt in prompts) + config.max_tokens
    # What a row can need: so no memory profile takes what a trainer beside it is to have.
    blocks = -(-(longest + k + 1) // _BLOCK_SIZE) + 1
    engine = Engine(
        target,
        drafter,
        config.verifier,
        k,
        device=str(target.model.device),
        dtype=str(target.model.dtype).removeprefix("torch."),
        seed=config.seed,
        max_num_reqs=num_reqs,
        max_model_len=min(longest + 1, target.model.max_position_embeddings),
        max_num_batched_tokens=max(4096, num_reqs * (k + 1)),
        num_kv_blocks=num_reqs * blocks + 1,
        block_size=_BLOCK_SIZE,
        graph_scope=config.graph_scope,
        graph_num_reqs=[num_reqs],
    )
    found = {}
    for temperature in config.temperatures:
        found[temperature] = _answer(engine, prompts, config, temperature)
    del engine
    gc.collect()
    if target.model.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _answer(
    engine: Engine, prompts: Sequence[EvalPrompt], config: EvalConfig, temperature: float
) -> list[RequestStats]:
    """Answer every prompt at a temperature."""
    stats: dict[str, RequestStats] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, max_tokens=config.max_tokens, seed=config.seed + i
        )
        engine.add_request(str(i), prompt.token_ids, params)
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                stats[increment.request_id] = increment.output.outputs[0].stats
    return [stats[str(i)] for i in range(len(prompts))]


def accepted_line(stats: Iterable[RequestStats]) -> dict[str, Any]:
    """Return a line of the table: mean accepted length with its interval, acceptance by position.

    Args:
        stats: of the requests that are pooled, one a prompt.
    """
    own = list(stats)
    counts = [[s.num_verify_tokens, s.num_verify_steps] for s in own]
    found = estimate(np.array(counts, dtype=np.float64), lambda s: ratio(s[:, 0], s[:, 1], 1.0))
    drafted = np.array([s.drafted_per_position for s in own]).sum(0)
    accepted = np.array([s.accepted_per_position for s in own]).sum(0)
    by_position = [float(a / d) if d else None for a, d in zip(accepted, drafted, strict=True)]
    bounds = [None if np.isnan(bound) else float(bound) for bound in (found.low, found.high)]
    return {
        "num_prompts": len(own),
        "num_verify_steps": int(sum(s.num_verify_steps for s in own)),
        "accepted_length": found.value,
        "accepted_length_low": bounds[0],
        "accepted_length_high": bounds[1],
        "acceptance_by_position": by_position,
    }


def table_lines(
    prompts: Sequence[EvalPrompt], found: Mapping[float, Sequence[RequestStats]]
) -> list[dict[str, Any]]:
    """Return lines for all prompts, for each file, and for each category where a file has several.

    Args:
        prompts: that were answered.
        found: what `measure` gave for them.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for i, prompt in enumerate(prompts):
        for key in ((_ALL, _ALL), (prompt.file, _ALL), (prompt.file, prompt.category)):
            groups.setdefault(key, []).append(i)
    categories: dict[str, set[str]] = {}
    for file, category in groups:
        categories.setdefault(file, set()).add(category)
    lines = []
    for temperature, stats in found.items():
        for (file, category), members in groups.items():
            if category != _ALL and len(categories[file]) <= 2:
                continue  # its only category: the file's line says it
            line = {"temperature": temperature, "file": file, "category": category}
            lines.append(line | accepted_line(stats[i] for i in members))
    return lines


def chosen_drafters(config: EvalConfig) -> list[Any]:
    """Return what is to be measured, the drafter that a run of `fit` left first.

    Raises:
        ConfigError: there is nothing, or no run of `fit` in its folder.
    """
    chosen: list[Any] = []
    if config.fitted:
        folder = Path(config.fitted)
        try:
            record = json.loads((folder / "fit.json").read_text(encoding="utf-8"))
            method = record["config"]["method"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"eval.fitted={config.fitted!r} holds no run of the stage fit ({error}); run it "
                f"first, or give drafters alone"
            ) from error
        chosen.append(method_class(method).drafter(folder / "drafter"))
    chosen += config.drafters
    if not chosen:
        raise ConfigError("eval needs fitted=<folder of fit> or drafters=[<names>], got neither")
    return chosen


def run_eval(config: EvalConfig, run: StageRun) -> dict[str, Any]:
    """Measure every drafter of a configuration; writes `eval.json` and `eval.md`.

    Raises:
        ConfigError: there is no drafter or no prompt.
    """
    drafters = chosen_drafters(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    target = load_target(config.target, dtype, device)
    prompts = read_prompts(config, target)
    lines: list[dict[str, Any]] = []
    record = {
        "provenance": collect_provenance(run.command, config.seed, device, dtype),
        "config": shown_config(config),
        "lines": lines,
    }
    run.folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    for drafter in drafters:
        name = drafter.get("name", "?") if isinstance(drafter, Mapping) else str(drafter)
        for k in config.num_speculative_tokens:
            found = measure(target, drafter, prompts, config, k)
            own = table_lines(prompts, found)
            lines += [{"drafter": name, "k": k, **line} for line in own]
            for line in own:
                if line["file"] == _ALL:
                    key = f"accept/length_{name}_k{k}_t{line['temperature']:g}"
                    summary[key] = line["accepted_length"]
            # After every engine: what was measured stays, whatever comes.
            (run.folder / "eval.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            (run.folder / "eval.md").write_text(markdown(lines), "utf-8")
            logger.info("%s K=%d: %s", name, k, {k: round(v, 3) for k, v in summary.items()})
    run.log(summary, 0)
    return summary


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of mean accepted lengths (bonus included), a column for each K."""
    ks = sorted({line["k"] for line in lines})
    rows: dict[tuple[Any, ...], dict[int, str]] = {}
    for line in lines:
        key = (line["drafter"], line["temperature"], line["file"], line["category"])
        low, high = line["accepted_length_low"], line["accepted_length_high"]
        interval = "" if low is None else f" ({low:.2f}..{high:.2f})"
        rows.setdefault(key, {})[line["k"]] = f"{line['accepted_length']:.2f}{interval}"
    head = ["drafter", "temperature", "file", "category", *(f"K={k}" for k in ks)]
    text = [head, ["---"] * len(head)]
    for key, cells in rows.items():
        text.append([*map(str, key), *(cells.get(k, "") for k in ks)])
    return "".join("| " + " | ".join(row) + " |\n" for row in text)


if __name__ == "__main__":
    sys.exit(stage_main("eval", EvalConfig, run_eval))
