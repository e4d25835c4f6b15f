"""Two records of `bench=e2e` compared: which lines became slower."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError

ALLOWED_SLOWDOWN = 0.05
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What became of one line.

    Args:
        name: of the line.
        old_ms, new_ms: medians, None where it was not measured.
        verdict: "same", "faster", "slower", "missing", "new", or "not measured" in both.
    """

    name: str
    old_ms: float | None
    new_ms: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Return new over old."""
        if self.old_ms is None or self.new_ms is None:
            return None
        return self.new_ms / self.old_ms


def compare_records(old: Record, new: Record) -> list[Verdict]:
    """Return a verdict for each line of either record.

    A line is slower if its median is, by more than 5 %, and the repeats' ranges do not overlap;
    faster likewise.

    Raises:
        ConfigError: they are of different devices, shapes, dtypes or output lengths.
    """
    _check_same(old, new)
    before, after = _timed(old), _timed(new)
    names = list(dict.fromkeys([*before, *after]))
    return [_judge(name, before.get(name), after.get(name)) for name in names]


def _check_same(old: Record, new: Record) -> None:
    for what, section, key in (
        ("devices", "provenance", "device"),
        ("shapes", "config", "shapes"),
        ("dtypes", "provenance", "dtype"),
        ("output lengths", "config", "output_len"),
    ):
        a, b = ((record.get(section) or {}).get(key) for record in (old, new))
        if a != b:
            raise ConfigError(
                f"the records are of different {what} ({a} and {b}), so their times do not "
                "compare; give two of the same"
            )


def _timed(record: Record) -> dict[str, Mapping[str, Any]]:
    lines = [*record.get("lines", ()), *record.get("forwards", ())]
    return {line["name"]: line for line in lines}


def _ms(line: Mapping[str, Any] | None) -> float | None:
    return line.get("ms") if line is not None and line.get("status") == "measured" else None


def _judge(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Verdict:
    old_ms, new_ms = _ms(before), _ms(after)
    if before is None or after is None or old_ms is None or new_ms is None:
        lost = "missing" if old_ms is not None else "new"
        verdict = "not measured" if old_ms is None and new_ms is None else lost
        return Verdict(name, old_ms, new_ms, verdict)
    verdict = "same"
    if new_ms > old_ms * (1 + ALLOWED_SLOWDOWN) and after["ms_min"] > before["ms_max"]:
        verdict = "slower"
    if old_ms > new_ms * (1 + ALLOWED_SLOWDOWN) and before["ms_min"] > after["ms_max"]:
        verdict = "faster"
    return Verdict(name, old_ms, new_ms, verdict)
