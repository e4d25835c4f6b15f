"""What of a sweep is launched, and how.

Hydra composes each job and its launcher runs them, but which jobs there are is decided here and not
by a sweeper of Hydra's: those that are done must not start a cluster, nor wait in its queue.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.sweep_code import changed_plugins, warn_of_other_code
from experiments.sweep_jobs import (
    DONE,
    FAILED,
    ONE_MACHINE,
    Job,
    has_result,
    make_job,
    read_done,
    run_sweep_job,
)
from specdec.errors import CapacityError, ConfigError
from specdec.log import setup_logging

logger = logging.getLogger(__name__)

# Options of `hydra/launcher` beside Hydra's own: their plug-ins' packages.
LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
# These start every job that they are given at once, whatever there is to run them.
_UNLIMITED = ("submitit_local",)
_REASON_CHARS = 300


@dataclass
class Sweep:
    """A sweep before its jobs are launched.

    Args:
        hydra: that composes.
        config: the sweep's own configuration, with the key "hydra".
        folder: where the jobs' folders are.
        jobs: all that the command names, those of an equal configuration once.
    """

    hydra: Hydra
    config: DictConfig
    folder: Path
    jobs: list[Job]

    @property
    def launcher(self) -> str:
        """Return the launcher's name, an option of `hydra/launcher`."""
        return str(self.config.hydra.runtime.choices["hydra/launcher"])

    def split(self) -> tuple[list[Job], dict[str, list[str]], list[dict[str, Any]]]:
        """Return what is to be done of the jobs that can be run, and what is not.

        Returns:
            The jobs to run; by the name of a job's folder, for those among them that are done with
            other source, the plug-ins whose it is; the markers of all other jobs.
        """
        jobs: list[Job] = []
        outdated: dict[str, list[str]] = {}
        kept: list[dict[str, Any]] = []
        for job in self.jobs:
            done = read_done(self.folder / job.key) if job.mistake is None else None
            changed = [] if done is None else changed_plugins(done, job.plugins)
            if changed:
                outdated[job.key] = changed
            if done is not None and not changed:
                kept.append(done)
            elif job.mistake is None:
                jobs.append(job)
        return jobs, outdated, kept


def plan_sweep(hydra: Hydra, overrides: Sequence[str]) -> Sweep:
    """Compose every job of a command line and check it as far as needs no model.

    Raises:
        HydraException, OmegaConfBaseException: a key or an option that is not known.
    """
    config = hydra.compose_config("sweep", list(overrides), RunMode.MULTIRUN)
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    parsed = parser.parse_overrides(list(config.hydra.overrides.task))
    (combinations,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    jobs: dict[str, Job] = {}
    for number, given in enumerate(combinations):
        cfg = hydra.config_loader.load_sweep_config(config, list(given))
        job = make_job(cfg, tuple(given))
        known = jobs.setdefault(job.key if job.mistake is None else f"mistake {number}", job)
        if known is not job:
            shown = " ".join(known.overrides), " ".join(given)
            logger.info("two jobs are equal and run once: %s; %s", *shown)
    return Sweep(hydra, config, Path(config.hydra.sweep.dir).resolve(), list(jobs.values()))


def launch_missing(sweep: Sweep) -> dict[str, str]:
    """Run the jobs that are not done.

    Returns:
        Why the launcher ended without a job's result, by the name of the job's folder.

    Raises:
        ConfigError: the launcher's package is not installed.
        CapacityError: the sweep's folder cannot be written.
    """
    jobs, outdated, kept = sweep.split()
    logger.info("%d of %d jobs are there already in %s", len(kept), len(sweep.jobs), sweep.folder)
    warn_of_other_code(kept, sweep.folder)
    if outdated:
        names = ", ".join(sorted({name for changed in outdated.values() for name in changed}))
        what = "%d finished jobs ran with other source of %s: they run again, in place of the old"
        logger.warning(what, len(outdated), names)
    ended: dict[str, str] = {}
    if not jobs:
        return ended
    launcher = _Launcher(sweep)
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(sweep.config, sweep.folder / "multirun.yaml")
        for job in jobs:
            (sweep.folder / job.key / FAILED).unlink(missing_ok=True)
        for key in outdated:  # the old result must not be told where the new job fails
            (sweep.folder / key / DONE).unlink(missing_ok=True)
    except OSError as error:
        raise CapacityError(
            f"{sweep.folder} cannot be written ({error.strerror or error}); free some space, make "
            "it writable, or set hydra.sweep.dir to another folder"
        ) from error
    size = sweep.config.sweep.workers if sweep.launcher in _UNLIMITED else len(jobs)
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        reason = launcher.launch(batch, start)
        left = [job for job in batch if not has_result(sweep.folder / job.key)] if reason else []
        ended |= {job.key: str(reason) for job in left}
        # One at a time, so that only the job fails that its worker did not survive. A scheduler
        # still has the others in its queue.
        if sweep.launcher in ONE_MACHINE and len(batch) > 1:
            for job in left:
                ended[job.key] = launcher.launch([job], start) or ""
    return ended


class _Launcher:
    """Hydra's launcher of a sweep.

    Args:
        sweep: what is run.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        context = HydraContext(sweep.hydra.config_loader, Callbacks(sweep.config))
        try:
            self._launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=run_sweep_job, config=sweep.config
            )
        except (ImportError, RuntimeError) as error:
            package = LAUNCHERS.get(sweep.launcher.removesuffix("_cluster"))
            if package is None:
                raise
            raise ConfigError(
                f"hydra/launcher={sweep.launcher} needs the package {package}; "
                'install it with pip install -e ".[sweep]"'
            ) from error

    def launch(self, jobs: Sequence[Job], first: int) -> str | None:
        """Run jobs; return why the launcher ended early, None where it did not.

        Args:
            jobs: at least one.
            first: the number of the first in the sweep.
        """
        given = [[*job.overrides, *self._place(job)] for job in jobs]
        reason = None
        try:
            self._launcher.launch(given, initial_job_idx=first)
        # A worker that died, a scheduler that refused: each launcher has errors of its own.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARS]
        _leave_job_logs()
        if reason is not None:
            logger.error("the launcher %s ended early: %s", self._sweep.launcher, reason)
        return reason

    def _place(self, job: Job) -> list[str]:
        """Return the overrides that put a job into its folder.

        Quoted: a hash may look like a number. Absolute: a worker may have another working folder.
        """
        folder = str(self._sweep.folder).replace("\\", "\\\\").replace("'", "\\'")
        return [f"hydra.sweep.dir='{folder}'", f"hydra.sweep.subdir='{job.key}'"]


def _leave_job_logs() -> None:
    """Close the log of the last job that ran in this process, and log to the terminal again."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            handler.close()
    setup_logging()
