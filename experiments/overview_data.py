"""What an overview is made of: all arms of a sweep with what tells them apart, and latency.

A *series* is a drafter as a line or a colour stands for it: the drafter, with the policy of its
draft length and the parameters in which drafters of that name differ. A *setting* is the value of
every axis but drafter, K and batch size; what is drawn together in one panel has the same setting.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from experiments.tables import RANDOM_FLAG
from specdec import metrics
from specdec.analysis import Runs

AUTOREGRESSIVE = "autoregressive"
# Columns of `Runs.arms` that are axes where they have more than one value.
_KNOWN_AXES = ("batch_size", "target", "temperature", "verifier", "prompts", "max_tokens")
_KNOWN_AXES += ("random_tokens", "dtype", "device", "graph_scope", "seed", "commit")
# Keys of a configuration that the columns above, or the names of arms, already tell.
_TOLD = ("target.name", "verifier.name", "sampling.temperature", "sampling.max_tokens")
_TOLD += ("batch_size", "seed", "num_speculative_tokens", "target.dtype", "engine.device")
_TOLD += ("engine.graph_scope",)
_TOLD_GROUPS = ("drafter", "compare", "draft_length", "prompts", "tracker", "hydra", "equality")
_K_IN_NAME = re.compile(r" K=\d+")


@dataclass
class Overview:
    """The arms of a sweep.

    Args:
        runs: as loaded.
        summary: `Runs.summary` with the columns `series`, `setting` (the panel's title),
            `ms_per_token` with its interval, and one for each axis that comes from the
            configuration.
        axes: columns of `summary` with more than one value, without drafter and K.
        categories, positions, times: of `Runs`, with `series`, `k`, `setting`, `batch_size`.
    """

    runs: Runs
    summary: pd.DataFrame
    axes: list[str]
    categories: pd.DataFrame = field(default_factory=pd.DataFrame)
    positions: pd.DataFrame = field(default_factory=pd.DataFrame)
    times: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def drafting(self) -> pd.DataFrame:
        """Return the rows of the summary that draft."""
        return self.summary.loc[self.summary["k"] > 0]

    @property
    def series(self) -> list[str]:
        """Return the series in the order of their first arm, the autoregressive one first."""
        return [AUTOREGRESSIVE, *self.drafting["series"].unique()]


def make_overview(runs: Runs) -> Overview:
    """Return what the figures and tables of an overview are made of."""
    summary = runs.summary().merge(_ms_per_token(runs), on=["run", "arm"], how="left")
    overview = _with_settings(runs, summary)
    keys = overview.summary[["run", "arm", "series", "setting", "batch_size", "k"]]
    overview.categories, overview.positions, overview.times = (
        frame.drop(columns=["k"], errors="ignore").merge(keys, on=["run", "arm"], how="left")
        for frame in (runs.categories(), runs.positions(), runs.times())
    )
    return overview


def without_metrics(runs: Runs) -> Overview:
    """Return what tells the arms apart, for `experiments.speedup_model`: nothing is summarised."""
    return _with_settings(runs, runs.arms.copy())


def _with_settings(runs: Runs, summary: pd.DataFrame) -> Overview:
    """Add series, axes and settings to a frame of arms."""
    summary["series"] = _series(runs)
    axes = [name for name in _KNOWN_AXES if num_values(summary, name) > 1]
    for key, values in _differing(runs.configs).items():
        column = [values[run] for run in summary["run"]]
        if not any(_determines(list(summary[axis]), column) for axis in axes):
            summary[key] = column
            axes.append(key)
    shown = [name for name in axes if name != "batch_size"]
    summary["setting"] = [_title(row, shown) for row in summary.to_dict("records")]
    return Overview(runs, summary, axes)


def _ms_per_token(runs: Runs) -> pd.DataFrame:
    """Return `specdec.metrics.ms_per_token` with its interval, one line per run and arm."""
    columns = ["run", "arm", "ms_per_token", "ms_per_token_low", "ms_per_token_high"]
    steps = {key: own for key, own in runs.steps.groupby(["run", "arm"])}
    lines: list[tuple[Any, ...]] = []
    for key, own in runs.requests.groupby(["run", "arm"]):
        assert isinstance(key, tuple), key
        if key in steps:
            lines.append((*key, *metrics.ms_per_token(own, steps[key])))
    return pd.DataFrame(lines, columns=columns)


def num_values(frame: pd.DataFrame, column: str) -> int:
    """Return how many values a column has."""
    return pd.Series(frame[column]).nunique(dropna=False)


def panels(
    frame: pd.DataFrame, limit: int, by: str = "setting"
) -> tuple[list[tuple[str, pd.DataFrame]], int]:
    """Cut a frame into panels.

    Returns:
        (title, rows) of each of the first `limit` settings, and how many settings there are.
    """
    names = list(frame[by].unique())
    return [(str(name), frame.loc[frame[by] == name]) for name in names[:limit]], len(names)


def best_arms(overview: Overview) -> pd.DataFrame:
    """Return the fastest arm of every drafter and setting, by speed-up."""
    ranked = overview.drafting.sort_values("speedup", ascending=False, na_position="last")
    chosen = ranked.drop_duplicates(["series", "setting"]).index
    return overview.summary.loc[sorted(chosen)]


def differences(runs: Runs) -> list[str]:
    """Return in words what of the surroundings differs between runs: device, versions, threads."""
    found: list[str] = []
    flat = {run: dict(flatten(made)) for run, made in runs.provenance.items()}
    names = sorted({key for values in flat.values() for key in values})
    for name in names:
        if name not in ("device", "threads", "platform", "commit", "dirty") and not (
            name.startswith("versions.")
        ):
            continue
        values = sorted({str(values.get(name, "unknown")) for values in flat.values()})
        if len(values) > 1:
            found.append(f"{name}: {'; '.join(value[:60] for value in values)}")
    return found


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for nested mappings."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _series(runs: Runs) -> list[str]:
    """Return each arm's series, in the order of `Runs.arms`."""
    bases: list[str] = []
    configs: list[dict[str, Any]] = []
    for entries in runs.entries.values():
        for arm in entries:
            drafts = arm["k"] > 0
            bases.append(_K_IN_NAME.sub("", arm["arm"]) if drafts else AUTOREGRESSIVE)
            own = arm.get("drafter_config") or {}
            length = arm.get("draft_length_config") or {}
            flat = dict(flatten(own)) | dict(flatten(length, "draft_length."))
            configs.append({key: str(value) for key, value in flat.items()} if drafts else {})
    rivals = [[c for b, c in zip(bases, configs, strict=True) if b == base] for base in bases]
    return [
        base + "".join(f" {key}={own[key]}" for key in own if _differs(key, others, base))
        for base, own, others in zip(bases, configs, rivals, strict=True)
    ]


def _differs(key: str, configs: Sequence[Mapping[str, str]], base: str) -> bool:
    return len({config.get(key) for config in configs}) > 1 and f" {key}=" not in base


def _differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the keys in which configurations differ, with each run's value."""
    flat = {
        run: {
            key: str(value)
            for key, value in flatten(config)
            if key not in _TOLD and key.partition(".")[0] not in _TOLD_GROUPS
        }
        for run, config in configs.items()
    }
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    columns = {key: {run: values.get(key, "-") for run, values in flat.items()} for key in keys}
    return {key: values for key, values in columns.items() if len(set(values.values())) > 1}


def _determines(axis: Sequence[Any], column: Sequence[str]) -> bool:
    """Return whether a column follows from an axis, as rows of an engine from the batch size."""
    pairs = {(str(value), other) for value, other in zip(axis, column, strict=True)}
    return len(pairs) == len({value for value, _ in pairs})


def _title(row: Mapping[Any, Any], axes: Sequence[str]) -> str:
    parts: list[str] = []
    for name in axes:
        value = row[name]
        if name == "random_tokens":
            parts.append(RANDOM_FLAG if value else "prompts of text")
        elif name == "commit":
            parts.append(f"commit {str(value)[:12]}")
        elif name == "target":
            parts.append(str(value).rpartition("/")[2])
        else:
            parts.append(
                f"{name.replace('_', ' ')} {value:g}" if _is_number(value) else f"{name} {value}"
            )
    return ", ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
