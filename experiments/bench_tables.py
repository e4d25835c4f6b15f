"""The terminal's tables of the benches, from their records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from experiments.e2e_tables import left_out, sections

Line = Mapping[str, Any]


def generate_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the arms of `bench=generate`."""
    headers = ["arm", "tokens/s", "accepted length", "over transformers", "over none", "same text"]
    table = _table("generate: factors with 95 % bootstrap intervals over prompts", headers)
    for line in record["summary"]:
        table.add_row(
            line["arm"],
            number(line["tokens_per_s"], "{:.1f}"),
            number(line["accepted_length"], "{:.2f}"),
            *(
                f"{number(line[f'over_{base}'], '{:.2f}')} "
                f"[{number(line[f'over_{base}_low'], '{:.2f}')}, "
                f"{number(line[f'over_{base}_high'], '{:.2f}')}]"
                for base in ("transformers", "none")
            ),
            f"{line['same_text']}/{line['num_prompts']}",
        )
    return [table]


def step_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the lines of `bench=step`, then what the runtime was called for, then kernels."""
    headers = ["drafter", "scope", "requests", "step us", "host us", "device us", "idle"]
    headers += ["kernel launches", "graph launches", "event waits", "nodes", "gaps in a launch us"]
    table = _table(
        "step: medians of a steady decode loop; counts are per step; the gaps are a profiled run's",
        headers,
        text_columns=2,
    )
    for line in record["lines"]:
        table.add_row(
            line["drafter"],
            _scope(line),
            str(line["num_reqs"]),
            *(number(line.get(name), "{:.0f}") for name in ("step_us", "host_us", "device_us")),
            number(line.get("idle_share"), "{:.1%}"),
            *(number(line[name], "{:.1f}") for name in ("kernel_launches", "graph_launches")),
            number(line["runtime_calls"].get("cudaEventSynchronize", 0.0), "{:.1f}"),
            number(line["num_nodes"], "{:.1f}"),
            number(line["profiled_gaps_inside_launch_us"], "{:.0f}"),
        )
    tables = [table]
    lines = [line for line in record["lines"] if line["scope"] == "step"]
    if lines:
        tables.append(_runtime_calls(lines))
    kernels = _table(f"kernels at {record['kernels']['num_reqs']} requests", ["figure", "value"])
    for name, value in record["kernels"].items():
        if name != "num_reqs":
            kernels.add_row(name, number(value, "{:.2f}"))
    return [*tables, kernels]


def _scope(line: Line) -> str:
    """Return a line's scope, and how many steps a launch of it holds where these are several."""
    steps = line.get("steps_per_launch", 1)
    return line["scope"] if steps == 1 else f"{line['scope']} x {steps}"


def _runtime_calls(lines: Sequence[Line]) -> Table:
    """Return every runtime call of a step whose scope is `step`, and what should not be there."""
    headers = [f"{line['drafter']}\n{_scope(line)}\nR={line['num_reqs']}" for line in lines]
    table = _table("runtime calls per step, scope step (R requests)", ["call", *headers])
    for name in sorted({name for line in lines for name in line["runtime_calls"]}):
        counts = (line["runtime_calls"].get(name, 0.0) for line in lines)
        table.add_row(name, *(number(count, "{:.2f}") if count else "-" for count in counts))
    table.add_section()
    for name, key in (
        ("pageable copies", "pageable_copies"),
        ("waits before the launch", "early_waits"),
    ):
        table.add_row(name, *(number(line[key], "{:.2f}") for line in lines))
    return table


def attention_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the lines of `bench=attention`."""
    ceiling = number(record["read_ceiling_gb_per_s"], "{:.0f}")
    headers = ["shape", "batch", "context", "query", "us", "MB read", "GB/s", "of ceiling"]
    table = _table(f"attention: one layer; the device reads {ceiling} GB/s", [*headers, "launch"])
    table.columns[-1].justify = "left"
    for line in record["lines"]:
        table.add_row(
            line["shape"],
            *(str(line[name]) for name in ("batch", "context", "query_len")),
            number(line["us"], "{:.1f}"),
            number(line["read_bytes"] / 1e6, "{:.1f}"),
            number(line["gb_per_s"], "{:.0f}"),
            number(line["of_ceiling"], "{:.1%}"),
            " ".join(f"{key}={value}" for key, value in line["launch"].items()),
        )
    return [table]


def sampler_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the lines of `bench=sampler`; the peer is set beside the time that is like its own."""
    ceiling = number(record["read_ceiling_gb_per_s"], "{:.0f}")
    title = (
        f"sampler: vocabulary {record['vocab_size']}; the device reads {ceiling} GB/s\n"
        "median us, logits not in L2 and, where they fit, in L2, as the peer's; MB read and written"
    )
    headers = ["kernel", "dtype", "requests", "lines", "us", "in L2", "MB", "floor", "x floor"]
    headers += ["peer", "x peer", "MB extra"]
    table = _table(title, headers, text_columns=2)
    for line in record["lines"]:
        table.add_row(
            line["kernel"],
            line["dtype"],
            *(number(line[name], "{}") for name in ("requests", "lines")),
            *(number(line[name], "{:.1f}") for name in ("us", "us_in_l2")),
            number((line["read_bytes"] + line["write_bytes"]) / 1e6, "{:.1f}"),
            number(line["floor_us"], "{:.1f}"),
            number(line["over_floor"], "{:.2f}"),
            number(line["peer_us"], "{:.1f}"),
            number(line["of_peer"], "{:.2f}"),
            number(line["extra_bytes"] / 1e6, "{:.1f}"),
        )
    prompts = _table(
        "log-probabilities of a prompt: peak memory beside weights and KV, and seconds",
        ["tokens", "chunk", "MB without", "MB with", "MB extra", "s without", "s with"],
        text_columns=0,
    )
    for line in record["prompt_logprobs"]:
        prompts.add_row(
            *(number(line[name], "{}") for name in ("prompt_len", "chunk")),
            *(
                number(line[name] / 1e6, "{:.1f}")
                for name in ("peak_bytes_without", "peak_bytes_with", "extra_bytes")
            ),
            *(number(line[name], "{:.2f}") for name in ("seconds_without", "seconds_with")),
        )
    return [table, prompts] if record["prompt_logprobs"] else [table]


def e2e_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the tables of `bench=e2e`, and what was not measured."""
    tables = []
    for title, headers, rows in sections(record):
        tables.append(_table(title, headers))
        for row in rows:
            tables[-1].add_row(*row)
    missing = left_out(record)
    if missing:
        tables.append(_table("not measured", ["line"]))
        for sentence in missing:
            tables[-1].add_row(sentence)
    return tables


def line_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return a record's lines as they are: a column for each key, texts to the left."""
    lines = [_flat(line) for line in record["lines"]]
    names = list(dict.fromkeys(name for line in lines for name in line))
    texts = [name for name in names if any(isinstance(line.get(name), str) for line in lines)]
    names = texts + [name for name in names if name not in texts]
    table = _table(record["bench"], [name.replace("_", " ") for name in names], len(texts))
    for line in lines:
        table.add_row(*(_cell(line.get(name)) for name in names))
    return [table]


def _flat(line: Line) -> dict[str, Any]:
    """Return a line whose nested mappings are columns of their own."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} {key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _cell(value: Any) -> str:
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
        return number(value, f"{{:.{digits}f}}")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def number(value: float | None, form: str) -> str:
    """Format a number; a dash stands for what was not measured."""
    return form.format(value) if value is not None and math.isfinite(value) else "-"


def _table(title: str, headers: Sequence[str], text_columns: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for place, header in enumerate(headers):
        is_text = place < text_columns
        table.add_column(header, justify="left" if is_text else "right", overflow="fold")
    return table
