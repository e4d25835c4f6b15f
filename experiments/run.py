"""Measure arms beside the autoregressive one: `python -m experiments.run drafter=ngram`.

One target is loaded; for each group of questions every arm runs in turn, so that drift of the
machine hits all arms alike. Traces, texts, verdicts and the report go into Hydra's output folder.
"""

import contextlib
import dataclasses
import logging
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.arms import (
    Arm,
    ArmSpec,
    advise_on_sampling,
    build_arm,
    choose_questions,
    encode,
    plan_arms,
    play,
    request_seed,
    turn_line,
)
from experiments.cli import hydra_app
from experiments.context import fit_context
from experiments.equality import Verdict, first_verdict, try_equality
from experiments.prompts import Question
from experiments.provenance import collect_provenance
from experiments.ranks import setup_rank_logging
from experiments.run_folder import RunFolder, UnwrittenFolder, refuse_used_folder
from experiments.schemas import RunConfig, load_config, register_schemas
from experiments.workload import Pace, cut_groups, plan_paces
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from specdec.errors import CapacityError, ConfigError
from specdec.latencies import summarise_latencies
from specdec.log import progress, setup_logging
from specdec.parallel.groups import ParallelConfig, init_groups, is_first_rank, is_rank
from specdec.parallel.launch import launch
from specdec.parallel.placement import check_host, device_of_rank, device_type
from specdec.parallel.tensor_ranks import tensor_parallel_of
from specdec.tracker import Tracker, TrackerConfig, hide_secrets, make_tracker, without_secrets
from specdec.types import SamplingParams

logger = logging.getLogger(__name__)

_TABLE_WIDTH = 120  # columns that the tables are made for


@dataclass
class RunResult:
    """What a run leaves."""

    folder: Path
    report: Path
    tables: list[Table]
    tracked_at: str | None


@dataclass
class _Run:
    """What the stages of a run share."""

    config: RunConfig
    folder: RunFolder
    tracker: Tracker
    specs: list[ArmSpec]
    questions: list[Question]
    paces: list[Pace]

    def params(self, name: str) -> SamplingParams:
        """Return the sampling parameters of a request."""
        return self.config.sampling.params(seed=request_seed(self.config, name))


def execute(config: RunConfig, path: Path, command: str, resolved: Mapping[str, Any]) -> RunResult:
    """Run a checked configuration and write its run folder.

    Args:
        config: from `load_config`.
        path: the run folder.
        command: for the provenance.
        resolved: the same configuration as plain values, for `config.yaml` and the tracker.

    Raises:
        SpecdecError: a question file, device, target or disk that cannot be used.
    """
    started = time.monotonic()
    # Both go into files that a tracker may send away.
    resolved, command = without_secrets(resolved), hide_secrets(command)
    device = resolve_device(config.engine.device)
    dtype = resolve_dtype(config.engine.dtype, device)
    questions = choose_questions(config.prompts)
    seed = config.seed
    paces = plan_paces(config.workload, len(questions), config.batch_size, seed)
    specs = plan_arms(config)
    advice = advise_on_sampling(specs, config)
    if advice is not None:
        logger.info(advice)
    writes = config.engine.num_ranks == 1 or is_first_rank()
    folder = RunFolder(path) if writes else UnwrittenFolder(path)
    folder.write_text("config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
    provenance = collect_provenance(command, seed, device, dtype)
    folder.write_json("provenance.json", provenance)
    run_name = f"{Path(config.target.name).name}, {specs[-1].name}"
    tracker_config = config.tracker if writes else TrackerConfig()
    tracker = make_tracker(tracker_config, resolved, path, run_name)
    failed = True
    try:
        run = _Run(config, folder, tracker, specs, questions, paces)
        _measure(run, dtype, device)
        provenance["duration_s"] = round(time.monotonic() - started, 1)
        folder.write_json("provenance.json", provenance)
        result = _report(run) if writes else RunResult(path, path / "report.html", [], None)
        failed = False
        return result
    finally:
        tracker.finish(failed)


def _measure(run: _Run, dtype: torch.dtype, device: torch.device) -> None:
    """Time the arms, then compare their texts."""
    dtype_name = str(dtype).removeprefix("torch.")
    judged = [(spec, *first_verdict(spec, run.config, dtype_name)) for spec in run.specs]
    verdicts = {spec.name: verdict for spec, verdict, _ in judged}
    shared = tensor_parallel_of(run.config.engine)
    name, weight_dtype = run.config.target.name, run.config.engine.weight_dtype
    target: LoadedTarget | None = load_target(name, dtype, device, shared, weight_dtype)
    run.questions = _with_lengths(run.questions, target)
    entries = _time_arms(run, target, verdicts)
    to_compare = [spec for spec, _, needs_texts in judged if needs_texts]
    if to_compare:
        if dtype != torch.float32:
            target = None  # its memory is needed for the float32 weights
        specs = [run.specs[0], *to_compare]
        found, texts = try_equality(specs, run.config, run.questions, device, target)
        run.folder.write_json("arms.json", _with_verdicts(entries, verdicts | found))
        lines = [turn_line(spec, turn) for spec, turn in texts]
        run.folder.write_text("texts_compared.jsonl", "".join(f"{line}\n" for line in lines))


def _with_lengths(questions: list[Question], target: LoadedTarget) -> list[Question]:
    """Make the prompts that are to have a given length, so that no arm's time holds that."""

    def encode_message(text: str) -> list[int]:
        return encode(target, [{"role": "user", "content": text}])

    return fit_context(questions, encode_message, target.tokenizer, target.model.vocab_size)


def _time_arms(
    run: _Run, target: LoadedTarget, verdicts: Mapping[str, Verdict]
) -> list[dict[str, Any]]:
    """Play every group of questions on every arm; return the entries of arms.json.

    The run folder is kept up to date meanwhile.
    """
    arms = [build_arm(spec, run.config, target) for spec in run.specs]
    run.folder.write_json("arms.json", _with_verdicts(_entries(run, arms), verdicts))
    groups = cut_groups(run.questions, run.paces)
    logger.info("timing %d arms on %d questions", len(arms), len(run.questions))
    try:
        with progress("timing", total=len(groups) * len(arms)) as bar:
            for index, (group, pace) in enumerate(zip(groups, run.paces, strict=True)):
                # Rotated, so that no arm always runs first on a cool machine or with cold caches.
                first = index % len(arms)
                for arm in arms[first:] + arms[:first]:
                    arm.add(play(arm.engine, group, run.params, pace), index)
                    arm.gather()
                    bar.advance(
                        f"{arm.spec.name}: {arm.tokens_per_s:.1f} tokens/s, "
                        f"accepted length {arm.accepted_length:.2f}"
                    )
                if run.folder.flush_if_due(arms):
                    entries = _with_verdicts(_entries(run, arms), verdicts)
                    run.folder.write_json("arms.json", entries)
                run.tracker.log(_progress_metrics(arms), step=index)
    finally:  # an interrupt, too, leaves all that was measured
        entries = _entries(run, arms)
        run.folder.write_json("arms.json", _with_verdicts(entries, verdicts))
        run.folder.flush(arms)
    if not arms[0].turns:
        raise CapacityError(
            f"none of the {len(run.questions)} questions fits engine.max_model_len="
            f"{run.config.engine.max_model_len}; raise it or ask shorter questions"
        )
    _log_launches(entries)
    return entries


def _log_launches(entries: Sequence[Mapping[str, Any]]) -> None:
    """Tell what graphs held of the timed steps and what ran eager, where graphs were wanted."""
    for entry in entries:
        if entry["graph_scope"] != "none":
            counts = "; ".join(f"{n} x {what}" for what, n in sorted(entry["launches"].items()))
            logger.info("steps of %s: %s", entry["arm"], counts or "none")


def _entries(run: _Run, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return what arms.json says of each arm, but for the verdict."""
    verifier = run.config.verifier
    return [
        {
            "arm": arm.spec.name,
            "drafter": arm.spec.drafter.entry.name,
            "drafter_config": arm.spec.drafter.spec,
            "k": arm.spec.k,
            "draft_length_config": arm.spec.draft_length.spec,
            "verifier": verifier.entry.name,
            "temperature": run.config.sampling.temperature,
            "lossless": bool(verifier.entry.cls(verifier.config).lossless),
            "workload": dataclasses.asdict(run.config.workload),
            "context_lengths": list(run.config.prompts.context_lengths),
            "random_tokens": run.config.prompts.random_tokens,
            "kv_bytes": arm.kv_bytes,
            "num_skipped": arm.num_skipped,
            **arm.launching,
        }
        for arm in arms
    ]


def _with_verdicts(
    entries: Sequence[dict[str, Any]], verdicts: Mapping[str, Verdict]
) -> list[dict[str, Any]]:
    return [e | {"verdict": dataclasses.asdict(verdicts[e["arm"]])} for e in entries]


def _progress_metrics(arms: Sequence[Arm]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for arm in arms:
        metrics[f"accept/length/{arm.spec.name}"] = arm.accepted_length
        metrics[f"speed/tokens_per_s/{arm.spec.name}"] = arm.tokens_per_s
    return metrics


def _report(run: _Run) -> RunResult:
    """Build the report from the run folder and hand the summary to the tracker."""
    # Here, because matplotlib is slow to import and a mistyped key should be told at once.
    from experiments.report import build_report, load_run, read_tables, render_table
    from specdec.metrics import PHASES, idle_positions, time_split

    path = run.folder.path
    report = build_report(path)
    summary, categories = read_tables(path)
    traces = load_run(path)
    parts = traces.requests, traces.steps, traces.arms
    times, idle = time_split(*parts), idle_positions(*parts)
    metrics: dict[str, float] = {}
    for row in summary.to_dict("records"):
        metrics[f"accept/length/{row['arm']}"] = row["accepted_length"]
        metrics[f"accept/rate/{row['arm']}"] = row["acceptance_rate"]
        metrics[f"speed/tokens_per_s/{row['arm']}"] = row["tokens_per_s"]
        metrics[f"speed/speedup/{row['arm']}"] = row["speedup"]
    for row in times.to_dict("records"):
        metrics |= {f"time/{phase}_ms/{row['arm']}": row[f"{phase}_ms"] for phase in PHASES}
    for row in idle.to_dict("records"):
        for name in ("padding_share", "idle_share"):
            metrics[f"positions/{name}/{row['arm']}"] = row[name]
    latencies = summarise_latencies(pd.read_parquet(path / "latencies.parquet"), traces.arms)
    run.folder.write_text("latencies.csv", latencies.to_csv(index=False))
    for row in latencies.to_dict("records"):
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            metrics[f"latency/{name}_p50/{row['arm']}"] = row[f"{name}_p50"]
            metrics[f"latency/{name}_p99/{row['arm']}"] = row[f"{name}_p99"]
    # Without an arm's name, too: a sweep agent follows one name through runs of any drafter.
    chosen = f"/{run.specs[min(1, len(run.specs) - 1)].name}"
    plain = {k.removesuffix(chosen): v for k, v in metrics.items() if k.endswith(chosen)}
    known = {name: value for name, value in (metrics | plain).items() if math.isfinite(value)}
    run.tracker.log(known, step=len(run.questions))
    run.tracker.log_table("arms", summary.to_dict("records"))  # pyright: ignore[reportArgumentType]
    run.tracker.log_artifact_folder(path, f"run-{path.name}")
    tables = render_table(summary, categories)
    if run.config.workload.name != "groups":
        tables.append(_latency_table(latencies, run.config.workload.name))
    return RunResult(path, report, tables, run.tracker.location)


def _latency_table(latencies: pd.DataFrame, workload: str) -> Table:
    """Return what users waited for, arm by arm, in milliseconds."""
    from experiments.tables import number_text

    flag = ", random-token prompts" if True in list(latencies["random_tokens"]) else ""
    title = f"latency from arrival ({workload}{flag}), ms: median / 99th percentile"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("arm", "requests", "first token", "per output token", "whole answer"):
        table.add_column(header, justify="left" if header == "arm" else "right")
    for row in latencies.to_dict("records"):
        cells = [
            " / ".join(number_text(row[f"{name}_p{p}"] * 1e3, "{:.1f}") for p in (50, 99))
            for name in ("ttft_s", "tpot_s", "e2e_s")
        ]
        table.add_row(escape(row["arm"]), str(row["num_requests"]), *cells)
    return table


def show(result: RunResult) -> None:
    """Print the tables, and where everything lies."""
    console = Console()
    # A narrow terminal wraps lines; a table made narrow would lose its last columns.
    console.width = max(console.width if console.is_terminal else 0, _TABLE_WIDTH)
    for table in result.tables:
        console.print(table)
    console.print(f"report   {result.report}", soft_wrap=True, highlight=False)
    console.print(f"traces   {result.folder}/*.parquet", soft_wrap=True, highlight=False)
    if result.tracked_at is not None:
        console.print(f"tracker  {result.tracked_at}", soft_wrap=True, highlight=False)


def run_task(cfg: DictConfig) -> None:
    """Run one composed configuration in Hydra's output folder."""
    setup_logging(logging.getLogger().level)  # the level that Hydra was asked for
    hydra_config = HydraConfig.get()
    config = load_config(cfg)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict), type(resolved)
    command = "python -m experiments.run " + shlex.join(hydra_config.overrides.task)
    folder = Path(hydra_config.runtime.output_dir)
    refuse_used_folder(folder)  # a job of Hydra's own multirun, which no callback could refuse
    given = config, folder, command.strip(), {str(k): v for k, v in resolved.items()}
    if config.engine.num_ranks == 1:
        _check_alone()
        show(execute(*given))
    elif is_rank():
        run_rank(logging.getLogger().level, *given)
    else:
        check_host(config.engine)
        launch(run_rank, config.engine.num_ranks, (logging.getLogger().level, *given))


def _check_alone() -> None:
    """Refuse to run as one of several processes that would not know of one another.

    Raises:
        ConfigError: a launcher started several.
    """
    num_ranks = os.environ["WORLD_SIZE"] if is_rank() else "1"
    if num_ranks != "1":
        raise ConfigError(
            f"this process is one of {num_ranks} ranks, and the engine is to run on one; give "
            f"engine.data_parallel_size={num_ranks} or engine.tensor_parallel_size={num_ranks}, or "
            "start it without torchrun"
        )


def run_rank(
    level: int, config: RunConfig, path: Path, command: str, resolved: Mapping[str, Any]
) -> None:
    """Run a checked configuration as one of its ranks; the first one writes and prints.

    Args:
        level: of the first rank's log.
        config, path, command, resolved: see `execute`.

    Raises:
        SpecdecError: see `execute`; or another rank ended.
    """
    setup_rank_logging(level, path / "run.log")
    sizes = ParallelConfig(config.engine.data_parallel_size, config.engine.tensor_parallel_size)
    groups = init_groups(sizes, device_type(config.engine))
    device = device_of_rank(config.engine, groups)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, device=device))
    result = execute(config, path, command, resolved)
    if groups.rank == 0:
        show(result)


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    register_schemas()
    with contextlib.ExitStack() as stack:
        if is_rank() and not is_first_rank():  # torchrun: Hydra makes a folder for each process
            unwritten = stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-rank-"))
            sys.argv.append(f"hydra.run.dir={unwritten}")
        return hydra_app("run", run_task, "what was measured so far is in the run folder")


if __name__ == "__main__":
    sys.exit(main())
