"""A job of a sweep: which folder it has, when it is done, and how it is run.

A job is one composed configuration of `experiments.run`. Its folder is named by a hash of what in
that determines its result and is finished when it holds `done.json`, which is written last and
tells the code, too; a folder without it is started anew.
"""

import contextlib
import copy
import dataclasses
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from experiments.cli import explain, is_users_mistake
from experiments.provenance import shown_command
from experiments.run import execute
from experiments.run_folder import RunFolder
from experiments.schemas import RunConfig, load_config
from experiments.sweep_code import code_entry, hash_plugins
from specdec.config import EngineConfig
from specdec.errors import ConfigError, SpecdecError
from specdec.log import setup_logging, warn_once
from specdec.tracker import WandbConfig

logger = logging.getLogger(__name__)

DONE, FAILED = "done.json", "failed.json"
_LOCK = ".lock"
_PLACES = ".places"  # in the sweep's folder
# What says nothing about a job's result: where it is recorded and how it is launched.
_NO_RESULT = ("tracker", "sweep")
_HASH_CHARS = 12
# Launchers of several processes on one machine that give them neither cores nor GPUs.
ONE_MACHINE = ("joblib", "ray", "submitit_local")
_WITHOUT_GPUS = ("joblib", "submitit_local")

# Hydra would warn in every worker that an option of a launcher has the name of its plug-in's own.
SAME_NAME = r"\s*'hydra/launcher/\w+' is validated against"
warnings.filterwarnings("ignore", message=SAME_NAME, category=UserWarning)


@dataclass
class SweepOptions:
    """How a sweep is run.

    Args:
        group: of the tracker's runs; None takes the tracker's, or the name of the sweep's folder.
        workers: jobs at once on one machine, where the launcher does not ask a scheduler.
        threads: CPU threads of a job; None shares the cores out to the workers.
        gpus: GPUs of a job where the launcher asks for them.
    """

    group: str | None = None
    workers: int = 2
    threads: int | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        """Check the counts."""
        for name, lowest in (("workers", 1), ("threads", 1), ("gpus", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"sweep.{name}={value} is not allowed; give >= {lowest}")


@dataclass
class SweepConfig(RunConfig):
    """Root of `conf/sweep.yaml`: a run, and how the sweep over runs is done."""

    sweep: SweepOptions = field(default_factory=SweepOptions)


@dataclass(frozen=True)
class Job:
    """A job before it is launched.

    Args:
        key: names its folder.
        overrides: that tell it from the sweep's other jobs.
        mistake: why it cannot be run, None where its configuration is sound.
        plugins: hashes of the source of its plug-ins (`experiments.sweep_code`).
    """

    key: str
    overrides: tuple[str, ...]
    mistake: str | None = None
    plugins: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    seconds: float | None  # None where it is not done
    reason: str | None  # why it is not done

    @property
    def is_done(self) -> bool:
        """Return whether the job's folder is finished."""
        return self.reason is None


def resolved_job(cfg: DictConfig) -> dict[str, Any]:
    """Return a job's configuration as plain values: that of `experiments.run`."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict), type(values)
    return {str(key): value for key, value in values.items() if key != "sweep"}


def job_key(resolved: Mapping[str, Any]) -> str:
    """Return the hash of the values that determine a job's result, as a folder's name."""
    values = {key: value for key, value in resolved.items() if key not in _NO_RESULT}
    text = json.dumps(_text_keys(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


def _text_keys(value: Any) -> Any:
    """Return a value whose mappings have texts as keys, so that they have an order."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(inner) for key, inner in value.items()}
    return [_text_keys(inner) for inner in value] if isinstance(value, list) else value


def make_job(cfg: DictConfig, overrides: tuple[str, ...]) -> Job:
    """Return the job of a composed configuration, checked as far as needs no model.

    Args:
        cfg: from `conf/sweep.yaml`, with or without its key "hydra".
        overrides: shown for it.
    """
    own = copy.deepcopy(cfg)
    with read_write(own), open_dict(own):
        own.pop("hydra", None)  # has values that only a launched job knows
    key = "-"
    try:
        key = job_key(resolved_job(own))
        plugins = hash_plugins(load_job(own))
    except (SpecdecError, OmegaConfBaseException) as error:
        return Job(key, overrides, explain(error))
    return Job(key, overrides, plugins=plugins)


def load_job(cfg: DictConfig) -> SweepConfig:
    """Return a job's typed configuration.

    Raises:
        ConfigError: one sentence that names the key, the value and what is allowed.
    """
    config = load_config(cfg)
    assert isinstance(config, SweepConfig), type(config)
    return config


def read_done(folder: Path) -> dict[str, Any] | None:
    """Return the done marker of a job's folder, None where the job is to be run.

    It is run again, too, where a trace that the marker names is gone: nothing could be told of it.
    """
    try:
        done = json.loads((folder / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(done, dict) or done.get("config_hash") != folder.name:
        return None
    lost = [name for name in done.get("traces", ()) if not (folder / name).is_file()]
    if lost:
        warn_once(logger, f"job {folder.name} has lost {', '.join(lost)} and runs again")
        return None
    return done


def has_result(folder: Path) -> bool:
    """Return whether a job has ended by itself, done or failed."""
    return read_done(folder) is not None or (folder / FAILED).is_file()


def outcome_of(job: Job, sweep_dir: Path, ended: str | None) -> Outcome:
    """Return what became of a job that was launched, or refused.

    Args:
        job: which.
        sweep_dir: the sweep's folder.
        ended: why the launcher ended early, None where it did not.
    """
    if job.mistake is not None:
        return Outcome(job, None, job.mistake)
    folder = sweep_dir / job.key
    done = read_done(folder)
    if done is not None:
        return Outcome(job, float(done["seconds"]), None)
    try:
        reason = str(json.loads((folder / FAILED).read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError):
        reason = ended or "it left no result: its process ended early"
    return Outcome(job, None, reason)


def wandb_of(config: WandbConfig, group: str, is_debug: bool) -> WandbConfig:
    """Return the tracker's options of a job, in the sweep's group.

    The preset `debug` promises that nothing leaves the machine.
    """
    mode = "offline" if is_debug and config.mode == "auto" else config.mode
    return dataclasses.replace(config, group=group, mode=mode)


def group_of(tracker: WandbConfig, given: str | None, sweep_dir: Path) -> str:
    """Return the name that the tracker's runs of a sweep have in common.

    Args:
        tracker: its options.
        given: `sweep.group`.
        sweep_dir: the sweep's folder.
    """
    return given or tracker.group or sweep_dir.resolve().name


def is_debug(hydra_config: Any) -> bool:
    """Return whether a sweep was composed with a preset of the group `debug`."""
    return hydra_config.runtime.choices.get("debug") not in (None, "null")


def run_sweep_job(cfg: DictConfig) -> None:
    """Run one job in Hydra's output folder, unless it is done; a failure is left in its folder.

    Whatever launched it goes on with the next job: nothing but an interrupt is raised.
    """
    setup_logging(logging.getLogger().level)  # the level that Hydra was asked for
    hydra_config = HydraConfig.get()
    folder, sweep_dir = Path(hydra_config.runtime.output_dir), Path(hydra_config.sweep.dir)
    shown = " ".join(hydra_config.overrides.task)
    with _alone(folder):
        if read_done(folder) is not None:  # meanwhile, by another command
            logger.info("job %s is done: %s", folder.name, shown)
            return
        started = time.monotonic()
        try:
            _clear(folder)
            config = load_job(cfg)
            code = code_entry(hash_plugins(config))
            _run_job(config, resolved_job(cfg), folder, sweep_dir)
            _mark_done(folder, time.monotonic() - started, code)
        except Exception as error:  # of any kind: the other jobs of the sweep do not depend on it
            known = is_users_mistake(error)
            reason = explain(error) if known else f"{type(error).__name__}: {error}"
            reason = " ".join(reason.split())
            logger.error("job %s failed: %s", folder.name, reason, exc_info=not known)
            with contextlib.suppress(SpecdecError):  # the disk may be what failed
                RunFolder(folder).write_json(FAILED, {"reason": reason, "overrides": shown})
            return
        finally:
            _free_memory()
        logger.info("job %s took %.1f s: %s", folder.name, time.monotonic() - started, shown)


def _free_memory() -> None:
    """Give back what a job held: the next in this process sizes its KV cache by what is free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _run_job(config: SweepConfig, resolved: dict[str, Any], folder: Path, sweep_dir: Path) -> None:
    hydra_config = HydraConfig.get()
    if isinstance(config.tracker, WandbConfig):
        group = group_of(config.tracker, config.sweep.group, sweep_dir)
        config.tracker = wandb_of(config.tracker, group, is_debug(hydra_config))
        resolved["tracker"] = dataclasses.asdict(config.tracker)
    given = [text for text in hydra_config.overrides.task if not text.startswith("sweep.")]
    command = shown_command("experiments.run", given)
    launcher = hydra_config.runtime.choices.get("hydra/launcher")
    _limit_threads(config.sweep, launcher)
    num_gpus = torch.cuda.device_count() if launcher in _WITHOUT_GPUS else 0
    with _gpu_of_its_own(config.engine, sweep_dir, num_gpus, config.sweep.workers) as engine:
        config.engine = engine
        execute(config, folder, command, resolved)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a job's folder; a kill lets them in again."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("job %s runs in another process; waiting for its end", folder.name)
        lock.acquire()
    except NotImplementedError:  # some file systems of clusters have no locks
        warn_once(logger, f"{folder.parent} knows no locks: run one sweep at a time in it")
    try:
        yield
    finally:
        lock.release()


def _clear(folder: Path) -> None:
    """Remove what a cut run left, but Hydra's own files and the log that is being written."""
    for path in folder.iterdir():
        if path.name in (_LOCK, ".hydra") or path.suffix == ".log":
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _mark_done(folder: Path, seconds: float, code: Mapping[str, Any]) -> None:
    """Write the marker that the job is finished, the last file of its folder."""
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    marker = {
        "config_hash": folder.name,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "traces": sorted(path.name for path in folder.glob("*.parquet")),
        **code,
        "versions": provenance["versions"],
    }
    RunFolder(folder).write_json(DONE, marker)


def _limit_threads(options: SweepOptions, launcher: str | None) -> None:
    """Share a machine's cores out to the jobs that run at once on it."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif launcher in ONE_MACHINE:
        torch.set_num_threads(max(1, _num_cores() // options.workers))


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _gpu_of_its_own(
    engine: EngineConfig, sweep_dir: Path, num_gpus: int, num_workers: int
) -> Iterator[EngineConfig]:
    """Give a job the next GPU, where a launcher of several processes leaves them all to each.

    A worker holds one of as many places as there are workers; places are dealt to GPUs in turn, so
    several share one where there are fewer.

    Args:
        engine: the job's options; a device that they name is kept.
        sweep_dir: holds the places.
        num_gpus: that the process sees; below 2 there is nothing to choose.
        num_workers: jobs at once.
    """
    if num_gpus < 2 or engine.device not in ("auto", "cuda"):
        yield engine
        return
    folder = sweep_dir / _PLACES
    folder.mkdir(exist_ok=True)
    for place in range(num_workers):
        lock = FileLock(folder / str(place))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            yield dataclasses.replace(engine, device=f"cuda:{place % num_gpus}")
        finally:
            lock.release()
        return
    yield engine  # more jobs than workers: another command in this folder
