"""Where a run's numbers go beside its folder: Weights & Biases, a CSV file, or nowhere.

A tracker never stops a run: what it cannot do is told once, and the run goes on without it.
"""

import csv
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specdec.errors import ConfigError
from specdec.log import warn_once

logger = logging.getLogger(__name__)

WANDB_MODES = ("auto", "online", "offline", "disabled")
_INIT_TIMEOUT_S = 30.0  # a network that swallows packets must not hold a run for longer
_FINISH_TIMEOUT_S = 120.0  # likewise at its end; what was not sent stays on disk
_SECRET = r"(?:api[-_]?keys?|secrets?|passwords?|token|credentials?)"
_SECRET_KEY = re.compile(rf"(^|[-_]){_SECRET}$", re.IGNORECASE)
# A word of a command line, as a shell takes it.
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""", re.DOTALL)
# The value of an override is the rest of its word; inside a mapping it ends where it is quoted to,
# or before the next key.
_SECRET_OVERRIDE = re.compile(rf"""([^={{\[(]*(?:\b|_){_SECRET}=).+""", re.IGNORECASE | re.DOTALL)
_SECRET_INSIDE = re.compile(
    rf"""((?:\b|_){_SECRET}['"]?\s*[=:]\s*)"""
    r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^\]]*\]|[^,}\]]+)""",
    re.IGNORECASE,
)
_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")  # of an artifact


@dataclass
class TrackerConfig:
    """Base of a tracker's configuration; `name` selects it: "none", "csv" or "wandb"."""

    name: str = "none"


@dataclass
class CsvConfig(TrackerConfig):
    """No parameters."""

    name: str = "csv"


@dataclass
class WandbConfig(TrackerConfig):
    """Parameters of Weights & Biases.

    Args:
        project: the project that runs go to.
        entity: user or team; None takes the account's default.
        group: what runs of one sweep have in common.
        job_type: what kind of run this is in its group.
        tags: free marks.
        mode: "online", "offline", "disabled"; "auto" is online where WANDB_API_KEY is set, else
            offline.
    """

    name: str = "wandb"
    project: str = "specdec"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: str = "auto"

    def __post_init__(self) -> None:
        """Check the mode."""
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"tracker.mode={self.mode!r} is not allowed; give {', '.join(WANDB_MODES)}"
            )

    def resolved_mode(self) -> str:
        """Return the mode with "auto" decided."""
        if self.mode == "auto":
            return "online" if os.environ.get("WANDB_API_KEY") else "offline"
        return self.mode


class Tracker(Protocol):
    """Receives a run's numbers."""

    location: str | None  # where they can be seen, in words; None where they go nowhere

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers named like `accept/length`, at a step that never falls."""
        ...

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record a table; the columns are those of its first row."""
        ...

    def log_pictures(self, pictures: Mapping[str, Path]) -> None:
        """Record image files under names."""
        ...

    def log_artifact_folder(self, folder: Path, name: str) -> None:
        """Record the files that lie directly in a folder."""
        ...

    def log_artifact_files(self, files: Mapping[str, Path], name: str, kind: str) -> None:
        """Record files under paths of their own as one artifact of a kind."""
        ...

    def finish(self, failed: bool = False) -> None:
        """End the run; nothing is recorded afterwards."""
        ...


class NullTracker:
    """Records nothing."""

    location: str | None = None

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Drop the numbers."""

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Drop the table."""

    def log_pictures(self, pictures: Mapping[str, Path]) -> None:
        """Drop the pictures: they stay where they are."""

    def log_artifact_folder(self, folder: Path, name: str) -> None:
        """Drop the files: they stay where they are."""

    def log_artifact_files(self, files: Mapping[str, Path], name: str, kind: str) -> None:
        """Drop the files: they stay where they are."""

    def finish(self, failed: bool = False) -> None:
        """Do nothing."""


class CsvTracker:
    """Writes `metrics.csv` with the columns step, name, value; a table becomes `<name>.csv`.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "metrics.csv"
        self.location: str | None = str(self._path)
        with self._guard():
            folder.mkdir(parents=True, exist_ok=True)
            self._write(self._path, "w", [("step", "name", "value")])

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line a number; the file is closed again, so that a kill loses nothing."""
        with self._guard():
            lines = [("" if step is None else step, k, v) for k, v in metrics.items()]
            self._write(self._path, "a", lines)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table to a file of its own."""
        if rows:
            with self._guard():
                names = list(rows[0])
                lines = [names, *([row.get(name) for name in names] for row in rows)]
                self._write(self._folder / f"{name}.csv", "w", lines)

    def log_pictures(self, pictures: Mapping[str, Path]) -> None:
        """Do nothing: the pictures lie in the run folder already."""

    def log_artifact_folder(self, folder: Path, name: str) -> None:
        """Do nothing: the files lie in the run folder already."""

    def log_artifact_files(self, files: Mapping[str, Path], name: str, kind: str) -> None:
        """Do nothing: the files lie in the run folder already."""

    def finish(self, failed: bool = False) -> None:
        """Do nothing: every line is on disk."""

    @staticmethod
    def _write(path: Path, mode: str, lines: Sequence[Sequence[Any]]) -> None:
        with path.open(mode, newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(lines)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            warn_once(logger, f"tracker csv cannot write ({error}); the run goes on without it")


class WandbTracker:
    """Sends numbers to Weights & Biases, or keeps them for `wandb sync`.

    Args:
        config: project and mode.
        run_config: the run's resolved configuration; values of keys that look like secrets are
            left out.
        folder: wandb's files go below it.
        run_name: shown in the workspace.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_config: Mapping[str, Any],
        folder: Path,
        run_name: str | None = None,
    ) -> None:
        self.location: str | None = None
        self._run: Any = None
        self._is_broken = False  # then nothing more is logged, but the run is still ended
        self._warned = False
        # Artifacts are staged, and logs kept, in the user's home folder otherwise.
        own = {name: str(folder / "wandb") for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
        own["WANDB_SILENT"] = "true"  # the setting alone does not keep the log-in quiet
        self._env = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        mode = config.resolved_mode()
        with self._guard("start" if mode == "offline" else "start online"):
            self._start(config, run_config, folder, run_name, mode)
        if self._run is None and mode == "online":
            self._is_broken = False
            with self._guard("start offline"):
                self._start(config, run_config, folder, run_name, "offline")

    def _start(
        self,
        config: WandbConfig,
        run_config: Mapping[str, Any],
        folder: Path,
        run_name: str | None,
        mode: str,
    ) -> None:
        import wandb  # here, so that only a run that wants it pays for it

        folder.mkdir(parents=True, exist_ok=True)
        ending = {"finish_timeout": _FINISH_TIMEOUT_S, "finish_timeout_raises": True}
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=_INIT_TIMEOUT_S,
            # Host, user, program path and arguments stay out of it.
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            # Older clients know no such limit, and refuse settings that they do not know.
            **{k: v for k, v in ending.items() if k in wandb.Settings.model_fields},
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            job_type=config.job_type,
            tags=config.tags or None,
            name=run_name,
            mode=mode,  # pyright: ignore[reportArgumentType]
            dir=str(folder),
            config=without_secrets(run_config),
            reinit="finish_previous",
            settings=settings,
        )
        if mode == "online":
            self.location = self._run.url
        else:
            self.location = f"{self._run.settings.sync_dir} (send it with `wandb sync <folder>`)"

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers at a step."""
        with self._guard("log"):
            if self._takes_more:
                self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record a table."""
        with self._guard("log a table"):
            if self._takes_more and rows:
                import wandb

                table = wandb.Table(columns=list(rows[0]))
                for row in rows:
                    table.add_data(*(row.get(name) for name in rows[0]))
                self._run.log({name: table})

    def log_pictures(self, pictures: Mapping[str, Path]) -> None:
        """Record image files under names."""
        with self._guard("log pictures"):
            if self._takes_more and pictures:
                import wandb

                self._run.log({name: wandb.Image(str(p)) for name, p in pictures.items()})

    def log_artifact_folder(self, folder: Path, name: str) -> None:
        """Record the files that lie directly in a folder as one artifact of type "run"."""
        with self._guard("log files"):
            files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
            self._log_artifact(files, name, "run")

    def log_artifact_files(self, files: Mapping[str, Path], name: str, kind: str) -> None:
        """Record files under paths of their own as one artifact of a type."""
        with self._guard("log files"):
            self._log_artifact(files, name, kind)

    def _log_artifact(self, files: Mapping[str, Path], name: str, kind: str) -> None:
        if not self._takes_more:
            return
        import wandb

        artifact = wandb.Artifact(_NOT_IN_A_NAME.sub("-", name), type=kind)
        for shown, path in files.items():
            artifact.add_file(str(path), name=shown, skip_cache=True, policy="immutable")
        self._run.log_artifact(artifact)

    def finish(self, failed: bool = False) -> None:
        """Flush and end the run; a server that does not answer is waited for two minutes."""
        with self._guard("finish"):
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        self._run = None
        for name, value in self._env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @property
    def _takes_more(self) -> bool:
        return self._run is not None and not self._is_broken

    @contextmanager
    def _guard(self, action: str) -> Iterator[None]:
        """Tell a failure of the client once, and let the run go on without it."""
        try:
            yield
        # Every block holds client calls alone, and the client raises bare Exceptions of its own
        # beside wandb.Error, OSError and ValueError.
        except Exception as error:
            self._is_broken = True
            if not self._warned:
                self._warned = True
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                text = f"tracker wandb cannot {action} ({reason}); the run goes on"
                if self._run is not None:
                    text += f"; `wandb sync {self._run.settings.sync_dir}` sends what was logged"
                logger.warning(text)


def make_tracker(
    config: TrackerConfig,
    run_config: Mapping[str, Any],
    folder: Path,
    run_name: str | None = None,
) -> Tracker:
    """Build the tracker that a configuration asks for.

    Args:
        config: which one, and its parameters.
        run_config: the run's resolved configuration.
        folder: the run folder; everything that a tracker writes lies in it.
        run_name: shown by trackers that name runs.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(config, WandbConfig):
        if config.resolved_mode() == "disabled":
            return NullTracker()
        return WandbTracker(config, run_config, folder, run_name)
    if isinstance(config, CsvConfig):
        return CsvTracker(folder)
    if config.name != "none":
        raise ConfigError(f"tracker={config.name!r} is not known; known: csv, none, wandb")
    return NullTracker()


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with the values of keys that look like secrets replaced, at any depth."""
    return {
        key: "(left out)" if _SECRET_KEY.search(str(key)) else _inside(value)
        for key, value in values.items()
    }


def hide_secrets(command: str) -> str:
    """Return a command line without the values that follow keys which look like secrets."""
    return _WORD.sub(lambda found: _hide_in_word(found[0]), command)


def hide_secret(override: str) -> str:
    """Return an override (`key=value`, as Hydra gets it) without the value of a secret's key."""
    hidden = _SECRET_OVERRIDE.fullmatch(override)
    return f"{hidden[1]}(left out)" if hidden else _SECRET_INSIDE.sub(r"\1(left out)", override)


def _hide_in_word(word: str) -> str:
    """Return a word of a command line without secrets, quoted where it was."""
    text = "".join(shlex.split(word))
    shown = hide_secret(text)
    if shown == text:
        return word
    return shown if text == word else shlex.quote(shown)


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_inside(item) for item in value]
    return value
