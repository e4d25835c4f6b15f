"""What speaks against the headline numbers, in sentences: disturbed timings, skipped prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specdec.slow_groups import SLOW_FACTOR

# By how much a speed-up may be above the accepted length. Requests that run together may differ:
# where the longest texts are those with the best drafts, the batch gains more than the mean.
_MARGIN_ALONE, _MARGIN_TOGETHER = 1.1, 1.5
_MAX_NAMES = 3


def timing_cautions(summary: pd.DataFrame, label: str = "arm") -> list[str]:
    """Return why timings cannot be believed; nothing where they can.

    Args:
        summary: from `specdec.metrics.summarise_arms`.
        label: the column that names the arms.
    """
    rows = list(summary.to_dict("records"))
    too_fast = [
        f"{row[label]} ({row['speedup']:.2f}x with a mean accepted length of "
        f"{row['accepted_length']:.2f})"
        for row in rows
        if is_too_fast(row)
    ]
    slow = [
        f"{row['num_slow_groups']} of {row['num_groups']} groups of prompts of {row[label]}"
        for row in rows
        if row["num_slow_groups"]
    ]
    texts: list[str] = []
    if too_fast:
        texts.append(
            f"Too fast to be true: {name_some(too_fast)}. A step with drafts costs at least a "
            "plain step, so no drafter is faster than its mean accepted length: the timing was "
            "disturbed."
        )
    if slow:
        texts.append(
            f"The timing was disturbed: {name_some(slow)} took more than {SLOW_FACTOR} times the "
            "arm's median time per token."
        )
    return [*texts, "Run again on a quiet machine."] if texts else []


def is_too_fast(row: Mapping[Any, Any]) -> bool:
    """Return whether an arm's speed-up is clearly above its mean accepted length.

    Args:
        row: of a summary.
    """
    is_together = row["num_prompts"] > row["num_groups"]
    margin = _MARGIN_TOGETHER if is_together else _MARGIN_ALONE
    return bool(row["k"] > 0 and row["speedup"] > margin * row["accepted_length"])


def skipped_caution(summary: pd.DataFrame) -> str:
    """Return how many prompts did not fit; an empty text where all did.

    Args:
        summary: from `specdec.metrics.summarise_arms`; with a column `run`, of several runs.
    """
    where = "run" if "run" in summary else "arm"
    parts: dict[tuple[int, int], list[str]] = {}
    for row in summary.to_dict("records"):
        skipped, asked = int(row["num_skipped"]), int(row["num_turns"] + row["num_skipped"])
        places = parts.setdefault((skipped, asked), [])
        if row[where] not in places:
            places.append(str(row[where]))
    kind = "turns" if any(summary["num_turns"] > summary["num_prompts"]) else "prompts"
    if not any(skipped for skipped, _ in parts):
        return ""
    if len(parts) == 1:
        ((skipped, asked),) = parts
        verb = "is" if skipped == 1 else "are"
        return f"{skipped} of {asked} {kind} did not fit and {verb} not in these figures."
    told = [
        f"{skipped} of {asked} in {name_some(places)}"
        for (skipped, asked), places in parts.items()
        if skipped
    ]
    return f"Some {kind} did not fit and are not in these figures: {'; '.join(told)}."


def name_some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - _MAX_NAMES
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
