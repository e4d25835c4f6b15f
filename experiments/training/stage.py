"""A stage of training without Hydra: its configuration from JSON, its command line.

    python -m experiments.training.data --config data.json --out folder

A stage is a dataclass of options and a function that takes them, the folder it writes to, and what
was typed. Needs nothing beside what the stages themselves need.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from experiments.provenance import shown_command
from specdec.config import from_mapping
from specdec.errors import ConfigError, SpecdecError
from specdec.log import setup_logging

T = TypeVar("T")

# Takes figures named like `data/tokens_per_s`, and a step that never falls.
LogMetrics = Callable[[Mapping[str, float], int], None]


@dataclass(frozen=True)
class StageRun:
    """Where a stage writes and whom it tells.

    Args:
        folder: its own; it is made where it does not exist, and a stage that was stopped goes on in
            it.
        command: what was typed, for the record.
        log: takes its figures as they come.
    """

    folder: Path
    command: str
    log: LogMetrics = lambda metrics, step: None


def typed_config(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from a mapping, and the dataclasses inside it from the mappings inside.

    Args:
        cls: the dataclass.
        values: by field.
        what: what the values are options of, for messages ("data").

    Raises:
        ConfigError: an unknown key, or a value of a wrong type or range.
    """
    hints, built = get_type_hints(cls), dict(values)
    for key, value in values.items():
        hint = hints.get(key)
        if isinstance(value, Mapping) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
            built[key] = typed_config(hint, value, f"{what}.{key}")
        elif hint is float and isinstance(value, int) and not isinstance(value, bool):
            built[key] = float(value)
    return from_mapping(cls, built, f"{what} option")


def read_config(cls: type[T], path: Path, what: str) -> T:
    """Read a stage's options from a JSON file.

    Raises:
        ConfigError: the file is no JSON object, or its options are not allowed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object; give the options of {what} by name")
    return typed_config(cls, values, what)


def stage_main(name: str, cls: type[T], run: Callable[[T, StageRun], Mapping[str, Any]]) -> int:
    """Run a stage on the command line; returns 1 after one sentence on stderr.

    Args:
        name: of the stage, and of its module.
        cls: its options.
        run: the stage; returns its record, which is printed.
    """
    parser = argparse.ArgumentParser(description=f"the stage {name} of experiments.train")
    parser.add_argument("--config", type=Path, help="JSON file of options; none takes defaults")
    parser.add_argument("--out", type=Path, required=True, help="folder that the stage writes to")
    given = parser.parse_args()
    setup_logging()
    command = shown_command(f"experiments.training.{name}", sys.argv[1:])
    try:
        config = read_config(cls, given.config, name) if given.config else cls()
        record = run(config, StageRun(given.out, command))
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(record, indent=2))
    return 0
