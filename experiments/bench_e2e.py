"""Bench `e2e`: whole steps of real shapes beside their floor, a peer and an aim; on one GPU.

Models with random weights of the shapes of Llama-3.1-8B (in 8 bits, too) and SmolLM2-135M, and
SmolLM2's own weights where they are there, decode with each drafter at each batch. Acceptance is
set, not measured: a synthetic verifier commits exactly three tokens a step (one without a drafter).
For each line:

    ms          wall time of a step, median of repeats (and their range)
    device_ms   the step's graph launched back to back over the same steps; gap_ms is the rest
    host_us     what the host worked in a step
    split       target, verify, draft and inputs by events captured in the graph of another engine,
                whose own step_ms stands beside them
    state       clock, power and limits of the device meanwhile (`experiments.device_state`)
    floor_ms    bytes that no step can do without (`experiments.e2e_floors`) over the read rate
    peer_ms, aim_ms   see `experiments.e2e_cases`

The record is written after every case, so that what was measured outlasts a kill; a case that fails
says why on its line, and one that the time did not allow, too. Lines with an aim come first. Needs
torch, triton, transformers and numpy:

    python -m experiments.bench_e2e --out e2e.json
    python -m experiments.bench_e2e --plot e2e.json e2e.png       (and matplotlib)
    python -m experiments.bench_e2e --table e2e.json              its lines in Markdown
    python -m experiments.bench_e2e --compare old.json new.json   1 where a line became slower
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.device_state import DeviceWatch, Window
from experiments.e2e_cases import (
    FORWARD_AIM,
    FORWARD_PEER,
    KINDS,
    PEER_DEVICE,
    SHAPE_SETS,
    Case,
    ShapeSet,
    list_cases,
)
from experiments.e2e_floors import floor_ms, measure_ceilings, model_elements, step_cost
from experiments.e2e_guard import compare_records
from experiments.e2e_models import ModelStore, text_of, why_not_here
from experiments.e2e_run import (
    collect,
    make_load,
    measure,
    measure_split,
    running,
    time_forward,
)
from experiments.e2e_scale import run_scale
from experiments.e2e_tables import guard_text, line_text, markdown_table, record_text
from experiments.provenance import collect_provenance, device_name, shown_command
from runner.dispatch import on_device
from runner.loader import resolve_device, resolve_dtype
from specdec.errors import ConfigError, SpecdecError

_FORWARDS = ((1, 5), (1, 1), (8, 5), (32, 5), (64, 5))  # requests, query tokens
_SMALL_FACTOR = 2  # repeats of small models, whose steps are the host's, over those of 8B
Save = Callable[[dict[str, Any]], None]


@dataclass
class E2EBenchConfig:
    """What `bench=e2e` runs.

    Args:
        device: a GPU, or "cpu" with tiny shapes for a dry run.
        dtype: of the models.
        shapes: "full", or "tiny": the same cases over models of a few thousand weights.
        cases: "model drafter" each, such as "8b eagle3"; none runs all.
        batches: requests that run together.
        repeats: batches of requests timed for a line of 8B, twice as many for the others.
        split: also time the phases of a step, in an engine of its own.
        forwards: also time the target's forward alone.
        scale: also measure how time and memory grow with batch, context and K.
        scale_models: over which models.
        max_minutes: cases that begin later are left out.
    """

    name: str = "e2e"
    device: str = "auto"
    dtype: str = "bfloat16"
    shapes: str = "full"
    cases: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    repeats: int = 4
    split: bool = True
    forwards: bool = True
    scale: bool = True
    scale_models: list[str] = field(default_factory=lambda: ["135m"])
    max_minutes: float = 8.0

    def __post_init__(self) -> None:
        """Check names and counts."""
        kinds = [f"{model} {drafter}" for model, drafter in KINDS]
        models = [name for name in SHAPE_SETS["full"].models if "_" not in name]
        for name, values, allowed in (
            ("shapes", [self.shapes], list(SHAPE_SETS)),
            ("cases", self.cases, kinds),
            ("scale_models", self.scale_models, models),
        ):
            for value in values:
                if value not in allowed:
                    raise ConfigError(
                        f"bench.{name} holds {value!r}; allowed are {', '.join(allowed)}"
                    )
        if self.repeats < 1:
            raise ConfigError(f"bench.repeats={self.repeats} is not allowed; give >= 1")
        if min(self.batches, default=0) < 1:
            raise ConfigError(f"bench.batches={self.batches} is not allowed; give integers >= 1")
        if not 0 <= self.max_minutes < math.inf:
            raise ConfigError(f"bench.max_minutes={self.max_minutes} is not allowed; give >= 0")


class E2EBench:
    """One run: its record grows case by case.

    Args:
        config: what to run.
        provenance: goes into the record.
        save: is given the record whenever it grew.
        folder: for files of the run, such as heads.

    Raises:
        ConfigError: full shapes without a GPU.
    """

    def __init__(
        self, config: E2EBenchConfig, provenance: dict[str, Any], save: Save, folder: Path
    ) -> None:
        self.config, self._save = config, save
        self.device = resolve_device(config.device)
        if self.device.type != "cuda" and config.shapes == "full":
            raise ConfigError(
                "bench=e2e measures steps on a GPU; give a CUDA device, or shapes=tiny for a dry "
                "run on a CPU"
            )
        dtype = resolve_dtype(config.dtype, self.device)
        self.shapes: ShapeSet = SHAPE_SETS[config.shapes]
        self.store = ModelStore(self.shapes, dtype, self.device, folder)
        self._watch = DeviceWatch(self.device)
        self._deadline = time.monotonic() + 60 * config.max_minutes
        self._has_peer = config.shapes == "full" and PEER_DEVICE in device_name(self.device)
        cases = list_cases(config.batches, config.cases)
        self._cases = {case.name: case for case in cases}
        shown = {"prompt_len": self.shapes.prompt_len, "output_len": self.shapes.output_len}
        self.record: dict[str, Any] = {
            "bench": config.name,
            "provenance": provenance,
            "config": asdict(config) | shown,
            "shapes": {name: asdict(shape) for name, shape in self.shapes.models.items()},
            "ceilings": {},
            "lines": [self._new_line(case) for case in cases],
            "forwards": [],
            "scale": [],
            "complete": False,
            "failed": False,
        }

    def _keep(self) -> None:
        """Save the record as it is."""
        record = self.record
        lines = (*record["lines"], *record["forwards"], *record["scale"])
        record["failed"] = any(
            line["status"] == "failed" or bool(line.get("split_reason")) for line in lines
        )
        self._save(record)

    def run(self) -> dict[str, Any]:
        """Run everything that the time allows; returns the record."""
        with torch.random.fork_rng(), self._watch:
            torch.manual_seed(0)
            self.record["ceilings"] = measure_ceilings(self.device, self.store.dtype)
            collect(self.device)
            self._keep()
            lines = self.record["lines"]
            for line in lines:
                self._attempt(line, self._measure)
                print(line_text(line), flush=True)
                if line["name"] == self._last_big():
                    self._run_forwards()
            if not self.record["forwards"]:
                self._run_forwards()
            if self.config.split:
                for line in lines:
                    self._split(line)
            if self.config.scale:
                models, ceilings = self.config.scale_models, self.record["ceilings"]
                rows = self.record["scale"]
                run_scale(self.store, models, ceilings, rows, self._why_late)
        self.record["complete"] = True
        self._keep()
        return self.record

    def _new_line(self, case: Case) -> dict[str, Any]:
        peer = case.peer if self._has_peer else None
        return {
            "name": case.name,
            "model": case.model,
            "drafter": case.drafter,
            "batch": case.batch,
            "num_drafts": case.num_drafts,
            "status": "not run",
            "reason": "the run ended before it",
            "peer_kind": peer and peer[0],
            "peer_ms": peer and peer[1],
            "aim_ms": case.aim_ms if self._has_peer else None,
        }

    def _last_big(self) -> str | None:
        """Return the last line of 8B that has an aim: the forward alone comes behind it."""
        names = [c.name for c in self._cases.values() if c.model == "8b" and c.aim_ms is not None]
        return names[-1] if names else None

    def _why_late(self, seconds: float = 0.0) -> str | None:
        """Return why something that takes so long is not begun any more, or None."""
        if time.monotonic() + seconds < self._deadline:
            return None
        return f"it would not end within max_minutes={self.config.max_minutes:g}"

    def _attempt(self, line: dict[str, Any], measure_line: Callable[..., dict[str, Any]]) -> None:
        """Measure a line, or say on it why not; save the record."""
        case = self._cases.get(line["name"])
        reason = self._why_late()
        if reason is None and case is not None:
            reason = why_not_here(case, self.config.shapes == "tiny")
        if reason is not None:
            line |= {"status": "not run", "reason": reason}
        else:
            try:
                line |= {"status": "measured", "reason": None} | measure_line(line)
            except Exception as error:  # whatever it is, the other lines still count
                line |= {"status": "failed", "reason": _said(error)}
            collect(self.device)
        self._keep()

    def _measure(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of a case.

        Raises:
            RuntimeError: it did not commit the tokens that were set.
        """
        case, started = self._cases[line["name"]], time.monotonic()
        target = self.store.target(case.model)
        drafter = self.store.drafter(case.model, case.drafter)
        load = make_load(case, self.shapes, target, self.shapes.prompt_len)
        is_big = case.model.startswith("8b")
        repeats = self.config.repeats * (1 if is_big else _SMALL_FACTOR)
        with (
            text_of(case.drafter, target.model),
            running(case, self.shapes, target, drafter) as engine,
        ):
            windows: list[Window] = []
            found = measure(engine, load, repeats, lambda: _noted(windows))
            found["state"] = self._watch.during(windows)
            found["steps_in_flight"] = engine.max_steps_in_flight
        wanted, committed = case.tokens_per_step, found["tokens_per_step"]
        if wanted is not None and abs(committed - wanted) > 1e-6:
            raise RuntimeError(
                f"{committed:.3f} tokens were committed a request and step, {wanted} were set"
            )
        cost = step_cost(
            self.shapes,
            case.model,
            case.drafter,
            case.batch,
            found["context"],
            case.num_drafts,
            self.store.dtype.itemsize,
        )
        floor = floor_ms(cost.num_bytes, self.record["ceilings"])
        ms, peer, aim = found["ms"], line["peer_ms"], line["aim_ms"]
        return found | {
            "bytes": {
                "target": cost.target_bytes,
                "drafter": cost.drafter_bytes,
                "kv": cost.kv_bytes,
            },
            "floor_ms": floor,
            "over_floor": ms / floor,
            "over_peer": peer and ms / peer,
            "aim_met": aim and ms <= aim,
            "took_s": round(time.monotonic() - started, 1),
        }

    def _split(self, line: dict[str, Any]) -> None:
        """Add the phases of a measured line, timed in an engine of their own."""
        if line["status"] != "measured":
            return
        if self._why_late() is not None:
            line["split"] = None
            return
        case = self._cases[line["name"]]
        try:
            target = self.store.target(case.model)
            drafter = self.store.drafter(case.model, case.drafter)
            load = make_load(case, self.shapes, target, self.shapes.prompt_len)
            options = {"phase_events": True}
            with (
                text_of(case.drafter, target.model),
                running(case, self.shapes, target, drafter, **options) as engine,
            ):
                line["split"] = measure_split(engine, load)
        except Exception as error:  # whatever it is, the line's own figures still count
            line |= {"split": None, "split_reason": _said(error)}
        collect(self.device)
        self._keep()

    def _run_forwards(self) -> None:
        """Time the forward of the 8B shape alone."""
        if not self.config.forwards:
            return
        for num_reqs, query_len in _FORWARDS:
            if num_reqs not in self.config.batches:
                continue
            name = f"8b forward {num_reqs}x{query_len}"
            line: dict[str, Any] = {"name": name, "status": "not run", "reason": None}
            line |= {"num_reqs": num_reqs, "query_len": query_len}
            self.record["forwards"].append(line)
            self._attempt(line, self._forward)
            print(line_text(line), flush=True)

    def _forward(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the time of a forward beside that of reading its weights."""
        num_reqs, query_len = line["num_reqs"], line["query_len"]
        shapes, model = self.shapes, self.store.target("8b").model
        context = shapes.prompt_len + shapes.output_len // 2
        windows: list[Window] = []
        with _noted(windows):
            times = time_forward(model, num_reqs, query_len, context, shapes.max_model_len)
        ms = times[len(times) // 2]
        num_bytes = model_elements(shapes.models["8b"]) * self.store.dtype.itemsize
        floor = floor_ms(num_bytes, self.record["ceilings"])
        has_aim = self._has_peer and (num_reqs, query_len) == (1, 5)
        return {
            "ms": ms,
            "ms_min": times[0],
            "ms_max": times[-1],
            "state": self._watch.during(windows),
            "context": context,
            "floor_ms": floor,
            "over_floor": ms / floor,
            "aim_over_floor": FORWARD_AIM if has_aim else None,
            "peer_over_floor": FORWARD_PEER if has_aim else None,
            "aim_met": ms / floor <= FORWARD_AIM if has_aim else None,
        }


@contextmanager
def _noted(windows: list[Window]) -> Iterator[None]:
    """Note when a block began and ended."""
    began = time.time()
    try:
        yield
    finally:
        windows.append((began, time.time()))


def _said(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _finite(value: Any) -> Any:
    """Return a record with null for what is not a number."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    text = json.dumps(_finite(record), indent=2, allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of this bench.

    Raises:
        ConfigError: it is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"record {str(path)!r} cannot be read ({error})") from error
    bench = record.get("bench") if isinstance(record, dict) else None
    if bench != "e2e":
        raise ConfigError(f"{str(path)!r} is of bench={bench!r}; give a record of bench=e2e")
    return record


def run_e2e_bench(config: E2EBenchConfig, save: Save, provenance: dict[str, Any]) -> dict[str, Any]:
    """Run the bench.

    Args:
        config: what to run.
        save: is given the record whenever it grew.
        provenance: goes into the record.

    Returns:
        The record; its "failed" says whether any line ended in an error.
    """
    device = resolve_device(config.device)
    with tempfile.TemporaryDirectory() as folder, on_device(device):
        return E2EBench(config, provenance, save, Path(folder)).run()


def _parse() -> dict[str, Any]:
    """Return what was given on the command line."""
    parser = argparse.ArgumentParser(description="whole steps beside floor, peer and aim")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="where the JSON record goes")
    task.add_argument("--plot", nargs=2, type=Path, metavar=("RECORD", "PNG"))
    task.add_argument("--table", type=Path, metavar="RECORD")
    task.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    for name in ("device", "dtype", "shapes"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--max-minutes", type=float)
    parser.add_argument("--scale-models", nargs="+")
    for name in ("split", "forwards", "scale"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    given = vars(parser.parse_args())
    return {key: value for key, value in given.items() if value is not None}


def _run(out: Path, given: dict[str, Any]) -> int:
    config = E2EBenchConfig(**given)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    command = shown_command("experiments.bench_e2e", sys.argv[1:])
    provenance = collect_provenance(command, 0, device, dtype)
    started = time.monotonic()

    def save(record: dict[str, Any]) -> None:
        provenance["duration_s"] = round(time.monotonic() - started, 1)
        write_record(out, record)

    record = run_e2e_bench(config, save, provenance)
    print(record_text(record))
    return int(record["failed"])


def main() -> int:
    """Run, plot, show or compare without Hydra; returns 1 after a sentence or for what it found."""
    given = _parse()
    try:
        if "plot" in given:
            from experiments.e2e_plot import plot_record  # here: a GPU host lacks matplotlib

            plot_record(read_record(given["plot"][0]), given["plot"][1])
            return 0
        if "table" in given:
            print(markdown_table(read_record(given["table"])))
            return 0
        if "compare" in given:
            old, new = (read_record(path) for path in given["compare"])
            verdicts = compare_records(old, new)
            print(guard_text(verdicts))
            return int(any(verdict.verdict == "slower" for verdict in verdicts))
        return _run(given.pop("out"), given)
    except KeyboardInterrupt:
        print("interrupted; the record holds what was measured", file=sys.stderr)
        return 130
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
