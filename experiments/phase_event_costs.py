"""What phase events cost: each arm with them beside the arm that differs in nothing else."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from experiments.comparison import SURROUNDINGS, arm_settings
from experiments.tables import arm_label, interval_text
from specdec.analysis import Runs
from specdec.metrics import compare_steps

_Place = tuple[str, str]  # run, arm


def phase_event_lines(runs: Runs) -> list[str]:
    """Return a sentence for each arm with phase events that has a partner without them."""
    rows = {(row["run"], row["arm"]): row for row in runs.arms.to_dict("records")}
    lines: list[str] = []
    for place, other in find_pairs(runs):
        name, other_name = (arm_label(rows[key], "name") for key in (place, other))
        found = compare_steps(
            runs.traces(*place),
            runs.traces(*other),
            (_steps(runs, *place), _steps(runs, *other)),
        )
        if not math.isfinite(found["value"]):
            lines.append(
                f"What phase events cost {name} cannot be told: it has no decode steps over the "
                f"same groups of prompts as {other_name}."
            )
            continue
        ends: dict[str, Any] = {"value_low": found["low"], "value_high": found["high"]}
        text = (
            f"Phase events change the time of a decode step of {name} by "
            f"{interval_text({**found, **ends}, 'value', '{:+.1%}')}: {found['one']:.2f} ms, "
            f"against {found['other']:.2f} ms of {other_name}."
        )
        if found["low"] <= 0 <= found["high"]:
            text += " The interval includes 0: no cost is shown."
        lines.append(text)
    return lines


def _steps(runs: Runs, run: str, arm: str) -> pd.DataFrame:
    return runs.steps.loc[(runs.steps["run"] == run) & (runs.steps["arm"] == arm)]


def find_pairs(runs: Runs) -> Iterator[tuple[_Place, _Place]]:
    """Yield (run, arm) of the arms with phase events, with that of each one's partner.

    A partner has the same configuration but for `phase_events`, and was made by the same code on
    the same machine. One of the same run is preferred. Traces of older versions do not say whether
    an arm had phase events; these arms have no part.
    """
    alike: dict[str, tuple[list[_Place], list[_Place]]] = {}  # without events, with
    for run, entries in runs.entries.items():
        made = {key: runs.provenance[run].get(key) for key in ("commit", "dirty", *SURROUNDINGS)}
        for entry in entries:
            if entry.get("phase_events") is None:
                continue
            settings = arm_settings(runs.configs[run], entry)
            settings.pop("engine.phase_events", None)
            key = json.dumps([settings, made], sort_keys=True)
            alike.setdefault(key, ([], []))[bool(entry["phase_events"])].append((run, entry["arm"]))
    for without, with_events in alike.values():
        partners: dict[_Place, _Place] = {}
        for same_run in (True, False):
            for place in with_events:
                free = [p for p in without if p not in partners.values()]
                wanted = [p for p in free if p[0] == place[0] or not same_run]
                if place not in partners and wanted:
                    partners[place] = wanted[0]
        yield from ((place, partners[place]) for place in with_events if place in partners)
