"""From a command line to an app: a user's mistake is one sentence on stderr and exit code 1."""

import dataclasses
import difflib
import functools
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from specdec.errors import SpecdecError

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
VERSION_BASE = "1.3"  # the Hydra defaults that the configs were written for
SCHEMA_SUFFIX = "_schema"  # of the names under which dataclasses lie beside the YAML options

_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def hydra_app(config_name: str, task: Callable[[DictConfig], None], when_interrupted: str) -> int:
    """Compose a configuration from the command line and run a task on it.

    With HYDRA_FULL_ERROR=1 every error is raised as it is.

    Args:
        config_name: root file in `conf/`.
        task: the app.
        when_interrupted: what an interrupt left, in one sentence.

    Returns:
        The process's exit code.
    """
    entered = False

    @functools.wraps(task)
    def guarded(cfg: DictConfig) -> None:
        nonlocal entered
        entered = True
        try:
            task(cfg)
        except (SpecdecError, OmegaConfBaseException) as error:
            if traced:
                raise
            # Not through Hydra, which would print more than the sentence.
            raise SystemExit(tell_failure(error)) from None

    app = hydra.main(version_base=VERSION_BASE, config_path=str(CONF_DIR), config_name=config_name)
    traced = wants_trace()
    try:
        with env_override({"HYDRA_FULL_ERROR": "1"}):  # Hydra then raises instead of printing
            app(guarded)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print(f"interrupted; {when_interrupted}", file=sys.stderr)
        return 130
    except Exception as error:
        # Before the task began there is only Hydra at work on the command line, and it raises
        # ValueError beside its own kinds. Afterwards an unknown error is a bug and needs its trace.
        if traced or entered:
            raise
        return tell_failure(error)
    return 0


def wants_trace() -> bool:
    """Return whether the user asked for errors as they are raised."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def is_users_mistake(error: Exception) -> bool:
    """Return whether an error says what is wrong with a configuration or a file, not with us."""
    return isinstance(error, SpecdecError | HydraException | OmegaConfBaseException)


def tell_failure(error: Exception) -> int:
    """Print what is wrong in one sentence; return the exit code."""
    print(f"error: {explain(error)}", file=sys.stderr)
    return 1


def explain(error: BaseException, prefix: str = "") -> str:
    """Say in one sentence what is wrong with a configuration.

    Args:
        error: raised by Hydra, OmegaConf or the project.
        prefix: put before the key where the error knows only the last part of it ("engine.").
    """
    if isinstance(error, SpecdecError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing_option(error)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read {error.override!r} ({_first_line(error)}); quote it or see its brackets"
        )
    cause = error.__cause__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        error = cause
    if isinstance(error, OmegaConfBaseException):
        return _explain_omegaconf(error, prefix)
    if "Config group override" in str(error):
        return _explain_group_value(sys.argv[1:])
    return " ".join(str(error).split())


def unknown_name(what: str, name: str, known: Sequence[str], shown: str | None = None) -> str:
    """Return a sentence for a name that is not known, with the nearest one.

    Args:
        what: what the name is of.
        name: as it was given.
        known: what could have been given.
        shown: how the given thing is cited, where that is more than the name.
    """
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(known) if known else "nothing"
    return f"{what} {shown or repr(name)} is not known; {hint}known: {listed}"


def _explain_missing_option(error: MissingConfigException) -> str:
    assert error.missing_cfg_file is not None
    group, _, choice = error.missing_cfg_file.rpartition("/")
    options = [o for o in error.options or () if not o.endswith(SCHEMA_SUFFIX)]
    if not group:
        return _first_line(error)
    return unknown_name("option", choice, options, shown=f"{group}={choice}")


def _explain_group_value(overrides: Sequence[str]) -> str:
    """Name the overrides that choose something other than an option's name from a group."""
    chosen = [o for o in overrides if (CONF_DIR / o.partition("=")[0].lstrip("+")).is_dir()]
    return f"one of {', '.join(chosen) or 'the groups'} chooses no option; give a name"


def _explain_omegaconf(error: OmegaConfBaseException, prefix: str) -> str:
    key = f"{prefix}{error.full_key}" if error.full_key else prefix.rstrip(".")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value; give {key}=..."
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        parent, _, last = key.rpartition(".")
        known = _keys_beside(error)
        if not parent:
            known += sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir() and p.name != "hydra")
        sentence = unknown_name("key", last, list(dict.fromkeys(known)), shown=key)
        is_open = not dataclasses.is_dataclass(error.object_type) and parent
        return sentence + (f"; write +{key}=... to add it" if is_open else "")
    if isinstance(error, ValidationError):
        value = getattr(error, "value", None)
        allowed = _allowed_type(error)
        reason = f"give {allowed}" if allowed else _first_line(error)
        return f"{key}={value!r} is not allowed; {reason}"
    return f"{key}: {_first_line(error)}"


def _keys_beside(error: OmegaConfBaseException) -> list[str]:
    """Return the keys that the place of an unknown key has."""
    if dataclasses.is_dataclass(error.object_type):
        return [f.name for f in dataclasses.fields(error.object_type)]
    if isinstance(error.parent_node, DictConfig):
        return [str(key) for key in error.parent_node]
    return []


def _allowed_type(error: ValidationError) -> str | None:
    """Return in words what the field takes, None where that is not known."""
    if not dataclasses.is_dataclass(error.object_type):
        return None
    hints = {f.name: f.type for f in dataclasses.fields(error.object_type)}
    return type_words(hints.get(str(error.key)))


def type_words(annotation: Any) -> str | None:
    """Return in words what a field of this type takes, None where there are no words for it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _TYPE_WORDS:
        return _TYPE_WORDS[annotation]
    if origin in (list, tuple) or annotation in (list, tuple):
        inner = type_words(args[0]) if args else None
        return f"a list (each {inner})" if inner else "a list"
    if origin is dict or annotation is dict or dataclasses.is_dataclass(annotation):
        return "a mapping"
    if origin is typing.Literal:
        return ", ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        words = ["null" if arg is type(None) else type_words(arg) for arg in args]
        return " or ".join(w for w in words if w) if all(words) else None
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip()
