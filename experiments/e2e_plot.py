"""The picture of a record of `bench=e2e`: lines beside floor, peer and aim; the cost of scale."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.errors import ConfigError

_COLUMNS = 4
_WIDTH_IN, _ROW_IN, _DPI = 17.0, 3.1, 100
_OURS, _BARS, _DEVICE = "#3b6ea5", "#a9c4de", "#1c3d5e"
# Markers beside a bar: key of a line, what it is, marker, colour.
_MARKS = (
    ("floor_ms", "floor: bytes / read rate", "_", "#222222"),
    ("device_ms", "graph alone", "x", _DEVICE),
    ("peer_ms", "peer", "D", "#c0504d"),
    ("aim_ms", "aim", "*", "#4f9d4f"),
)
_LOG_FROM = 20  # times the smallest
Lines = Sequence[Mapping[str, Any]]


def plot_record(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record into one PNG.

    Args:
        record: of `bench=e2e`.
        path: of the picture.

    Raises:
        ConfigError: nothing was measured.
    """
    lines = [line for line in record["lines"] if line["status"] == "measured"]
    rows = [row for row in record["scale"] if row["status"] == "measured"]
    kinds = list(dict.fromkeys((line["model"], line["drafter"]) for line in lines))
    axes_of = list(dict.fromkeys((row["model"], row["axis"]) for row in rows))
    if not kinds and not axes_of:
        raise ConfigError("no line of the record was measured; run the bench again")
    panels = [(_draw_kind, kind, _of(lines, "drafter", kind)) for kind in kinds]
    panels += [None] * (-len(panels) % _COLUMNS)
    for draw in (_draw_time, _draw_memory):
        panels += [(draw, axis, _of(rows, "axis", axis)) for axis in axes_of]
        panels += [None] * (-len(panels) % _COLUMNS)
    num_rows = len(panels) // _COLUMNS
    figure = Figure(figsize=(_WIDTH_IN, _ROW_IN * num_rows + 1), dpi=_DPI, layout="constrained")
    for i, panel in enumerate(panels):
        if panel is not None:
            draw, names, own = panel
            draw(figure.add_subplot(num_rows, _COLUMNS, i + 1), " ".join(names), own)
    device = (record.get("provenance") or {}).get("device", "unknown device")
    figure.suptitle(f"A step of the whole batch on {device}; bars: ours, and the repeats' range")
    handles: dict[str, Any] = {}
    for axes in figure.axes[: len(kinds)]:
        marks, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, marks, strict=True))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _of(lines: Lines, key: str, names: tuple[str, str]) -> Lines:
    """Return the lines of a model and of a drafter or an axis, by batch or value."""
    own = [line for line in lines if (line["model"], line[key]) == names]
    return sorted(own, key=lambda line: line["batch"] if key == "drafter" else line["value"])


def _draw_kind(axes: Axes, title: str, lines: Lines) -> None:
    """Draw a model and drafter: a bar a batch, with the repeats' range, and what it is held to."""
    places = range(len(lines))
    times = [line["ms"] for line in lines]
    below = [line["ms"] - line["ms_min"] for line in lines]
    above = [line["ms_max"] - line["ms"] for line in lines]
    axes.bar(places, times, 0.6, yerr=[below, above], color=_BARS, capsize=3, label="ours")
    for name, label, marker, color in _MARKS:
        known = [(i, line[name]) for i, line in enumerate(lines) if line.get(name) is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.scatter(x, y, s=70, marker=marker, color=color, label=label, zorder=3)
    axes.set_xticks(list(places), [f"{line['batch']}\n{line['ms']:.2f} ms" for line in lines])
    axes.set(title=title, xlabel="requests, and what a step of them took", ylabel="ms a step")
    axes.set_ylim(bottom=0)


def _draw_time(axes: Axes, title: str, rows: Lines) -> None:
    """Draw the times of an axis beside the law."""
    values = [row["value"] for row in rows]
    axes.plot(values, [row["ms"] for row in rows], "o-", color=_OURS, label="measured")
    fitted = [(row["value"], row["expected_ms"]) for row in rows if "expected_ms" in row]
    if fitted:
        axes.plot(*zip(*fitted, strict=True), "--", color="#222222", label=rows[0].get("fit"))
    _finish_scale(axes, f"{title}: time", values, "ms a step")
    axes.set_ylim(bottom=0)


def _draw_memory(axes: Axes, title: str, rows: Lines) -> None:
    """Draw the bytes of an axis beside the formula."""
    values = [row["value"] for row in rows]
    known = [(row["value"], row["bytes"] / 2**20) for row in rows if row["bytes"] is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "o-", color=_OURS, label="measured")
    expected = [row["expected_bytes"] / 2**20 for row in rows]
    axes.plot(values, expected, "--", color="#222222", label="by formula")
    _finish_scale(axes, f"{title}: memory", values, "MiB")
    if max(expected) > _LOG_FROM * min(expected):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _finish_scale(axes: Axes, title: str, values: Sequence[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(value) for value in values])
    axes.minorticks_off()
    axes.set(title=title, ylabel=unit)
    axes.legend(fontsize=7)
