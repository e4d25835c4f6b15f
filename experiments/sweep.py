"""Run every combination of given values: `python -m experiments.sweep -m drafter=ngram,suffix ...`.

Each combination is a job: one run of `experiments.run` in `<hydra.sweep.dir>/<hash of its
configuration>/`. The same command in the same folder runs what is missing, and what ran with other
source of a plug-in. `hydra/launcher` says where jobs run: in this process, in several (joblib), on
Ray or through submitit (Slurm).
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from experiments.cli import (
    CONF_DIR,
    SCHEMA_SUFFIX,
    VERSION_BASE,
    hydra_app,
    is_users_mistake,
    tell_failure,
    wants_trace,
)
from experiments.schemas import register_schemas
from experiments.sweep_jobs import SweepConfig, outcome_of, run_sweep_job
from experiments.sweep_launch import LAUNCHERS, launch_missing, plan_sweep
from experiments.sweep_results import finish_sweep
from specdec.log import setup_logging

_MULTIRUN = ("-m", "--multirun")
# Flags with which Hydra shows something and runs nothing.
_SHOWS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}


def register_sweep() -> None:
    """Store the schemas in Hydra's ConfigStore, the root's with the key `sweep`."""
    register_schemas()
    store = ConfigStore.instance()
    store.store(name=f"run{SCHEMA_SUFFIX}", node=SweepConfig)
    for name in LAUNCHERS:
        store.store(group="hydra/launcher", name=f"{name}{SCHEMA_SUFFIX}", node=_launcher(name))


def _launcher(name: str) -> Any:
    """Return a launcher's schema from its plug-in; without the plug-in, what only names it."""
    store = ConfigStore.instance()
    if f"{name}.yaml" in store.list("hydra/launcher"):
        return store.load(f"hydra/launcher/{name}.yaml").node
    return {"_target_": f"hydra_plugins.{LAUNCHERS[name].replace('-', '_')}"}


def run_sweep(overrides: Sequence[str]) -> int:
    """Run what is missing of a sweep and report on all of it.

    Args:
        overrides: as on the command line; a value with commas is an axis.

    Returns:
        The exit code: 1 where a job is not done.

    Raises:
        SpecdecError, HydraException, OmegaConfBaseException: the user's mistake, before any job.
    """
    register_sweep()
    # No usage report leaves the machine unless the user wants one.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    setup_logging()
    with initialize_config_dir(str(CONF_DIR), job_name="sweep", version_base=VERSION_BASE):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None, "initialize_config_dir makes it"
        sweep = plan_sweep(hydra, overrides)
        ended = launch_missing(sweep)
    outcomes = [outcome_of(job, sweep.folder, ended.get(job.key)) for job in sweep.jobs]
    return finish_sweep(sweep.config, outcomes, sweep.folder)


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    arguments = sys.argv[1:]
    if _SHOWS.intersection(argument.partition("=")[0] for argument in arguments):
        register_sweep()
        return hydra_app("sweep", run_sweep_job, "nothing was run")
    overrides = [argument for argument in arguments if argument not in _MULTIRUN]
    flags = [argument for argument in overrides if argument.startswith("-")]
    if len(overrides) == len(arguments) or flags:
        what = f"does not know {flags[0]}" if flags else "needs -m"
        print(
            f"error: a sweep {what}; give for instance python -m experiments.sweep -m "
            "drafter=ngram,suffix num_speculative_tokens=2,4 (one run is python -m "
            "experiments.run)",
            file=sys.stderr,
        )
        return 1
    try:
        return run_sweep(overrides)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    except Exception as error:
        if wants_trace() or not is_users_mistake(error):
            raise
        return tell_failure(error)


if __name__ == "__main__":
    sys.exit(main())
