"""Tables for a paper: LaTeX by booktabs, from the tables of `specdec.metrics`.

A file is a `table` environment; the document needs `\\usepackage{booktabs}` and no other package.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.tables import RANDOM_NOTE, interval_text

_MARK = "$^{*}$"  # of an arm whose prompts are random tokens
# What LaTeX would take for a command; the backslash first, for the others bring some.
_ESCAPES = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_ESCAPES |= {char: f"\\{char}" for char in "_%&#${}"}
_ESCAPES |= {"<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}"}
_ESCAPES |= {"[": "{[}", "]": "{]}"}  # at the start of a row, an option of the line before


def escape(text: str) -> str:
    """Return a text that LaTeX sets as it is."""
    return "".join(_ESCAPES.get(char, char) for char in text)


def with_interval(text: str) -> str:
    """Return `value [low, high]` with the interval in small letters, escaped."""
    value, _, interval = text.partition(" [")
    return escape(value) + (f" {{\\scriptsize {escape('[' + interval)}}}" if interval else "")


def write_table(
    path: Path,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: Sequence[int],
    caption: str,
    notes: Sequence[str],
) -> None:
    """Write a table.

    Args:
        path: the file.
        headers: one a column; escaped here.
        rows: cells that are LaTeX already.
        text_columns: the columns that are left-aligned; the others are right-aligned.
        caption: escaped here.
        notes: lines below the table; escaped here.
    """
    frame = pd.DataFrame(list(rows), columns=[escape(header) for header in headers], dtype=object)
    columns = "".join("l" if i in text_columns else "r" for i in range(len(headers)))
    text = frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format=columns,
        caption=escape(caption),
        position_float="centering",
    )
    below = "".join(f"\\par\\scriptsize {escape(note)}\n" for note in notes)
    # Narrow, so that a page without further packages holds the columns.
    text = text.replace(
        "\\begin{tabular}", "\\footnotesize\\setlength{\\tabcolsep}{3pt}\n\\begin{tabular}"
    )
    text = text.replace("\\end{table}", f"{below}\\end{{table}}")
    path.write_text("% needs \\usepackage{booktabs}\n" + text, encoding="utf-8")


def write_summary(path: Path, summary: pd.DataFrame, setting: str, name: str = "arm") -> None:
    """Write the headline table, one line per arm.

    Args:
        path: the file.
        summary: from `specdec.metrics.summarise_arms`.
        setting: where the numbers were measured, for the note.
        name: the column that names the arms.
    """
    headers = ["Arm", "K", "Accepted length", "Tokens/s", "Speed-up", "Output"]
    rows = [
        [
            arm_cell(row, name),
            str(row["k"]),
            with_interval(interval_text(row, "accepted_length", "{:.2f}")),
            with_interval(interval_text(row, "tokens_per_s", "{:.1f}")),
            with_interval(interval_text(row, "speedup", "{:.2f}x")),
            escape(str(row["verdict"])),
        ]
        for row in summary.to_dict("records")
    ]
    caption = "Mean accepted length (bonus included), speed and verdict on the output."
    notes = ["In brackets: 95 % bootstrap interval over prompts, for speeds over groups of them."]
    notes += random_notes(summary)
    write_table(path, headers, rows, (0, 5), caption, [*notes, setting] if setting else notes)


def arm_cell(row: Mapping[Any, Any], name: str) -> str:
    """Return an arm's name, marked where its prompts are random tokens."""
    return escape(str(row[name])) + (_MARK if row["random_tokens"] else "")


def random_notes(table: pd.DataFrame) -> list[str]:
    """Return the note that explains the mark, where it is used."""
    return [f"* {RANDOM_NOTE}"] if any(table["random_tokens"]) else []
