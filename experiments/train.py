"""Train drafters: `python -m experiments.train stage=data`, then `fit` and `eval`, or `all`.

Each stage is a module of `experiments.training` that needs no Hydra; here it gets its options, the
run's folder and the tracker. A run of the same `name` that was stopped goes on where it was.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments.cli import SCHEMA_SUFFIX, hydra_app, unknown_name
from experiments.provenance import shown_command
from experiments.schemas import TargetConfig, check_known, register_schemas
from experiments.training.config import EvalConfig, FitConfig
from experiments.training.data import DataConfig, run_data
from experiments.training.eval import run_eval
from experiments.training.stage import StageRun, typed_config
from specdec.errors import ConfigError
from specdec.log import setup_logging
from specdec.tracker import Tracker, TrackerConfig, make_tracker

logger = logging.getLogger(__name__)


@dataclass
class TrainConfig:
    """Root of `conf/train.yaml`.

    Args:
        stage: one of STAGES, or "all" of them in their order.
        name: of the run and its folder; the same name goes on with what is there.
        dataset: folder that `data` writes and `fit` reads; several runs may share one.
        seed: of everything that is drawn.
        data, fit, eval: the stages' options.
    """

    stage: str = "all"
    name: str = MISSING
    dataset: str = MISSING
    seed: int = 0
    target: TargetConfig = field(default_factory=TargetConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    data: Any = MISSING
    fit: Any = MISSING
    eval: Any = MISSING


@dataclass(frozen=True)
class Stage:
    """A stage of this app.

    Args:
        config_cls: its options; its group has the stage's name.
        run: takes them and where it writes; returns its record.
    """

    config_cls: type
    run: Callable[[Any, StageRun], Mapping[str, Any]]


def _run_fit(config: FitConfig, run: StageRun) -> Mapping[str, Any]:
    from experiments.training.fit import run_fit  # here: the other stages need no accelerate

    return run_fit(config, run)


STAGES = {
    "data": Stage(DataConfig, run_data),
    "fit": Stage(FitConfig, _run_fit),
    "eval": Stage(EvalConfig, run_eval),
}


def load_train(cfg: DictConfig) -> tuple[TrainConfig, dict[str, Any]]:
    """Turn a composed configuration into the app's options and those of the stages to run.

    Raises:
        ConfigError: one sentence that names the key, the value and what is allowed.
    """
    app = OmegaConf.to_object(cfg)
    assert isinstance(app, TrainConfig), type(app)
    check_known(vars(app), [f.name for f in dataclasses.fields(app)], "")
    if app.stage not in (*STAGES, "all"):
        raise ConfigError(unknown_name("stage", app.stage, [*STAGES, "all"]))
    configs = {}
    for name in STAGES if app.stage == "all" else [app.stage]:
        values = {str(key): value for key, value in dict(getattr(app, name)).items()}
        configs[name] = typed_config(STAGES[name].config_cls, values, name)
    return app, configs


def train_task(cfg: DictConfig) -> None:
    """Run the stages of a composed configuration."""
    setup_logging(logging.getLogger().level)  # the level that Hydra was asked for
    app, configs = load_train(cfg)
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    command = shown_command("experiments.train", hydra_config.overrides.task)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict), type(resolved)
    tracker = make_tracker(app.tracker, {str(k): v for k, v in resolved.items()}, folder, app.name)
    failed = True
    try:
        first_step = 0
        for name, config in configs.items():
            own = Path(app.dataset) if name == "data" else folder / name
            if isinstance(config, EvalConfig) and config.fitted is None:
                here = folder / "fit"
                config = dataclasses.replace(config, fitted=str(here) if here.is_dir() else "")
            logger.info("stage %s: %s", name, own)
            steps = _Steps(tracker, first_step)
            record = STAGES[name].run(config, StageRun(own, command, steps.log))
            first_step = steps.last + 1
            for key, value in record.items():
                print(f"{name}/{key}: {value}")
        failed = False
    finally:
        tracker.finish(failed)


class _Steps:
    """Hands a stage's figures to the tracker, whose steps never fall from stage to stage.

    Args:
        tracker: of the run.
        first: the tracker's step that is the stage's step 0.
    """

    def __init__(self, tracker: Tracker, first: int) -> None:
        self._tracker, self._first = tracker, first
        self.last = first - 1

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record figures at a step of the stage."""
        self.last = max(self.last, self._first + step)
        self._tracker.log(metrics, self.last)


def register_train() -> None:
    """Store the app's schema in Hydra's ConfigStore; the stages' options are checked when read."""
    register_schemas()
    ConfigStore.instance().store(name=f"train{SCHEMA_SUFFIX}", node=TrainConfig)


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    register_train()
    return hydra_app("train", train_task, "the same command goes on where it was")


if __name__ == "__main__":
    sys.exit(main())
