"""How a run of training went: figures summed on the device, and a line of JSON every few steps."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.training.losses import PassFigures
from experiments.training.stage import StageRun


class Figures:
    """Means over the batches since the last line; nothing is read before it is taken."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._sums: Tensor | None = None

    def add(self, loss: Tensor, figures: PassFigures) -> None:
        """Add a batch: its loss, and what is known of each pass."""
        own = torch.stack([loss.detach().double().expand_as(figures.accepted), *figures[1:3]])
        self._sums = own if self._sums is None else self._sums + own
        self.num_batches += 1

    def take(self) -> Tensor:
        """Return means [3, J] float64 of loss, acceptance and agreement, and begin anew."""
        assert self._sums is not None, "no batch since the last line"
        means = self._sums / self.num_batches
        self.num_batches, self._sums = 0, None
        return means


class Curve:
    """The file `curve.jsonl`, and the tracker.

    Args:
        run: whose folder and tracker.
        writes: False on all processes but one.
    """

    def __init__(self, run: StageRun, writes: bool) -> None:
        self._run, self._writes = run, writes
        self._path = run.folder / "curve.jsonl"
        self._last = 0, 0.0  # tokens and seconds of the last line
        run.folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int, num_tokens: int, seconds: float) -> None:
        """Go on behind a step: lines of later ones, of a run that was stopped, are removed."""
        self._last = num_tokens, seconds
        if self._writes:
            lines = read_curve(self._path)
            kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
            self._path.write_text("".join(kept) if step else "", encoding="utf-8")

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write a line of training, with its tokens per second; returns it."""
        num_tokens, seconds = self._last
        passed = line["seconds"] - seconds
        line["tokens_per_s"] = round((line["num_tokens"] - num_tokens) / max(passed, 1e-9))
        self._last = line["num_tokens"], line["seconds"]
        names = ("loss", "lr", "tokens_per_s")
        metrics = {f"fit/{name}": float(line[name]) for name in names}
        for name in ("accepted", "agreed"):
            metrics |= {f"fit/{name}_{i}": value for i, value in enumerate(line[name], 1)}
        self._write(line, metrics)
        return line

    def add_lengths(self, step: int, lengths: dict[str, float]) -> None:
        """Write accepted lengths that the engine measured at a step."""
        self._write({"step": step, **lengths}, {f"accept/{name}": v for name, v in lengths.items()})

    def _write(self, line: dict[str, Any], metrics: dict[str, float]) -> None:
        if self._writes:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            self._run.log(metrics, line["step"])


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Read a curve; the last line of a killed run may be torn, and is left out."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return lines


def rate_at(share: float, warmup: float, final: float) -> float:
    """Return the learning rate as a part of its highest: a rise, then a cosine.

    Args:
        share: of the run that is done, 0 to 1.
        warmup: share of the run in which the rate rises.
        final: what it falls to.
    """
    if share < warmup:
        return max(share / warmup, 0.01)
    rest = (share - warmup) / max(1 - warmup, 1e-9)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * rest))
