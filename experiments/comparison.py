"""Several runs in one table, and the runs of two folders against each other: two commits, say."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from experiments import latex
from experiments.cautions import skipped_caution, timing_cautions
from experiments.pages import cannot_write
from experiments.tables import (
    RANDOM_NOTE,
    arm_label,
    change_text,
    interval_text,
    number_text,
    terminal_table,
    verdict_text,
)
from specdec.analysis import Runs
from specdec.errors import ConfigError
from specdec.metrics import compare_arms

# Of a configuration, what an arm's own entry tells, or what does not change its numbers; devices
# and dtypes do, and are told by the provenance.
_NOT_COMPARED = ("tracker", "hydra", "equality", "drafter", "compare", "draft_length")
_NOT_COMPARED += ("num_speculative_tokens", "engine.device", "engine.dtype", "experiment", "debug")
_OF_ARM = ("k", "drafter_config", "draft_length_config")
# What else than the code may change a number.
SURROUNDINGS = ("device", "dtype", "threads", "platform", "versions")
MEASURES = ("accepted_length", "tokens_per_s", "speedup")
DRIFT_NOTE = (
    "The interval is over prompts only: what differs between two processes, such as the machine's "
    "clock or load, is outside it. Repeat both runs to see how much that is."
)
FORMS = {"accepted_length": "{:.2f}", "tokens_per_s": "{:.1f}", "speedup": "{:.2f}x"}


@dataclass
class Against:
    """What the runs of two folders have in common, and how that differs.

    Args:
        lines: `arm`, `name` (a label of its own, see `Runs.arms`), `run`, `other_run`,
            `random_tokens`, then a line of `specdec.metrics.compare_arms`: three lines an arm.
        unmatched: why an arm of the first folder has no partner.
        warnings: what makes it no comparison of two commits alone.
        provenance: fact -> what it is in the first folder and in the other.
    """

    lines: pd.DataFrame
    unmatched: list[str]
    warnings: list[str]
    provenance: dict[str, tuple[str, str]]


def compare_runs(folder: Path, runs: Runs) -> tuple[list[RenderableType], list[Path]]:
    """Write `comparison.csv` and `comparison.tex` of runs, all in one table.

    Args:
        folder: gets the files.
        runs: those below it.

    Returns:
        The table to show, with what speaks against it, and the files.

    Raises:
        CapacityError: the folder cannot be written.
    """
    summary = runs.summary()
    # An autoregressive arm is 1 by definition wherever there is another arm to show.
    drafting = summary.loc[summary["k"] > 0]
    shown = summary if drafting.empty else drafting
    paths = [folder / "comparison.csv", folder / "comparison.tex"]
    facts = _facts(runs.provenance.values())
    setting = "; ".join(
        f"{key} {facts[key]}" for key in ("device", "dtype", "commit") if key in facts
    )
    try:
        summary.to_csv(paths[0], index=False)
        latex.write_summary(paths[1], shown, setting, name="name")
    except OSError as error:
        raise cannot_write(folder, error) from error
    cautions = filter(None, [*timing_cautions(summary, "name"), skipped_caution(summary)])
    return [_comparison_table(shown), *map(Text, cautions)], paths


def _comparison_table(summary: pd.DataFrame) -> Table:
    caption = (
        "[low, high]: 95 % bootstrap interval over prompts, for the speed-up over groups of them"
    )
    flagged = any(summary["random_tokens"])
    table = terminal_table(f"{caption}\n{RANDOM_NOTE}" if flagged else caption)
    table.add_column("arm", overflow="fold", min_width=16, max_width=46)
    table.add_column("K", justify="right")
    for header in ("mean accepted length (bonus included)", "tokens/s", "speed-up"):
        table.add_column(header, justify="right")
    table.add_column("equality verdict")
    for row in summary.to_dict("records"):
        cells = (
            arm_label(row, "name"),
            str(row["k"]),
            interval_text(row, "accepted_length", "{:.2f}"),
            number_text(row["tokens_per_s"], "{:.1f}"),
            interval_text(row, "speedup", "{:.2f}x"),
            verdict_text(row),
        )
        table.add_row(*map(escape, cells))
    return table


def write_against(folder: Path, found: Against) -> tuple[list[RenderableType], list[Path]]:
    """Write `against.csv` and `against.tex` of a comparison.

    Args:
        folder: the first of the two; gets the files.
        found: from `match_runs`.

    Returns:
        What to show, provenance and warnings first, and the files.

    Raises:
        CapacityError: the folder cannot be written.
    """
    paths = [folder / "against.csv", folder / "against.tex"]
    try:
        _csv_table(found).to_csv(paths[0], index=False)
        _write_tex(paths[1], found)
    except OSError as error:
        raise cannot_write(folder, error) from error
    shown: list[RenderableType] = [_provenance_table(found.provenance)]
    shown += [Text(line, style="bold red") for line in found.warnings]
    shown += [_against_table(found.lines), Text(DRIFT_NOTE)]
    shown += [Text(f"not compared: {line}") for line in found.unmatched]
    return shown, paths


def match_runs(runs: Runs, others: Runs) -> Against:
    """Compare each arm with the arm of the same name and configuration of other runs.

    Where several match, the one of a run folder of the same name is taken, else the first that is
    free. A configuration key that only one of the two has, as a newer version may, is no obstacle.

    Raises:
        ConfigError: no arm is in both.
    """
    frames: list[pd.DataFrame] = []
    unmatched: list[str] = []
    matched: tuple[set[str], set[str]] = (set(), set())
    partners = _find_partners(runs, others)
    labels = runs.arms.set_index(["run", "arm"])["name"]
    for run, entries in runs.entries.items():
        for entry in entries:
            name = entry["arm"]
            partner = partners.get((run, name))
            if partner is None:
                unmatched.append(f"{name} of {run}: {_why_alone(runs, run, entry, others)}")
                continue
            matched[0].add(run)
            matched[1].add(partner)
            table = compare_arms(runs.traces(run, name), others.traces(partner, name))
            flag = bool(entry.get("random_tokens", False))
            first = {"arm": name, "name": labels[run, name], "run": run, "other_run": partner}
            first["random_tokens"] = flag
            frames.append(pd.concat([pd.DataFrame([first] * len(table)), table], axis=1))
    if not frames:
        raise ConfigError(
            f"no arm is in both folders with the same configuration ({'; '.join(unmatched)}); "
            "compare runs of one configuration"
        )
    lines = pd.concat(frames, ignore_index=True)
    used = [
        [side.provenance[run] for run in sorted(names)]
        for side, names in zip((runs, others), matched, strict=True)
    ]
    facts, other_facts = (_facts(made) for made in used)
    keys = dict.fromkeys([*facts, *other_facts])
    provenance = {key: (facts.get(key, "unknown"), other_facts.get(key, "unknown")) for key in keys}
    return Against(lines, unmatched, _warnings(provenance), provenance)


def _find_partners(runs: Runs, others: Runs) -> dict[tuple[str, str], str]:
    """Return (run, arm) -> the run of the other folder that has its partner."""
    free = {(run, entry["arm"]) for run, entries in others.entries.items() for entry in entries}
    partners: dict[tuple[str, str], str] = {}
    for same_folder in (True, False):
        for run, entries in runs.entries.items():
            for entry in entries:
                key = run, entry["arm"]
                for other_run, differing in _candidates(runs, run, entry, others):
                    wanted = not differing and (other_run == run or not same_folder)
                    if key not in partners and wanted and (other_run, key[1]) in free:
                        partners[key] = other_run
                        free.remove((other_run, key[1]))
    return partners


def _candidates(
    runs: Runs, run: str, entry: Mapping[str, Any], others: Runs
) -> Iterator[tuple[str, list[str]]]:
    """Yield the other folder's runs with an arm of that name, and the settings that differ."""
    own = arm_settings(runs.configs[run], entry)
    for other_run, entries in others.entries.items():
        for other in entries:
            if other["arm"] == entry["arm"]:
                theirs = arm_settings(others.configs[other_run], other)
                yield other_run, [k for k in own if k in theirs and own[k] != theirs[k]]


def _why_alone(runs: Runs, run: str, entry: Mapping[str, Any], others: Runs) -> str:
    found = [differing for _, differing in _candidates(runs, run, entry, others)]
    if not found:
        return "the other folder has no such arm"
    nearest = min(found, key=len)
    if not nearest:
        return "the other folder has fewer runs of it"
    return f"the other folder's differs in {', '.join(nearest)}"


def arm_settings(config: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value, as JSON, of all that must agree between two arms."""
    flat = _flatten(config)
    kept = {
        key: value
        for key, value in flat.items()
        if not any(key == name or key.startswith(f"{name}.") for name in _NOT_COMPARED)
    }
    return kept | _flatten({key: entry[key] for key in _OF_ARM if key in entry})


def _flatten(mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat = pd.json_normalize(dict(mapping)).to_dict("records")
    return {str(key): json.dumps(value) for key, value in flat[0].items()} if flat else {}


def _facts(provenance: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return fact -> its value, or all its values where runs differ."""
    facts: dict[str, dict[str, None]] = {}
    for made in provenance:
        for key, value in _flatten(made).items():
            if key.partition(".")[0] in ("commit", "dirty", "started", *SURROUNDINGS):
                facts.setdefault(key, {})[str(json.loads(value))] = None
    told = {key: ", ".join(values) for key, values in facts.items()}
    if len(started := sorted(facts.get("started", {}))) > 1:
        told["started"] = f"{started[0]} to {started[-1]}"
    return told


def _warnings(provenance: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return what else than the commit may have changed the numbers."""
    warnings: list[str] = []
    for key, (one, other) in provenance.items():
        if key.partition(".")[0] in SURROUNDINGS and one != other:
            warnings.append(f"NO COMPARISON OF COMMITS ALONE: {key} is {one}, against {other}")
    if "True" in "".join(provenance.get("dirty", ())):
        warnings.append("UNCOMMITTED CHANGES: a commit does not tell all of the code")
    commits = provenance.get("commit", ("None", "None"))
    if "None" in commits:
        warnings.append("UNKNOWN COMMIT: a run does not tell its code")
    elif commits[0] == commits[1]:
        warnings.append("THE SAME COMMIT on both sides: differences are noise, or of other causes")
    return warnings


def _csv_table(found: Against) -> pd.DataFrame:
    """Return the lines with what each side was, in every line."""
    sides = {
        name: values[side]
        for key, values in found.provenance.items()
        for side, name in enumerate((key, f"other_{key}"))
    }
    return found.lines.assign(only_commits_differ=not found.warnings, **sides)


def _provenance_table(provenance: Mapping[str, tuple[str, str]]) -> Table:
    table = terminal_table("")
    table.caption = None
    table.add_column("provenance")
    table.add_column("this folder", overflow="fold")
    table.add_column("against", overflow="fold")
    for key, (one, other) in provenance.items():
        style = None if one == other or key in ("commit", "started") else "bold red"
        table.add_row(escape(key), escape(one), escape(other), style=style)
    return table


def _cells(lines: pd.DataFrame) -> list[tuple[Mapping[Any, Any], list[tuple[str, str, bool]]]]:
    """Return each arm with, by measure, `one / other`, the change, and whether it is shown."""
    found: list[tuple[Mapping[Any, Any], list[tuple[str, str, bool]]]] = []
    for _, table in lines.groupby(["run", "arm"], sort=False):
        rows = {row["measure"]: row for row in table.to_dict("records")}
        cells: list[tuple[str, str, bool]] = []
        for measure in MEASURES:
            row, form = rows[measure], FORMS[measure]
            values = f"{number_text(row['one'], form)} / {number_text(row['other'], form)}"
            cells.append((values, change_text(row), bool(row["differs"])))
        found.append((rows[MEASURES[0]], cells))
    return found


def _against_table(lines: pd.DataFrame) -> Table:
    caption = (
        "this folder / against, difference or ratio [95 % bootstrap interval, the same prompts "
        "drawn for both]; !: the interval excludes no difference"
    )
    flagged = any(lines["random_tokens"])
    table = terminal_table(f"{caption}\n{RANDOM_NOTE}" if flagged else caption)
    table.add_column("arm", overflow="fold", min_width=12, max_width=24)
    table.add_column("prompts", justify="right")
    for header in ("mean accepted length (bonus included)", "tokens/s", "speed-up"):
        table.add_column(header, justify="right")
    several = len(set(lines["run"])) > 1
    for row, cells in _cells(lines):
        name = f"{arm_label(row)} ({row['run']})" if several else arm_label(row)
        texts = [f"{values}\n{change}{' !' if shown else ''}" for values, change, shown in cells]
        table.add_row(*map(escape, (name, str(row["num_units"]), *texts)))
    return table


def _write_tex(path: Path, found: Against) -> None:
    headers = ["Arm", "Accepted length", "Difference", "Tokens/s, ratio", "Speed-up, ratio"]
    several = len(set(found.lines["run"])) > 1
    rows: list[list[str]] = []
    for row, cells in _cells(found.lines):
        name = latex.arm_cell(row, "arm")
        texts = [name + (f" {{\\scriptsize {latex.escape(row['run'])}}}" if several else "")]
        texts.append(latex.escape(cells[0][0]))
        for _, change, shown in cells:
            text = latex.with_interval(change)
            texts += [f"\\textbf{{{text}}}" if shown else text]
        rows.append(texts)
    keys = [key for key in ("commit", "device", "dtype") if key in found.provenance]
    sides = [" ".join(f"{key} {found.provenance[key][i]};" for key in keys) for i in (0, 1)]
    notes = [f"This: {sides[0]} against: {sides[1]}"]
    notes += ["Bold: the 95 % bootstrap interval in brackets excludes no difference."]
    notes += [DRIFT_NOTE, *latex.random_notes(found.lines), *found.warnings]
    caption = "This against the other; the same prompts are drawn for both."
    latex.write_table(path, headers, rows, (0,), caption, notes)
