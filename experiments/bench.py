"""Record figures: `python -m experiments.bench bench=generate files=[a.jsonl,b.jsonl]`."""

import dataclasses
import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from experiments.bench_generate import (
    GenerateBenchConfig,
    run_generate_bench,
    summarise_generate_bench,
)
from experiments.cli import hydra_app
from experiments.prompts import Question, builtin_questions, load_questions, select_questions
from experiments.provenance import collect_provenance
from runner.loader import resolve_device, resolve_dtype
from specdec.log import setup_logging


@dataclass
class BenchAppConfig:
    """Root of `conf/bench.yaml`.

    Args:
        bench: which bench, and its parameters.
        files: question files; empty takes the project's own questions.
        record: where the JSON record goes beside the run's folder.
    """

    bench: GenerateBenchConfig = field(default_factory=GenerateBenchConfig)
    files: list[str] = field(default_factory=list)
    record: str | None = None


def bench_questions(files: list[str], per_category: int) -> list[Question]:
    """Return the questions of a bench; a file's name becomes the category of its questions.

    Raises:
        ConfigError: a file that cannot be read.
    """
    if not files:
        return select_questions(builtin_questions(), per_category, None)
    chosen = []
    for name in files:
        stem = Path(name).stem
        for question in load_questions(name)[:per_category]:
            renamed = dataclasses.replace(
                question, question_id=f"{stem}/{question.question_id}", category=stem
            )
            chosen.append(renamed)
    return chosen


def bench_task(cfg: DictConfig) -> None:
    """Run a composed bench, print its table and write its record."""
    setup_logging()
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, BenchAppConfig), type(config)
    hydra_config = HydraConfig.get()
    command = "python -m experiments.bench " + shlex.join(hydra_config.overrides.task)
    for name in config.files:  # a record is published: it names no folder of this machine
        command = command.replace(name, os.path.relpath(name))
    bench = config.bench
    device = resolve_device(bench.device)
    provenance = collect_provenance(
        command.strip(), seed=0, device=device, dtype=resolve_dtype(bench.dtype, device)
    )
    questions = bench_questions(config.files, bench.per_category)
    rows = run_generate_bench(bench, questions)
    summary = summarise_generate_bench(rows)
    sums = rows.pivot_table(
        index=["arm", "category"],
        values=["num_tokens", "wall_s", "num_steps", "num_verify_tokens"],
        aggfunc="sum",
    )
    record = {
        "bench": bench.name,
        "provenance": provenance,
        "config": dataclasses.asdict(bench) | {"files": [Path(f).name for f in config.files]},
        "summary": _records(summary),
        "by_category": _records(sums.reset_index()),
    }
    folder = Path(hydra_config.runtime.output_dir)
    rows.to_parquet(folder / "rows.parquet", index=False)
    targets = [folder / "bench.json"] + ([Path(config.record)] if config.record else [])
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=2) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(_table(record["summary"]))
    print("record", *targets)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as plain values, null for what is not a number."""
    return json.loads(frame.to_json(orient="records") or "[]")


def _table(summary: list[dict[str, Any]]) -> Table:
    """Lay out the summary for a terminal."""
    table = Table(title="generate: factors with 95 % bootstrap intervals over prompts")
    for name in (
        "arm",
        "tokens/s",
        "accepted length",
        "over transformers",
        "over none",
        "same text",
    ):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for line in summary:
        length = line["accepted_length"]
        table.add_row(
            line["arm"],
            f"{line['tokens_per_s']:.1f}",
            "" if length is None else f"{length:.2f}",
            *(
                f"{line[f'over_{base}']:.2f} [{line[f'over_{base}_low']:.2f}, "
                f"{line[f'over_{base}_high']:.2f}]"
                for base in ("transformers", "none")
            ),
            f"{line['same_text']}/{line['num_prompts']}",
        )
    return table


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    store = ConfigStore.instance()
    store.store(name="bench_app_schema", node=BenchAppConfig)
    store.store(group="bench", name="generate_schema", node=GenerateBenchConfig)
    return hydra_app("bench", bench_task)


if __name__ == "__main__":
    sys.exit(main())
