"""Record figures: `python -m experiments.bench bench=generate files=[a.jsonl,b.jsonl]`.

Each bench is a module of its own that needs no Hydra; here it gets its options, its tables and its
record: JSON with provenance in the run's folder, and where `record` says.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from experiments.bench_attention import (
    AttentionBenchConfig,
    bench_cases,
    measure_read_ceiling,
    run_attention_bench,
)
from experiments.bench_e2e import E2EBenchConfig, run_e2e_bench, write_record
from experiments.bench_generate import (
    GenerateBenchConfig,
    run_generate_bench,
    summarise_generate_bench,
)
from experiments.bench_host import run_host_bench
from experiments.bench_sampler import SamplerBenchConfig, sampler_record
from experiments.bench_step import StepBenchConfig, run_step_bench
from experiments.bench_tables import (
    attention_tables,
    e2e_tables,
    generate_tables,
    line_tables,
    sampler_tables,
    step_tables,
)
from experiments.bench_trace import TraceBenchConfig, run_trace_bench
from experiments.cli import SCHEMA_SUFFIX, hydra_app, unknown_name
from experiments.prompts import Question, builtin_questions, load_questions, select_questions
from experiments.provenance import collect_provenance, shown_command, shown_path
from experiments.schemas import check_known, fillable
from runner.loader import resolve_device, resolve_dtype
from specdec.errors import ConfigError, SpecdecError
from specdec.log import setup_logging

_TABLE_WIDTH = 120


@dataclass
class BenchAppConfig:
    """Root of `conf/bench.yaml`.

    Args:
        bench: which bench, and its parameters.
        files: question files of `bench=generate`; empty takes the project's own questions.
        record: where the JSON record goes beside the run's folder.
    """

    bench: Any = MISSING
    files: list[str] = field(default_factory=list)
    record: str | None = None


@dataclass
class HostBenchConfig:
    """What `bench=host` runs, on the CPU.

    Args:
        batch_sizes: requests a step.
        num_blocks: blocks of steps measured.
        steps_a_block: steps a block.
    """

    name: str = "host"
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    num_blocks: int = 40
    steps_a_block: int = 50

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("batch_sizes", "num_blocks", "steps_a_block"):
            value = getattr(self, name)
            if min(value if isinstance(value, list) else [value], default=0) < 1:
                raise ConfigError(f"bench.{name}={value} is not allowed; give >= 1")


@dataclass(frozen=True)
class Bench:
    """A bench of this app.

    Args:
        config_cls: its options.
        run: takes its options, the question files and the run's folder; returns its record.
        tables: lays a record out for a terminal.
        takes_files: whether question files mean something to it.
    """

    config_cls: type
    run: Callable[[Any, list[str], Path], dict[str, Any]]
    tables: Callable[[Mapping[str, Any]], list[Table]]
    takes_files: bool = False


def bench_questions(files: list[str], per_category: int) -> list[Question]:
    """Return the questions of a bench; a file's name becomes the category of its questions.

    Raises:
        ConfigError: a file that cannot be read, or two of one name.
    """
    if not files:
        return select_questions(builtin_questions(), per_category, None)
    stems = [Path(name).stem for name in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ConfigError(
                f"files={files} holds {stems.count(stem)} files of the name {stem!r}, which is to "
                "be the category of their questions; give files of different names"
            )
    chosen = []
    for name in files:
        stem = Path(name).stem
        for question in load_questions(name)[:per_category]:
            renamed = dataclasses.replace(
                question, question_id=f"{stem}/{question.question_id}", category=stem
            )
            chosen.append(renamed)
    return chosen


def _generate(config: GenerateBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
    rows = run_generate_bench(config, bench_questions(files, config.per_category))
    rows.to_parquet(folder / "rows.parquet", index=False)
    sums = rows.pivot_table(
        index=["arm", "category"],
        values=["num_tokens", "wall_s", "num_steps", "num_verify_tokens"],
        aggfunc="sum",
    )
    return {
        "config": dataclasses.asdict(config)
        | {"target": shown_path(config.target), "files": [Path(f).name for f in files]},
        "summary": summarise_generate_bench(rows).to_dict("records"),
        "by_category": sums.reset_index().to_dict("records"),
    }


def _attention(config: AttentionBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
    device = resolve_device(config.device)
    if device.type != "cuda":
        raise ConfigError("bench=attention measures a kernel on a GPU; give a CUDA device")
    dtype = resolve_dtype(config.dtype, device)
    cases = bench_cases(config, dtype)
    with torch.cuda.device(device):
        ceiling = measure_read_ceiling(device)
        lines = run_attention_bench(cases, device, ceiling)
    return {
        "config": dataclasses.asdict(config),
        "read_ceiling_gb_per_s": ceiling,
        "lines": lines,
    }


def _sampler(config: SamplerBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
    device = resolve_device(config.device)
    if device.type != "cuda":
        raise ConfigError("bench=sampler measures kernels on a GPU; give a CUDA device")
    return sampler_record(config, device)


def _host(config: HostBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
    lines = run_host_bench(config.batch_sizes, config.num_blocks, config.steps_a_block)
    return {"config": dataclasses.asdict(config), "lines": lines}


def _e2e(config: E2EBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
    # Written after every case, so that what was measured outlasts a kill.
    record = run_e2e_bench(config, lambda found: write_record(folder / "bench.json", found), {})
    del record["provenance"]
    return record


BENCHES = {
    "generate": Bench(GenerateBenchConfig, _generate, generate_tables, takes_files=True),
    "attention": Bench(AttentionBenchConfig, _attention, attention_tables),
    "sampler": Bench(SamplerBenchConfig, _sampler, sampler_tables),
    "host": Bench(HostBenchConfig, _host, line_tables),
    "trace": Bench(
        TraceBenchConfig, lambda config, *_: {"lines": run_trace_bench(config)}, line_tables
    ),
    "step": Bench(StepBenchConfig, lambda config, *_: run_step_bench(config), step_tables),
    "e2e": Bench(E2EBenchConfig, _e2e, e2e_tables),
}


def load_bench(cfg: DictConfig) -> tuple[Bench, Any, BenchAppConfig]:
    """Turn a composed configuration into a bench, its checked options and the app's.

    Raises:
        ConfigError: one sentence that names the key, the value and what is allowed.
    """
    app = OmegaConf.to_object(cfg)
    assert isinstance(app, BenchAppConfig), type(app)
    check_known(vars(app), [f.name for f in dataclasses.fields(app)], "")
    values = dict(vars(app.bench)) if dataclasses.is_dataclass(app.bench) else {}
    name = values.get("name")
    if not isinstance(name, str) or name not in BENCHES:
        raise ConfigError(unknown_name("bench", str(name), list(BENCHES)))
    bench = BENCHES[name]
    check_known(values, [f.name for f in dataclasses.fields(bench.config_cls)], "bench.")
    if app.files and not bench.takes_files:
        raise ConfigError(f"files={app.files} mean nothing to bench={name}; leave them out")
    return bench, bench.config_cls(**values), app


def bench_task(cfg: DictConfig) -> None:
    """Run a composed bench, print its tables and write its record."""
    setup_logging()
    bench, config, app = load_bench(cfg)
    hydra_config = HydraConfig.get()
    target = getattr(config, "target", None)
    paths = [name for name in (*app.files, app.record, target) if name]
    command = shown_command("experiments.bench", hydra_config.overrides.task, paths)
    device = resolve_device(getattr(config, "device", "cpu"))
    dtype = resolve_dtype(getattr(config, "dtype", "float32"), device)
    provenance = collect_provenance(command, seed=0, device=device, dtype=dtype)
    if hasattr(config, "dtypes"):
        provenance["dtype"] = ", ".join(config.dtypes)
    folder = Path(hydra_config.runtime.output_dir)
    started = time.monotonic()
    record = bench.run(config, app.files, folder)
    provenance["duration_s"] = round(time.monotonic() - started, 1)
    record = plain({"bench": config.name, "provenance": provenance, **record})
    targets = [folder / "bench.json"] + ([Path(app.record)] if app.record else [])
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for table in bench.tables(record):
        console.print(table)
    print("record", *targets)
    if record.get("failed"):
        raise SpecdecError("some cases failed; the record says which, and why")


def plain(value: Any) -> Any:
    """Return a record as JSON has it: null for what is not a number."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def register_benches() -> None:
    """Store the app's schema and every bench's in Hydra's ConfigStore."""
    store = ConfigStore.instance()
    store.store(name=f"bench_app{SCHEMA_SUFFIX}", node=BenchAppConfig)
    for name, bench in BENCHES.items():
        node = fillable(bench.config_cls)
        store.store(group="bench", name=f"{name}{SCHEMA_SUFFIX}", node=node)


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    register_benches()
    return hydra_app("bench", bench_task, "a bench records nothing before its end")


if __name__ == "__main__":
    sys.exit(main())
