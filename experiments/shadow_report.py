"""The table and the picture of a shadow run, from what every text gave."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from experiments.shadow_texts import Text
from experiments.shadow_walk import TextOutcome
from specdec.intervals import Array, ratio, share

ALL = "all"  # stands for every category


@dataclass(frozen=True)
class Prediction:
    """What a drafter gives with one K, text by text.

    Args:
        drafter: its name in the table.
        k: drafts a step at most.
        method: how it was found.
        outcomes: one for each text.
    """

    drafter: str
    k: int
    method: str
    outcomes: list[TextOutcome]


def summarise(predictions: Sequence[Prediction], texts: Sequence[Text]) -> pd.DataFrame:
    """Return one line per drafter, K and category, "all" first.

    Columns: `drafter`, `k`, `category`, `method`, `num_prompts`, `num_texts`, `num_steps` (expected
    verifications), `num_committed`, `accepted_length` (bonus included) with its `_low` and `_high`,
    and for each position i from 1 `acceptance_at_<i>` (over valid drafts) and `conditional_at_<i>`
    (over those whose predecessors were kept), as `specdec.metrics` defines them. Intervals are
    bootstraps over prompts; turns of one conversation are one.
    """
    categories = [ALL, *dict.fromkeys(text.category for text in texts)]
    largest = max((prediction.k for prediction in predictions), default=0)
    lines = []
    for prediction in predictions:
        for category in categories:
            pairs = zip(texts, prediction.outcomes, strict=True)
            own = [(t, o) for t, o in pairs if category in (ALL, t.category)]
            lines.append(_line(prediction, category, own, largest))
    return pd.DataFrame(lines)


def _line(
    prediction: Prediction, category: str, own: Sequence[tuple[Text, TextOutcome]], largest: int
) -> dict[str, Any]:
    prompts = sorted({text.prompt for text, _ in own})
    sums: Array = np.zeros((len(prompts), 2))
    drafted, reached, accepted = np.zeros((3, prediction.k))
    for text, outcome in own:
        sums[prompts.index(text.prompt)] += outcome.num_committed, outcome.num_steps
        drafted += outcome.drafted
        reached += outcome.reached
        accepted += outcome.accepted
    length = share(sums[:, 0], sums[:, 1], empty=1.0)
    line: dict[str, Any] = {
        "drafter": prediction.drafter,
        "k": prediction.k,
        "category": category,
        "method": prediction.method,
        "num_prompts": len(prompts),
        "num_texts": len(own),
        "num_steps": float(sums[:, 1].sum()),
        "num_committed": int(sums[:, 0].sum()),
        "accepted_length": length.value,
        "accepted_length_low": length.low,
        "accepted_length_high": length.high,
    }
    for name, below in (("acceptance", drafted), ("conditional", reached)):
        rates = [*ratio(accepted, below), *[np.nan] * (largest - prediction.k)]
        line |= {f"{name}_at_{i}": float(rate) for i, rate in enumerate(rates, 1)}
    return line


def render(summary: pd.DataFrame) -> Table:
    """Return the lines of all categories together as a table for the terminal."""
    table = Table(title="predicted from recorded texts (accepted length with the bonus token)")
    for name in ("drafter", "K", "mean accepted length", "accepted at position 1..K", "how"):
        table.add_column(name, justify="left" if name in ("drafter", "how") else "right")
    for row in summary.loc[summary["category"] == ALL].to_dict("records"):
        value, low, high = (row[f"accepted_length{end}"] for end in ("", "_low", "_high"))
        shown = f"{value:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")
        rates = [row[f"acceptance_at_{i}"] for i in range(1, row["k"] + 1)]
        positions = " ".join("-" if np.isnan(rate) else f"{rate:.2f}" for rate in rates)
        table.add_row(row["drafter"], str(row["k"]), shown, positions, row["method"])
    return table


def draw(summary: pd.DataFrame, path: Path) -> None:
    """Draw accepted length by K and acceptance by position, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_k, by_position = figure.subplots(1, 2)
    own = summary.loc[summary["category"] == ALL]
    for name, lines in own.groupby("drafter", sort=False):
        (drawn,) = by_k.plot(
            lines["k"], lines["accepted_length"], "o-", label=str(name).replace("$", r"\$")
        )
        low, high = lines["accepted_length_low"], lines["accepted_length_high"]
        by_k.fill_between(lines["k"], low, high, alpha=0.2, color=drawn.get_color())
        longest = lines.iloc[-1]
        positions = range(1, int(longest["k"]) + 1)
        rates = [longest[f"acceptance_at_{i}"] for i in positions]
        by_position.plot(positions, rates, "o-", color=drawn.get_color())
    by_k.set(xlabel="K, drafts a step at most", ylabel="mean accepted length (with bonus)")
    by_position.set(xlabel="draft position, at the largest K", ylabel="accepted", ylim=(0, 1))
    for axes in (by_k, by_position):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    by_k.legend(fontsize=8)
    figure.savefig(path, dpi=150)
