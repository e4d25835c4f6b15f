"""The lines of `bench=e2e` as text: a record, a line while it is measured, two compared."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.e2e_guard import Verdict

Rows = list[list[str]]
LINE_HEADERS = (
    *("case", "ms", "range", "device", "gap", "tok/s", "tok/step", "host us", "launches"),
    *("floor", "x floor", "peer", "x peer", "aim", "met"),
)
SPLIT_HEADERS = ("case", "inputs", "target", "verify", "draft", "host", "step", "step alone")
FORWARD_HEADERS = (
    "forward, requests x tokens",
    "ms",
    "range",
    "floor",
    "x floor",
    "peer",
    "aim",
    "met",
)
STATE_HEADERS = ("case", "MHz", "least", "most", "W", "limited by, of the time")
SCALE_HEADERS = (
    *("axis", "value", "model", "drafter", "ms", "expected ms", "MB", "expected MB", "graph MB"),
    "fit",
)


_MARKDOWN_HEADERS = (
    *("shape, drafter", "requests", "ms a step", "floor", "times floor", "peer", "aim"),
    "target, verify, draft",
)
_MODEL_NAMES = {
    "8b": "8B",
    "8b_fp8": "8B in 8 bits",
    "135m": "135M",
    "135m_real": "135M, own weights",
}


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _range(line: Mapping[str, Any]) -> str:
    return f"{line['ms_min']:.3f}..{line['ms_max']:.3f}"


def _met(line: Mapping[str, Any]) -> str:
    met = line.get("aim_met")
    return "-" if met is None else "yes" if met else "NO"


def line_rows(record: Mapping[str, Any]) -> Rows:
    """Return the measured lines, cells in the order of `LINE_HEADERS`."""
    return [
        [
            line["name"],
            _number(line["ms"]),
            _range(line),
            _number(line["device_ms"]),
            _number(line["gap_ms"]),
            _number(line["tokens_per_s"], "{:.0f}"),
            _number(line["tokens_per_step"], "{:.2f}"),
            _number(line["host_us"], "{:.0f}"),
            _number(sum(line["launches_per_step"].values()), "{:.1f}"),
            _number(line["floor_ms"]),
            _number(line["over_floor"], "{:.2f}"),
            _number(line["peer_ms"]),
            _number(line["over_peer"], "{:.2f}"),
            _number(line["aim_ms"], "{:g}"),
            _met(line),
        ]
        for line in _measured(record["lines"])
    ]


def split_rows(record: Mapping[str, Any]) -> Rows:
    """Return the phases of the lines that have them; the last column is the line's own step."""
    names = ("inputs_ms", "target_ms", "verify_ms", "draft_ms", "host_ms", "step_ms")
    return [
        [line["name"], *(_number(line["split"][name]) for name in names), _number(line["ms"])]
        for line in _measured(record["lines"])
        if line.get("split")
    ]


def forward_rows(record: Mapping[str, Any]) -> Rows:
    """Return the forwards alone."""
    return [
        [
            line["name"],
            _number(line["ms"]),
            _range(line),
            _number(line["floor_ms"]),
            _number(line["over_floor"], "{:.2f}"),
            _number(line["peer_over_floor"], "{:g} x floor"),
            _number(line["aim_over_floor"], "{:g} x floor"),
            _met(line),
        ]
        for line in _measured(record["forwards"])
    ]


def state_rows(record: Mapping[str, Any]) -> Rows:
    """Return what the device did while the lines and forwards were timed, where that is known."""
    found = []
    for line in _measured([*record["lines"], *record["forwards"]]):
        if state := line.get("state"):
            limits = [f"{name} {share:.0%}" for name, share in state["limited_by"].items()]
            found.append(
                [
                    line["name"],
                    *(f"{state[name]:.0f}" for name in ("sm_mhz", "sm_mhz_min", "sm_mhz_max")),
                    f"{state['watts']:.0f}",
                    ", ".join(limits) or "-",
                ]
            )
    return found


def scale_rows(record: Mapping[str, Any]) -> Rows:
    """Return the cost of scale."""
    found = []
    for row in _measured(record["scale"]):
        bytes_mb = None if row["bytes"] is None else row["bytes"] / 1e6
        found.append(
            [
                *(row["axis"], str(row["value"]), row["model"], row["drafter"]),
                *(_number(row["ms"]), _number(row.get("expected_ms"))),
                *(_number(mb, "{:.1f}") for mb in (bytes_mb, row["expected_bytes"] / 1e6)),
                _number(row["graph_bytes"] / 1e6, "{:.1f}"),
                row.get("fit", "-"),
            ]
        )
    return found


def _measured(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["status"] == "measured"]


def left_out(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each line that was not measured, or only in part."""
    found = []
    for line in (*record["lines"], *record["forwards"], *record["scale"]):
        name = line.get("name") or f"scale {line['model']} {line['axis']} {line['value']}"
        if line["status"] != "measured":
            found.append(f"{name}: {line['status']}: {line['reason']}")
        elif line.get("split_reason"):
            found.append(f"{name}: its split failed: {line['split_reason']}")
    return found


def sections(record: Mapping[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Return title, headers and rows of each table of a record that has any rows."""
    rates = record["ceilings"]
    ceilings = ", ".join(f"{name} {value:.4g}" for name, value in rates.items())
    found = [
        (f"e2e: ms a step ({ceilings})", LINE_HEADERS, line_rows(record)),
        (
            "split: ms by events in the graph of another engine, one step in flight; its step, and "
            "the line's own",
            SPLIT_HEADERS,
            split_rows(record),
        ),
        ("target forward alone, head included", FORWARD_HEADERS, forward_rows(record)),
        ("the device meanwhile", STATE_HEADERS, state_rows(record)),
        ("cost of scale, beside the law that is expected", SCALE_HEADERS, scale_rows(record)),
    ]
    return [section for section in found if section[2]]


def columns_text(headers: Sequence[str], rows: Rows) -> str:
    """Return cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headers, *rows)
    )


def markdown_table(record: Mapping[str, Any]) -> str:
    """Return the measured lines as a table of Markdown: by model and drafter, then by batch."""
    lines = _measured(record["lines"])
    order = list(dict.fromkeys((line["model"], line["drafter"]) for line in lines))
    order.sort(key=lambda kind: list(_MODEL_NAMES).index(kind[0]))
    rows = []
    for kind in order:
        own = [line for line in lines if (line["model"], line["drafter"]) == kind]
        for line in sorted(own, key=lambda line: line["batch"]):
            peer, aim = (_number(line[f"{name}_ms"], "{:.2f}") for name in ("peer", "aim"))
            split = line.get("split") or {}
            phases = [split.get(f"{name}_ms") for name in ("target", "verify", "draft")]
            rows.append(
                [
                    f"{_MODEL_NAMES[kind[0]]}, `{kind[1]}`",
                    str(line["batch"]),
                    f"**{line['ms']:.2f}**",
                    f"{line['floor_ms']:.2f}",
                    f"{line['over_floor']:.2f}",
                    peer.replace("-", ""),
                    f"{aim} **missed**" if line["aim_met"] is False else aim.replace("-", ""),
                    ", ".join(_number(ms, "{:.2f}") for ms in phases) if split else "",
                ]
            )
    cells = [_MARKDOWN_HEADERS, ["---"] * len(_MARKDOWN_HEADERS), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def record_text(record: Mapping[str, Any]) -> str:
    """Return a record for a terminal without rich."""
    parts = [f"{title}\n{columns_text(headers, rows)}" for title, headers, rows in sections(record)]
    return "\n\n".join([*parts, *left_out(record)])


def line_text(line: Mapping[str, Any]) -> str:
    """Return one line as soon as it is known."""
    if line["status"] != "measured":
        return f"{line['name']:<24} {line['status']}: {line['reason']}"
    text = f"{line['name']:<24} {line['ms']:8.3f} ms ({_range(line)})"
    for name, form in (("device_ms", "device {:.3f}"), ("over_floor", "{:.2f} x floor")):
        text += f"  {_number(line.get(name), form)}"
    if line.get("over_peer") is not None:
        text += f"  {line['over_peer']:.2f} x peer"
    if line.get("aim_met") is not None:
        text += f"  aim {'met' if line['aim_met'] else 'NOT met'}"
    return text


def guard_text(verdicts: Sequence[Verdict]) -> str:
    """Return compared lines as a table."""
    rows = [
        [
            verdict.name,
            *(_number(ms) for ms in (verdict.old_ms, verdict.new_ms)),
            _number(None if verdict.ratio is None else verdict.ratio - 1, "{:+.1%}"),
            verdict.verdict,
        ]
        for verdict in verdicts
    ]
    return columns_text(["case", "old ms", "new ms", "change", "verdict"], rows)
