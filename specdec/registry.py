"""Names to plug-ins: built-in table, decorator, entry points and dotted paths.

Adding a drafter in the project is one line in `_BUILTIN["drafter"]`; outside it is the decorator in
an imported module, an entry point of the group `specdec.drafters`, or a dotted path in the config.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from specdec.config import did_you_mean, from_mapping
from specdec.errors import ConfigError
from specdec.protocols import API_VERSION

T = TypeVar("T", bound=type)

_BUILTIN: dict[str, dict[str, str]] = {
    "drafter": {
        "none": "drafters.none",
        "ngram": "drafters.ngram",
        "oracle": "drafters.oracle",
        "record": "drafters.record",
        "draft_model": "drafters.draft_model",
        "layer_skip": "drafters.layer_skip",
        "medusa": "drafters.medusa",
        "block_parallel": "drafters.block_parallel",
        "eagle": "drafters.eagle",
        "eagle3": "drafters.eagle3",
        "suffix": "drafters.suffix",
        "mixed": "drafters.mixed",
    },
    "verifier": {
        "greedy": "sampler.verify.greedy",
        "rejection": "sampler.verify.rejection",
        "sampled_match": "sampler.verify.sampled_match",
        "block": "sampler.verify.block",
        "coupled": "sampler.verify.coupled",
        "typical": "sampler.verify.typical",
        "synthetic": "sampler.verify.synthetic",
    },
    "logits_processor": {},
    "draft_length": {
        "fixed": "specdec.draft_length.fixed",
        "by_batch_size": "specdec.draft_length.by_batch_size",
        "confidence": "specdec.draft_length.confidence",
        "goodput": "specdec.draft_length.goodput",
    },
}
_ENTRY_POINT_GROUPS = {
    "drafter": "specdec.drafters",
    "verifier": "specdec.verifiers",
    "logits_processor": "specdec.logits_processors",
    "draft_length": "specdec.draft_lengths",
}


_MAX_SHOWN = 8  # plug-ins of others, or of one module, that a refusal lists


@dataclass(frozen=True)
class PluginEntry:
    """A registered plug-in: its class and the dataclass of its configuration."""

    name: str
    cls: type
    config_cls: type


_registered: dict[str, dict[str, PluginEntry]] = {kind: {} for kind in _BUILTIN}


def register_drafter(name: str, config_cls: type, api_version: int = 1) -> Callable[[T], T]:
    """Register a drafter class under a name; the decorator returns the class.

    Args:
        name: what `drafter=<name>` selects.
        config_cls: dataclass of the drafter's parameters; the drafter is built from an instance.
        api_version: the `specdec.protocols.API_VERSION` that the plug-in was written for; what says
            nothing was written for version 1.

    Raises:
        ConfigError: the name is taken by another class, or the API version differs.
    """
    return _register("drafter", name, config_cls, api_version)


def register_verifier(name: str, config_cls: type, api_version: int = 1) -> Callable[[T], T]:
    """Register a verifier class under a name, as `register_drafter` does for drafters."""
    return _register("verifier", name, config_cls, api_version)


def register_logits_processor(
    name: str, config_cls: type, api_version: int = 1
) -> Callable[[T], T]:
    """Register a logits processor class under a name, as `register_drafter` does for drafters.

    It is built from an instance of `config_cls` and a `specdec.protocols.ProcessorSetup`.
    """
    return _register("logits_processor", name, config_cls, api_version)


def register_draft_length(name: str, config_cls: type, api_version: int = 1) -> Callable[[T], T]:
    """Register a policy of the draft length, as `register_drafter` does for drafters.

    It is built from an instance of `config_cls` and K; `specdec.draft_length.base` has defaults.
    """
    return _register("draft_length", name, config_cls, api_version)


def _register(kind: str, name: str, config_cls: type, api_version: int) -> Callable[[T], T]:
    if api_version != API_VERSION:
        raise ConfigError(
            f"{kind} {name!r} was written for API version {api_version}, this is {API_VERSION}; "
            f"install a release of the plug-in for version {API_VERSION}"
        )
    if not dataclasses.is_dataclass(config_cls):
        raise ConfigError(f"config class {config_cls.__name__} of {kind} {name!r} is no dataclass")

    def decorate(cls: T) -> T:
        known = _registered[kind].get(name)
        owner = known.cls.__module__ if known else _BUILTIN[kind].get(name, cls.__module__)
        renamed = known is not None and known.cls.__qualname__ != cls.__qualname__
        if renamed or owner != cls.__module__:
            raise ConfigError(f"{kind} name {name!r} is taken by a class of {owner}")
        _registered[kind][name] = PluginEntry(name, cls, config_cls)
        return cls

    return decorate


def known_names(kind: str) -> list[str]:
    """Return every name that `resolve` knows without a dotted path, sorted."""
    outside = {point.name for point in entry_points(group=_ENTRY_POINT_GROUPS[kind])}
    return sorted({*_BUILTIN[kind], *_registered[kind], *outside})


def resolve(kind: str, name: str) -> PluginEntry:
    """Find a plug-in by registered name, entry point or dotted path `package.module:ClassName`.

    Raises:
        ConfigError: nothing has that name; the message lists what there is and the nearest one.
    """
    if name not in _registered[kind]:
        _import_provider(kind, name)
    entry = _registered[kind].get(name)
    if entry is None and ":" in name:
        module, cls_name = name.split(":", 1)
        wanted = getattr(sys.modules.get(module), cls_name, None)
        entry = next((e for e in _registered[kind].values() if e.cls is wanted), None)
        if entry is None:
            raise ConfigError(_lacking(kind, module, cls_name))
    if entry is None:
        names = known_names(kind)
        hint = did_you_mean(name, names)
        ours = [known for known in names if known in _BUILTIN[kind]]
        others = [known for known in names if known not in _BUILTIN[kind]]
        shown = [*ours, *others[:_MAX_SHOWN], *(["..."] if len(others) > _MAX_SHOWN else [])]
        raise ConfigError(f"unknown {kind} {name!r}; {hint}known: {', '.join(shown) or 'none'}")
    return entry


def _lacking(kind: str, module: str, cls_name: str) -> str:
    """Return what a module that was imported registers instead of a class."""
    attributes = vars(sys.modules[module])
    found = _registered[kind].values()
    own = [entry.cls.__name__ for entry in found if entry.cls.__module__ == module] or [
        entry.cls.__name__ for entry in found if attributes.get(entry.cls.__name__) is entry.cls
    ]  # a package may take its classes from modules of its own
    what = kind.replace("_", " ")
    if cls_name in attributes:
        return (
            f"{cls_name} of module {module} is not registered as a {what}; put "
            f"@register_{kind}(<name>, <config class>) of specdec.registry above it"
        )
    if not own:
        return (
            f"module {module} has no {what} {cls_name}, and registers none; decorate its class "
            f"with @register_{kind}(<name>, <config class>) of specdec.registry"
        )
    hint = did_you_mean(cls_name, own)
    shown = [*own[:_MAX_SHOWN], *(["..."] if len(own) > _MAX_SHOWN else [])]
    return f"module {module} has no {what} {cls_name}; {hint}it registers {', '.join(shown)}"


def _import_provider(kind: str, name: str) -> None:
    """Import the module that registers `name`, where one is known."""
    if name in _BUILTIN[kind]:
        importlib.import_module(_BUILTIN[kind][name])
        return
    for point in entry_points(group=_ENTRY_POINT_GROUPS[kind]):
        if point.name == name:
            point.load()
            return
    if ":" in name:
        module = name.split(":", 1)[0]
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{kind} {name!r}: cannot import {module!r} ({error})") from error


def build_config(kind: str, spec: str | Mapping[str, Any] | object) -> tuple[PluginEntry, Any]:
    """Turn a name, a mapping with a key "name", or a config object into an entry and its config.

    Raises:
        ConfigError: unknown name, unknown key (with the nearest one), or a value out of range.
    """
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping):
        entry = resolve(kind, getattr(spec, "name", type(spec).__name__))
        if not isinstance(spec, entry.config_cls):
            raise ConfigError(
                f"{kind} {entry.name!r} takes a {entry.config_cls.__name__}, "
                f"got {type(spec).__name__}"
            )
        return entry, spec
    if "name" not in spec:
        raise ConfigError(f"{kind} mapping {dict(spec)!r} has no key 'name'; add it")
    entry = resolve(kind, str(spec["name"]))
    allowed = {f.name for f in dataclasses.fields(entry.config_cls)}
    values = {k: v for k, v in spec.items() if k != "name" or "name" in allowed}
    return entry, from_mapping(entry.config_cls, values, f"key of {kind} {entry.name!r}:")
