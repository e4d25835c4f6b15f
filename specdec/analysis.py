"""Run folders as tidy pandas frames, for a notebook or a script.

    >>> from specdec.analysis import load
    >>> runs = load("multirun/2026-01-31/12-00-00")  # a run folder, or any folder above some
    >>> runs.arms[["run", "arm", "drafter", "k", "temperature", "batch_size"]]
    >>> runs.summary()[["name", "accepted_length", "accepted_length_low", "speedup"]]
    >>> runs.requests.query("arm == 'ngram K=4' and is_verify")["num_accepted"].value_counts()
    >>> runs.compare("ngram K=8", "ngram K=4")[["measure", "value", "low", "high", "differs"]]

All frames have the first columns `run` and `arm`, by which they merge. Where the numbers come from
is told by `specdec.metrics` (formulas) and `specdec.trace` (columns of the traces).
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from specdec import metrics
from specdec.errors import ConfigError
from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS
from specdec.units import ArmTraces

logger = logging.getLogger(__name__)

_TABLES = {
    "requests.parquet": (*REQUEST_COLUMNS, "arm"),
    "steps.parquet": (*STEP_COLUMNS, "arm"),
    "timings.parquet": ("arm", "group", "category", "num_prompts", "num_tokens", "wall_s"),
}
_TEXTS = ("arms.json", "provenance.json", "config.yaml")
_ARM_KEYS = {"arm", "drafter", "k", "verifier", "temperature", "lossless", "verdict"}
_ARM_KEYS |= {"device", "graph_scope", "launches", "capture", "draft_length"}
_CAPTURE_KEYS = {"num_graphs", "seconds", "num_bytes"}
_VERDICT_KEYS = {"status", "dtype", "num_compared", "num_equal", "note"}
# What may tell arms of one name apart, in the order in which a label says it.
_SETTINGS = ("target", "verifier", "temperature", "batch_size", "prompts", "dtype", "device")
_SETTINGS += ("commit", "seed")


@dataclass
class Run:
    """What a run folder holds."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    timings: pd.DataFrame
    arms: list[dict[str, Any]]  # the autoregressive arm first
    provenance: dict[str, Any]
    config_text: str
    config: dict[str, Any]  # the same, as plain values

    @property
    def is_finished(self) -> bool:
        """Return whether the run came to its end; an interrupted one leaves a part."""
        return self.provenance.get("duration_s") is not None

    def traces(self, arm: str) -> ArmTraces:
        """Return what an arm is compared by."""
        return _arm_traces(self.requests, self.timings, arm, self.arms[0]["arm"])


@dataclass
class Runs:
    """The run folders below a folder, together.

    Args:
        arms: one row per run and arm, the autoregressive arm of a run first:
            `run` (the folder, relative to the one that was loaded), `arm`, `name` (a label that no
            other row has: the arm, and the settings in which arms of that name differ),
            `drafter`, `k`, `verifier`, `temperature`, `lossless`, `verdict`, `random_tokens`,
            `num_skipped` (turns that did not fit), `target`, `batch_size`, `max_tokens`, `prompts`,
            `dtype`, `device`, `graph_scope`, `draft_length` (policy), `commit`, `dirty`, `seed`,
            `started`, `duration_s`, then every further plain value of arms.json.
        requests: one row per request and step: `run`, `arm`, then `specdec.trace.REQUEST_COLUMNS`,
            `k` and `turn`.
        steps: one row per step: `run`, `arm`, then `specdec.trace.STEP_COLUMNS`.
        timings: one row per group of prompts that ran together: `run`, `arm`, `k`, `group`,
            `category`, `num_prompts`, `num_tokens`, `wall_s`.
        entries: run -> the entries of its arms.json.
        provenance: run -> its provenance.json.
        configs: run -> its resolved configuration.
    """

    arms: pd.DataFrame
    requests: pd.DataFrame
    steps: pd.DataFrame
    timings: pd.DataFrame
    entries: dict[str, list[dict[str, Any]]]
    provenance: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]]

    def summary(self) -> pd.DataFrame:
        """Return `arms` with the metrics of `specdec.metrics.summarise_arms`, in its order."""
        measured = self._each(
            lambda run, arms: metrics.summarise_arms(run.requests, run.timings, arms)
        )
        known = [name for name in measured if name in self.arms and name not in ("run", "arm")]
        return self.arms.merge(measured.drop(columns=known), on=["run", "arm"], validate="1:1")

    def categories(self) -> pd.DataFrame:
        """Return `specdec.metrics.summarise_categories` of each run, with `run` and `name`."""
        return self._named(
            lambda run, arms: metrics.summarise_categories(run.requests, run.timings, arms)
        )

    def positions(self) -> pd.DataFrame:
        """Return `specdec.metrics.position_table` of each run, with `run` and `name`."""
        return self._named(lambda run, arms: metrics.position_table(run.requests, arms))

    def times(self) -> pd.DataFrame:
        """Return `specdec.metrics.time_split` of each run, with `run` and `name`."""
        return self._named(lambda run, arms: metrics.time_split(run.requests, run.steps, arms))

    def compare(self, arm: str | tuple[str, str], other: str | tuple[str, str]) -> pd.DataFrame:
        """Return `specdec.metrics.compare_arms` of two arms, the first against the second.

        Args:
            arm, other: a `name`, an `arm` that one run has, or a pair of `run` and `arm`.

        Raises:
            ConfigError: there is no such arm or several, or their runs asked other prompts.
        """
        places = self._find(arm), self._find(other)
        asked = [_question_file(self.configs[run]) for run, _ in places]
        if asked[0] != asked[1]:
            raise ConfigError(
                f"{arm} and {other} were not asked the same prompts ({asked[0]} and {asked[1]}); "
                "compare arms of runs with the same `prompts`"
            )
        one, two = (self.traces(*place) for place in places)
        if not set(one.requests["request_id"]) & set(two.requests["request_id"]):
            raise ConfigError(f"{arm} and {other} have no prompt in common; nothing to compare")
        return metrics.compare_arms(one, two)

    def _find(self, arm: str | tuple[str, str]) -> tuple[str, str]:
        """Return the run and the arm's own name."""
        if isinstance(arm, str):
            found = self.arms.loc[self.arms["name"] == arm]
            if found.empty:
                found = self.arms.loc[self.arms["arm"] == arm]
        else:
            found = self.arms.loc[(self.arms["run"] == arm[0]) & (self.arms["arm"] == arm[1])]
        if len(found) != 1:
            names = list(found["name"]) or list(self.arms["name"])
            what = "stands for several arms" if len(found) else "is no arm"
            raise ConfigError(f"{arm!r} {what}; give one of {', '.join(map(repr, names))}")
        return str(found["run"].iloc[0]), str(found["arm"].iloc[0])

    def traces(self, run: str, arm: str) -> ArmTraces:
        """Return what an arm of a run is compared by."""
        requests, timings = (f.loc[f["run"] == run] for f in (self.requests, self.timings))
        return _arm_traces(requests, timings, arm, self.entries[run][0]["arm"])

    def _named(self, table: "_Table") -> pd.DataFrame:
        names = self.arms.loc[:, ["run", "arm", "name"]]
        return names.merge(self._each(table), on=["run", "arm"], how="right")

    def _each(self, table: "_Table") -> pd.DataFrame:
        """Return a table of each run, one below the other, with the first column `run`."""
        frames: list[pd.DataFrame] = []
        whole = (self.requests, self.steps, self.timings)
        by_run = [dict(list(frame.groupby("run", sort=False))) for frame in whole]
        for run, arms in self.entries.items():
            pairs = zip(by_run, whole, strict=True)
            traces = _Traces(*(rows[run] if run in rows else f.iloc[:0] for rows, f in pairs))
            frame = table(traces, arms)
            frame.insert(0, "run", run)
            frames.append(frame)
        return _stack(frames)


class _Traces(NamedTuple):
    """The traces of one run."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    timings: pd.DataFrame


_Table = Callable[[_Traces, list[dict[str, Any]]], pd.DataFrame]


def load(folder: Path | str, *, unfinished: bool = False) -> Runs:
    """Read all run folders at or below a folder.

    Args:
        folder: a run folder, or any folder that holds some at any depth (a sweep, say).
        unfinished: take also runs that were interrupted, whose numbers are of a part of their
            prompts. Otherwise they are left out, like damaged ones, and a warning names them.

    Raises:
        ConfigError: there is no run folder that can be taken.
    """
    folder = Path(folder)
    loaded: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for path in find_runs(folder):
        name = folder.resolve().name if path == folder else path.relative_to(folder).as_posix()
        try:
            run = load_run(path)
        except ConfigError as error:
            left_out[name] = str(error)
            continue
        if run.is_finished or unfinished:
            loaded[name] = run
        else:
            left_out[name] = "it did not come to its end"
    if not loaded:
        reasons = "".join(f"; {name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(
            f"{folder} holds no finished run{reasons}; give a folder that "
            "`python -m experiments.run` or a sweep wrote"
        )
    if left_out:
        lines = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        logger.warning(
            "left out %d of %d runs: %s", len(left_out), len(loaded) + len(left_out), lines
        )
    return _join(loaded)


def is_run_folder(folder: Path) -> bool:
    """Return whether a run was written to this very folder, be it unfinished."""
    return all((folder / name).is_file() for name in ("provenance.json", "config.yaml"))


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders at or below a folder, also unfinished ones, in the order of names.

    A run folder is one that has a provenance.json beside a config.yaml. Nothing below one is
    looked at, nor are hidden folders and those that the tracker keeps.
    """
    for path, folders, files in os.walk(folder):
        if {"provenance.json", "config.yaml"} <= set(files):
            folders.clear()
            yield Path(path)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "wandb")


def load_run(folder: Path) -> Run:
    """Read a run folder; columns that were added later are NA in an older run's tables.

    Raises:
        ConfigError: a file is missing or unreadable, or lacks columns or keys.
    """
    missing = [name for name in (*_TABLES, *_TEXTS) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} is no complete run folder: {', '.join(missing)} missing; "
            "give a folder that `python -m experiments.run` finished"
        )
    frames: dict[str, pd.DataFrame] = {}
    name = ""
    try:
        for name, columns in _TABLES.items():
            frames[name] = _read_table(folder / name, columns)
        name = "arms.json"
        arms = json.loads((folder / name).read_text(encoding="utf-8"))
        _check_arms(folder / name, arms)
        name = "provenance.json"
        provenance = _mapping(json.loads((folder / name).read_text(encoding="utf-8")))
        name = "config.yaml"
        config_text = (folder / name).read_text(encoding="utf-8")
        config = _mapping(yaml.safe_load(config_text) or {})
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / name} cannot be read ({error}); run it again") from error
    known = {arm["arm"] for arm in arms}
    for name, frame in frames.items():
        unknown = sorted(set(frame["arm"]) - known)
        if unknown:
            raise ConfigError(f"{folder / name} has the arms {unknown}, which arms.json lacks")
    requests, steps, timings = frames.values()
    return Run(requests, steps, timings, arms, provenance, config_text, config)


def _read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    if frame.empty and path.name == "timings.parquet":
        raise ConfigError(
            f"{path} holds nothing: the run was cut before its first questions were answered; run "
            "it again"
        )
    added = [name for name in columns if name in OPTIONAL_COLUMNS and name not in frame]
    _check_names(path, columns, [*frame.columns, *added])
    return frame.assign(**dict.fromkeys(added, pd.NA))


def _mapping(value: Any) -> dict[str, Any]:
    """Return a value that has to be keys with values.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict):
        raise ValueError(f"it holds {str(value)[:40]!r} where keys with values belong")
    return value


def _check_names(path: Path, needed: Iterable[str], given: Iterable[str]) -> None:
    lacking = [name for name in needed if name not in set(given)]
    if lacking:
        raise ConfigError(f"{path} lacks {', '.join(lacking)}; run it again with this version")


def _check_arms(path: Path, arms: Any) -> None:
    if not isinstance(arms, list) or not arms:
        raise ConfigError(f"{path} names no arm; the first must be the autoregressive one")
    for arm in arms:
        _check_names(path, sorted(_ARM_KEYS), _mapping(arm))
        _check_names(path, sorted(_VERDICT_KEYS), _mapping(arm["verdict"]))
        _check_names(path, sorted(_CAPTURE_KEYS), _mapping(arm["capture"]))
    names = [arm["arm"] for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} names an arm twice: {names}; every arm needs a name of its own")


def _arm_traces(
    requests: pd.DataFrame, timings: pd.DataFrame, arm: str, baseline: str
) -> ArmTraces:
    return ArmTraces(
        requests.loc[requests["arm"] == arm],
        timings.loc[timings["arm"] == arm],
        timings.loc[timings["arm"] == baseline],
    )


def _join(loaded: Mapping[str, Run]) -> Runs:
    """Put runs together."""
    configs = {name: run.config for name, run in loaded.items()}
    rows = [_arm_row(name, arm, run) for name, run in loaded.items() for arm in run.arms]
    arms = pd.DataFrame(rows)
    arms["prompts"] = _told_apart(list(arms["prompts"]), [configs[run] for run in arms["run"]])
    arms.insert(2, "name", _labels(arms))
    requests, steps, timings = (
        _stack([_first_columns(getattr(run, table), name) for name, run in loaded.items()])
        for table in ("requests", "steps", "timings")
    )
    entries = {name: run.arms for name, run in loaded.items()}
    provenance = {name: run.provenance for name, run in loaded.items()}
    return Runs(arms, requests, steps, timings, entries, provenance, configs)


def _first_columns(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return a table of a run with the first columns `run` and `arm`."""
    rest = frame.drop(columns="arm")
    return pd.concat([pd.DataFrame({"run": run, "arm": frame["arm"]}), rest], axis=1)


def _stack(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate; frames without rows would only spoil the column types."""
    return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)


def _arm_row(name: str, arm: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return the row of `Runs.arms`, but for its label."""
    config, made = run.config, run.provenance
    row: dict[str, Any] = {"run": name, "arm": arm["arm"]}
    row |= {key: arm[key] for key in ("drafter", "k", "verifier", "temperature", "lossless")}
    row |= {
        "verdict": arm["verdict"]["status"],
        "random_tokens": bool(arm.get("random_tokens", False)),
        "num_skipped": int(arm.get("num_skipped", 0)),
        "target": (config.get("target") or {}).get("name"),
        "batch_size": config.get("batch_size"),
        "max_tokens": (config.get("sampling") or {}).get("max_tokens"),
        "prompts": _prompts_label(config.get("prompts") or {}),
        "dtype": made.get("dtype"),
        "device": made.get("device"),
        "graph_scope": arm["graph_scope"],
        "draft_length": arm["draft_length"]["name"],
    }
    row |= {key: made.get(key) for key in ("commit", "dirty", "seed", "started", "duration_s")}
    further = {key: value for key, value in arm.items() if isinstance(value, str | int | float)}
    return row | {key: value for key, value in further.items() if key not in row}


def _prompts_label(prompts: Mapping[str, Any]) -> str:
    """Return which prompts were asked: the file, then what was chosen of it."""
    chosen = {key: value for key, value in prompts.items() if value is not None}
    parts = [Path(str(chosen.pop("path", "builtin"))).name]
    for key, value in chosen.items():
        text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{key}={text}")
    return " ".join(parts)


def _told_apart(labels: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return labels of prompts; question files of one name in several folders have their paths."""
    paths = [str((config.get("prompts") or {}).get("path")) for config in configs]
    by_name: dict[str, set[str]] = {}
    for path in paths:
        by_name.setdefault(Path(path).name, set()).add(path)
    return [
        label.replace(Path(path).name, path, 1) if len(by_name[Path(path).name]) > 1 else label
        for label, path in zip(labels, paths, strict=True)
    ]


def _question_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what prompts are, without how many of them are asked."""
    how_many = ("per_category", "limit", "categories")
    prompts = config.get("prompts") or {}
    return {key: value for key, value in prompts.items() if key not in how_many}


def _labels(arms: pd.DataFrame) -> list[str]:
    """Return a label of each arm that no other has."""
    labels: list[str] = []
    for row in arms.to_dict("records"):
        rivals = arms.loc[arms["arm"] == row["arm"]]
        differing = [key for key in _SETTINGS if rivals[key].nunique(dropna=False) > 1]
        parts = [str(row["arm"])]
        for key in differing:
            value = str(row[key])[:12] if key == "commit" else row[key]
            parts.append(f"{key}={value}")
        labels.append(" ".join(parts))
    twice = {label for label in labels if labels.count(label) > 1}
    runs = arms["run"]
    return [
        f"{label} ({run})" if label in twice else label
        for label, run in zip(labels, runs, strict=True)
    ]
