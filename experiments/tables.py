"""The tables of a report, for the terminal and for the page, from the tables of `specdec.metrics`.

A number has the same digits wherever it stands; a dash stands for what was not measured.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from experiments.cautions import name_some, skipped_caution, timing_cautions
from specdec.metrics import PHASES

_TERMINAL_WIDTH = 120
_PARTS = ("step", "target", "draft", "propose")  # of a step, see `runner.cuda_graphs`
_NOT_LOSSLESS = ("different", "lossy")
Row = Mapping[Any, Any]
Compare = Callable[[Row, Row], pd.DataFrame | None]
RANDOM_FLAG = "random tokens"
RANDOM_NOTE = (
    "random tokens: prompts that are no text; acceptance on them tells nothing about text."
)


@dataclass
class HtmlTable:
    """A table of the page: columns of text are left-aligned, numbers right-aligned."""

    caption: str
    headers: list[str]
    rows: list[list[str]]
    text_columns: tuple[int, ...] = (0,)
    group_by: int | None = None  # a rule is drawn where this column's value changes


def render_table(summary: pd.DataFrame, categories: pd.DataFrame) -> list[Table]:
    """Return the tables for a terminal of 120 columns: the arms, then the categories.

    Args:
        summary: from `specdec.metrics.summarise_arms`.
        categories: from `specdec.metrics.summarise_categories`.
    """
    caption = (
        "[low, high]: 95 % bootstrap interval over prompts, for the speed-up over groups of them"
    )
    cautions = [*timing_cautions(summary), skipped_caution(summary)]
    cautions += [RANDOM_NOTE] if any(summary["random_tokens"]) else []
    arms = terminal_table("\n".join([caption, *filter(None, cautions)]))
    arms.add_column("arm", overflow="fold", min_width=12, max_width=26)
    arms.add_column("K", justify="right")
    arms.add_column("mean accepted length (bonus included)", justify="right", min_width=17)
    arms.add_column("accepted at position 1..K, %", min_width=12)
    arms.add_column("tokens/s", justify="right", no_wrap=True)
    arms.add_column("speed-up vs autoregressive", justify="right", min_width=19)
    arms.add_column("equality verdict", min_width=16)
    for row in summary.to_dict("records"):
        cells = (
            arm_label(row),
            str(row["k"]),
            interval_text(row, "accepted_length", "{:.2f}"),
            _positions_text(row),
            number_text(row["tokens_per_s"], "{:.1f}"),
            interval_text(row, "speedup", "{:.2f}x"),
            verdict_text(row),
        )
        arms.add_row(*map(escape, cells))
    # The baseline's columns would all say 1.00; they stay only where there is nothing else.
    names = list(summary["arm"])[1:] or list(summary["arm"])
    return [arms, *(_terminal_categories(categories, chunk) for chunk in _chunks(names))]


def _chunks(arms: Sequence[str]) -> list[list[str]]:
    """Split arms so that a table with a column each fits the terminal."""
    chunks: list[list[str]] = []
    room = 0
    for arm in arms:
        needed = min(max(len(arm), 12), 20) + 2
        if needed > room:
            chunks.append([])
            room = _TERMINAL_WIDTH - 24  # the column of categories
        chunks[-1].append(arm)
        room -= needed
    return chunks


def _terminal_categories(categories: pd.DataFrame, arms: Sequence[str]) -> Table:
    caption = "mean accepted length (bonus included) and speed-up"
    if math.isnan(sum(categories["speedup"])):
        caption += "; -: ran in groups with other categories, or not in both arms"
    known = {row["arm"]: arm_label(row) for row in categories.to_dict("records")}
    labels = {arm: known.get(arm, arm) for arm in arms}  # an arm that was cut has no line
    if any(labels[arm] != arm for arm in arms):
        caption += f"\n{RANDOM_NOTE}"
    table = terminal_table(caption)
    table.add_column("category", overflow="fold", max_width=20)
    for arm in arms:
        table.add_column(
            escape(labels[arm]), justify="right", overflow="fold", min_width=12, max_width=20
        )
    cells = {
        (row["category"], row["arm"]): number_text(row["accepted_length"], "{:.2f}")
        + f" {number_text(row['speedup'], '{:.2f}x'):>6}"
        for row in categories.to_dict("records")
    }
    for category in categories["category"].unique():
        row = (cells.get((category, arm), "-") for arm in arms)
        table.add_row(escape(category_label(category)), *row)
    return table


def terminal_table(caption: str) -> Table:
    """Return an empty table in the style of the others."""
    return Table(
        box=box.SIMPLE_HEAD, caption=escape(caption), caption_justify="left", padding=(0, 1, 0, 0)
    )


def arm_label(row: Mapping[Any, Any], key: str = "arm") -> str:
    """Return an arm's name, flagged where its prompts are random tokens.

    Args:
        row: of a table, or an entry of arms.json; without `random_tokens` there are none.
        key: where the name is.
    """
    return f"{row[key]} ({RANDOM_FLAG})" if row.get("random_tokens") else str(row[key])


def flag_random_tokens(table: HtmlTable, arms: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Return a table of the page in which arms with prompts of random tokens are marked and told.

    Args:
        table: the arms' names are in its first column or its headers.
        arms: entries of arms.json.
    """
    labels = {arm["arm"]: arm_label(arm) for arm in arms if arm.get("random_tokens")}
    headers = [labels.get(header, header) for header in table.headers]
    rows = [[labels.get(first, first), *rest] for first, *rest in table.rows]
    marked = headers != table.headers or rows != table.rows
    caption = f"{table.caption} {RANDOM_NOTE.capitalize()}" if marked else table.caption
    return dataclasses.replace(table, caption=caption, headers=headers, rows=rows)


def summary_table(summary: pd.DataFrame) -> HtmlTable:
    """Return the headline table of the page, one line per arm."""
    headers = ["Arm", "K", "Mean accepted length (bonus included)", "Speed-up vs autoregressive"]
    headers += ["Tokens/s", "Equality verdict", "Accepted at position 1..K, %"]
    headers += ["Acceptance rate", "Undrafted positions"]
    rows = [
        [
            str(row["arm"]),
            str(row["k"]),
            interval_text(row, "accepted_length", "{:.2f}"),
            interval_text(row, "speedup", "{:.2f}x"),
            interval_text(row, "tokens_per_s", "{:.1f}"),
            verdict_text(row),
            _positions_text(row),
            interval_text(row, "acceptance_rate", "{:.1%}"),
            interval_text(row, "undrafted_share", "{:.1%}"),
        ]
        for row in summary.to_dict("records")
    ]
    caption = (
        "One line per arm; in brackets the 95 % bootstrap interval. A dash: nothing to measure. "
        "Accepted at a position: of the drafts that were judged there."
    )
    return HtmlTable(caption, headers, rows, text_columns=(0, 5, 6))


def category_tables(categories: pd.DataFrame) -> list[HtmlTable]:
    """Return the accepted lengths and the speed-ups: one line per category, one column per arm.

    The baseline has no column unless it is the only arm: all its numbers would be 1.
    """
    names, arms = categories["category"].unique(), list(categories["arm"].unique())
    arms = arms[1:] or arms
    lines = {(row["category"], row["arm"]): row for row in categories.to_dict("records")}
    tables: list[HtmlTable] = []
    for name, form, caption in (
        ("accepted_length", "{:.2f}", "Mean accepted length (bonus included) by category."),
        ("speedup", "{:.2f}x", "Speed-up vs autoregressive by category."),
    ):
        if math.isnan(sum(categories[name])):
            caption += " A dash: they ran in groups with other categories, or not in both arms."
        rows: list[list[str]] = []
        for category in names:
            own = [lines.get((category, arm)) for arm in arms]
            num_prompts = max(categories.loc[categories["category"] == category, "num_prompts"])
            cells = [interval_text(row, name, form) if row else "-" for row in own]
            rows.append([category_label(category), str(num_prompts), *cells])
        tables.append(HtmlTable(caption, ["Category", "Prompts", *arms], rows))
    return tables


def position_lines(positions: pd.DataFrame) -> HtmlTable:
    """Return acceptance by position, one line per arm and position."""
    headers = ["Arm", "Position", "Drafted", "Reached", "Accepted", "Unconditional", "Conditional"]
    rows = [
        [
            str(row["arm"]),
            *(str(row[key]) for key in ("position", "num_drafted", "num_reached", "num_accepted")),
            interval_text(row, "unconditional", "{:.1%}"),
            interval_text(row, "conditional", "{:.1%}"),
        ]
        for row in positions.to_dict("records")
    ]
    caption = (
        "Drafted: valid drafts, which were judged there; reached: those whose predecessors were "
        "all accepted. Unconditional: accepted of those drafted; conditional: of those reached."
    )
    return HtmlTable(caption, headers, rows, group_by=0)


def time_lines(times: pd.DataFrame) -> HtmlTable:
    """Return the time split, one line per arm."""
    shown = shown_phases(times)
    rows: list[list[str]] = []
    for row in times.to_dict("records"):
        phases = [_phase_text(row, phase) for phase in shown]
        step_ms = number_text(row["step_ms"], "{:.2f}")
        rows.append([str(row["arm"]), str(row["num_steps"]), *phases, step_ms])
    headers = ["Arm", "Decode steps", *(f"{phase}, ms" for phase in shown), "Whole step, ms"]
    caption = "Mean milliseconds per decode step, and the share of each phase."
    if "launch" in shown:
        caption += (
            " Launch: launches that held several phases; a dash: a phase that only ran in those."
        )
    return HtmlTable(caption, headers, rows)


def shown_phases(times: pd.DataFrame) -> list[str]:
    """Return the phases to show: "launch" only where a launch held several phases."""
    launch_ms = sum(ms for ms in times["launch_ms"] if math.isfinite(ms))
    return [phase for phase in PHASES if phase != "launch" or launch_ms > 0]


def _phase_text(row: Mapping[Any, Any], phase: str) -> str:
    """Return `milliseconds (share)`, or a dash."""
    if not math.isfinite(row[f"{phase}_ms"]):
        return "-"
    return f"{row[f'{phase}_ms']:.2f} ({number_text(row[f'{phase}_share'], '{:.0%}')})"


def launch_lines(arms: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Return what was launched and what ran eager, one line per arm, part and reason.

    Args:
        arms: entries of arms.json.
    """
    rows: list[list[str]] = []
    for arm in arms:
        kept = "one graph" if arm["device"] == "cuda" else "fixed shape, no graph"
        lines = []
        for what, count in arm["launches"].items():
            part, is_eager, reason = what.partition(" eager: ")
            place = _PARTS.index(part) if part in _PARTS else len(_PARTS)
            how = "eager" if is_eager else kept
            lines.append((place, bool(is_eager), -count, [part, how, str(count), reason or "-"]))
        first = [str(arm["arm"]), str(arm["graph_scope"])]
        rows += [[*first, *cells] for *_, cells in sorted(lines)]
    headers = ["Arm", "Graph scope", "Part of the step", "Ran as", "Times", "Why eager"]
    caption = "How often each part of a timed step was launched, prompt tokens' steps included."
    return HtmlTable(caption, headers, rows, text_columns=(0, 1, 2, 3, 5), group_by=0)


def length_lines(arms: Sequence[Mapping[str, Any]]) -> HtmlTable | None:
    """Return how many drafts steps proposed, one line per arm; None where it was always K.

    Args:
        arms: entries of arms.json.
    """
    rows: list[list[str]] = []
    for arm in arms:
        policy = arm["draft_length"]
        if policy["name"] == "fixed":
            continue
        total = sum(policy["counts"].values())
        shares = (f"{k}: {n} ({n / total:.0%})" for k, n in policy["counts"].items() if n)
        why = "; ".join(policy["why"]) or "-"
        rows.append([str(arm["arm"]), str(policy["name"]), ", ".join(shares) or "-", why])
    headers = ["Arm", "Draft length", "Drafts of each request: steps", "Chosen by"]
    caption = "How many drafts the timed steps proposed, where that is not always K."
    return HtmlTable(caption, headers, rows, text_columns=(0, 1, 2, 3)) if rows else None


def idle_lines(idle: pd.DataFrame, arms: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Return what graphs and their fixed shapes cost, one line per arm.

    Args:
        idle: from `specdec.metrics.idle_positions`.
        arms: entries of arms.json, in the same order.
    """
    rows: list[list[str]] = []
    for row, arm in zip(idle.to_dict("records"), arms, strict=True):
        capture = arm["capture"]
        captured = ["-", "-", "-"]
        if capture["num_graphs"]:
            captured = [str(capture["num_graphs"]), f"{capture['num_bytes'] / 2**20:.1f}"]
            captured.append(f"{capture['seconds']:.1f}")
        shares = ("padding_share", "undrafted_share", "idle_share")
        shown = [number_text(row[name], "{:.1%}") for name in shares]
        rows.append([str(row["arm"]), str(row["num_computed"]), *shown, *captured])
    headers = ["Arm", "Positions computed", "Padding", "Undrafted", "Computed for nothing"]
    headers += ["Captured", "Captured, MiB", "Capturing, s"]
    caption = "Positions that the target computed in decode steps, and what capturing took."
    return HtmlTable(caption, headers, rows)


def verdict_table(summary: pd.DataFrame) -> HtmlTable:
    """Return what was compared of each arm's output and with what result."""
    headers = ["Arm", "Verdict", "Compared in", "Equal texts", "Verifier", "Temperature", "Note"]
    rows = [
        [
            str(row["arm"]),
            str(row["verdict"]),
            *(
                (str(row["verdict_dtype"]), f"{row['verdict_num_equal']} of {compared}")
                if (compared := row["verdict_num_compared"])
                else ("-", "-")
            ),
            str(row["verifier"]),
            f"{row['temperature']:g}",
            str(row["verdict_note"] or ""),
        ]
        for row in summary.to_dict("records")
    ]
    caption = "Verdict on each arm's output. A dash: no texts were compared."
    return HtmlTable(caption, headers, rows, text_columns=(0, 1, 2, 4, 6))


def paired_lines(changes: Mapping[str, pd.DataFrame], other: str) -> HtmlTable | None:
    """Return how arms differ from one of them, a line each; None where there is no other.

    Args:
        changes: arm -> its comparison, from `specdec.metrics.compare_arms`.
        other: the arm that they are compared with.
    """
    headers = ["Arm", "Accepted length: difference", "Shown", "Tokens/s: ratio", "Shown", "Prompts"]
    rows: list[list[str]] = []
    for arm, table in changes.items():
        lines = {line["measure"]: line for line in table.to_dict("records")}
        length, speed = lines["accepted_length"], lines["tokens_per_s"]
        cells = [change_text(length), shown_text(length), change_text(speed), shown_text(speed)]
        rows.append([arm, *cells, str(length["num_units"])])
    caption = (
        f"Each arm against {other}, the fastest that keeps the output; the interval draws the same "
        "prompts for both. Shown: the interval excludes no difference (0, or a ratio of 1)."
    )
    return HtmlTable(caption, headers, rows, text_columns=(0, 2, 4)) if rows else None


def change_text(line: Mapping[Any, Any]) -> str:
    """Return a line of a comparison as `value [low, high]`: signed, or a ratio with an x."""
    form = "{:+.2f}" if line["change"] == "difference" else "{:.3f}x"
    return interval_text(
        {**line, "value_low": line["low"], "value_high": line["high"]}, "value", form
    )


def shown_text(line: Mapping[Any, Any]) -> str:
    """Return whether a line of a comparison shows a difference."""
    return "yes" if line["differs"] else "no"


def fastest(summary: pd.DataFrame) -> str | None:
    """Return the speculative arm with the highest speed-up of those that keep the output."""
    ranked = _ranked(summary)
    return str(ranked[0]["arm"]) if ranked else None


def lead(summary: pd.DataFrame, compare: Compare, label: str = "arm") -> str:
    """Return the result in a few sentences; an arm that changes the output cannot win.

    Args:
        summary: from `specdec.metrics.summarise_arms`; with a column `run`, of several runs.
        compare: gives the comparison of two of its rows, see `specdec.metrics.compare_arms`, or
            None where they cannot be compared.
        label: the column that names the arms.
    """
    measured = summary.loc[summary["k"] > 0].dropna(subset=["speedup"])
    ranked = _ranked(summary)
    parts = [
        _winner_text(ranked[0], label)
        if ranked
        else "No speculative arm with the target's own output has a measured speed-up."
    ]
    if len(ranked) > 1:
        parts.append(_next_text(ranked[0], ranked[1], compare, label))
    left_out = list(measured.loc[measured["verdict"].isin(_NOT_LOSSLESS), label])
    if left_out:
        names = name_some(left_out)
        parts.append(f"Left out, because their output is different or lossy: {names}.")
    parts += [*timing_cautions(summary, label), skipped_caution(summary)]
    if all(summary["random_tokens"]):
        parts.append("The prompts are random tokens: acceptance on them tells nothing about text.")
    return " ".join(part for part in parts if part)


def _ranked(summary: pd.DataFrame) -> list[Row]:
    """Return the arms that draft and keep the output, the fastest first."""
    measured = summary.loc[summary["k"] > 0].dropna(subset=["speedup"])
    lossless = measured.loc[~measured["verdict"].isin(_NOT_LOSSLESS)]
    return list(lossless.sort_values("speedup", ascending=False).to_dict("records"))


def _winner_text(best: Row, label: str) -> str:
    text = "Fastest" if best["speedup"] > 1 else "No arm beats autoregressive decoding; closest"
    text += f": {best[label]}, at {interval_text(best, 'speedup', '{:.2f}x')}"
    if math.isnan(best["speedup_low"]):
        kind = "one prompt" if best["num_prompts"] == 1 else "one group of prompts"
        text += f" (no interval: {kind})"
    text += (
        f" the speed of autoregressive decoding, with a mean accepted length of "
        f"{best['accepted_length']:.2f} (verdict on its output: {best['verdict']})."
    )
    if best["speedup_low"] <= 1 <= best["speedup_high"]:
        text += " The interval includes 1: no difference in speed is shown."
    return text


def _next_text(best: Row, other: Row, compare: Compare, label: str) -> str:
    """Return that the lead over the next arm is not shown, or nothing where it is or is unknown."""
    table = compare(best, other)
    if table is None:
        return ""
    (line,) = table.loc[table["measure"] == "speedup"].to_dict("records")
    if line["differs"] or math.isnan(line["low"]):
        return ""
    return (
        f"Its lead over the next, {other[label]}, is not shown: over the same prompts the ratio of "
        f"their speed-ups is {change_text(line)}."
    )


def category_label(category: Any) -> str:
    """Return a category's name as shown; a CSV file gives NaN for an empty one."""
    return category if isinstance(category, str) and category else "(no category)"


def number_text(value: float, form: str) -> str:
    """Return a number, or a dash for one that was not measured."""
    return form.format(value) if math.isfinite(value) else "-"


def interval_text(row: Mapping[Any, Any], name: str, form: str) -> str:
    """Return `value [low, high]`, or the value alone where there is no interval."""
    text = number_text(row[name], form)
    low, high = (number_text(row[f"{name}_{end}"], form).rstrip("x%") for end in ("low", "high"))
    return text if "-" in (low, high) else f"{text} [{low}, {high}]"


def _positions_text(row: Mapping[Any, Any]) -> str:
    """Return the unconditional acceptance at positions 1..K in per cent."""
    shares = [value for key, value in row.items() if str(key).startswith("acceptance_at_")]
    return " ".join(f"{100 * share:.0f}" for share in shares if math.isfinite(share)) or "-"


def verdict_text(row: Mapping[Any, Any]) -> str:
    """Return the verdict, with dtype and counts where texts were compared."""
    compared = row["verdict_num_compared"]
    counts = f", {row['verdict_dtype']} ({row['verdict_num_equal']}/{compared})"
    return f"{row['verdict']}{counts if compared else ''}"
