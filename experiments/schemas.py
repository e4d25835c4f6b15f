"""Schemas of the Hydra groups, and the way from a composed configuration to typed objects.

`register_schemas` stores each dataclass as `<name>_schema`; a YAML option extends it and gives
values only, so a wrong key or type fails while the configuration is composed, before a model loads.
The parameters of drafters and verifiers live beside their classes.
"""

import copy
import dataclasses
import importlib.metadata
import logging
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.cli import SCHEMA_SUFFIX, explain, type_words, unknown_name
from experiments.workload import ArrivalTraceConfig, PoissonConfig, WorkloadConfig
from specdec.checks import check_host_drafter
from specdec.config import EngineConfig
from specdec.draft_length.registered import make_draft_length
from specdec.errors import ConfigError
from specdec.log import warn_once
from specdec.registry import PluginEntry, build_config, known_names, resolve
from specdec.tracker import CsvConfig, TrackerConfig, WandbConfig
from specdec.types import SamplingParams

logger = logging.getLogger(__name__)

_MAX_SEED = 2**32
_ENTRY_POINT_GROUPS = {
    "drafter": "specdec.drafters",
    "verifier": "specdec.verifiers",
    "draft_length": "specdec.draft_lengths",
}


@dataclass
class TargetConfig:
    """The model that is accelerated.

    Args:
        name: "smollm2-135m-instruct" (embedded), a hub id, or a local folder.
        dtype: of the timed runs; "auto" is bf16 where the device is fast at it, else fp32.
    """

    name: str = "smollm2-135m-instruct"
    dtype: str = "auto"


@dataclass
class SamplingConfig:
    """How tokens are drawn; see `specdec.types.SamplingParams`.

    Args:
        temperature, top_p, top_k, max_tokens, ignore_eos: as there.
        seed: the same for every request; None derives one a question and turn from the run's seed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every range."""
        try:
            self.params(self.seed)
        except ConfigError as error:
            raise ConfigError(f"sampling.{error}") from error

    def params(self, seed: int | None, max_tokens: int | None = None) -> SamplingParams:
        """Return a request's parameters, with its own seed and, if given, its own length."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens or self.max_tokens,
            seed=seed,
            ignore_eos=self.ignore_eos,
        )


@dataclass
class PromptsConfig:
    """Which questions are asked.

    Args:
        path: question file (JSON lines); None takes the project's own questions.
        per_category: questions of each category at most; None takes all.
        limit: questions altogether at most; None takes all.
        categories: the categories to keep; None keeps all.
        context_lengths: ask the first turn of each of these in prompts of exactly so many tokens
            of the target, behind other text of the file; empty leaves prompts as they are.
        random_tokens: fill those prompts with random tokens instead; tables flag it.
    """

    path: str | None = MISSING  # no default: a YAML "???" cannot take one back
    per_category: int | None = None
    limit: int | None = None
    categories: list[str] | None = None
    context_lengths: list[int] = field(default_factory=list)
    random_tokens: bool = False

    def __post_init__(self) -> None:
        """Check the counts."""
        _check_at_least("prompts.per_category", self.per_category, 1)
        _check_at_least("prompts.limit", self.limit, 1)
        lengths = self.context_lengths
        if min(lengths, default=1) < 1 or len(set(lengths)) < len(lengths):
            raise ConfigError(
                f"prompts.context_lengths={lengths} is not allowed; give unlike integers >= 1"
            )
        if self.random_tokens and not lengths:
            raise ConfigError(
                "prompts.random_tokens=true needs prompts.context_lengths, for instance [512]"
            )


@dataclass
class EqualityConfig:
    """The equality verdict: texts in float32, beside the timed runs.

    Args:
        enabled: False leaves it out.
        per_category: questions of each category at most, of those that are timed.
        max_tokens: new tokens a turn at most.
    """

    enabled: bool = True
    per_category: int = 1
    max_tokens: int = 32

    def __post_init__(self) -> None:
        """Check the counts."""
        _check_at_least("equality.per_category", self.per_category, 1)
        _check_at_least("equality.max_tokens", self.max_tokens, 1)


@dataclass
class CompareConfig:
    """One more arm: a drafter (name, or mapping with a key "name") and what it has of its own.

    With `phase_events` it is a variant whose graphs tell the phases' times apart; beside an arm
    that is alike but for this, it shows what that costs.
    """

    drafter: Any = MISSING
    num_speculative_tokens: int | None = None  # None takes the run's
    draft_length: Any = None  # likewise
    phase_events: bool | None = None  # None takes the engine's


@dataclass(frozen=True)
class Plugin:
    """A chosen drafter, verifier or policy of the draft length with its checked parameters."""

    entry: PluginEntry
    config: Any

    @property
    def spec(self) -> dict[str, Any]:
        """Return the mapping that an engine takes."""
        values = {f.name: getattr(self.config, f.name) for f in _init_fields(type(self.config))}
        return {**values, "name": self.entry.name}

    @property
    def never_drafts(self) -> bool:
        """Return whether this is a drafter that decodes autoregressively."""
        return bool(getattr(self.entry.cls, "never_drafts", False))


@dataclass
class RunConfig:
    """`experiments.run`: one or several arms beside the autoregressive one.

    After `load_config`, `drafter`, `verifier` and `draft_length` are a `Plugin`, `engine` an
    `EngineConfig`, and what `compare` names plug-ins too.

    Args:
        compare: further arms, each a mapping with the fields of `CompareConfig`.
        num_speculative_tokens: drafts a step at most (K).
        seed: of prompts' noise and everything else that is drawn.
        batch_size: requests that run together at most; 1 = one at a time.
        warmup_tokens: tokens of the untimed generation before an arm is timed; 0 leaves it out.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = MISSING
    verifier: Any = MISSING
    draft_length: Any = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompts: PromptsConfig = MISSING
    engine: Any = MISSING
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    equality: EqualityConfig = field(default_factory=EqualityConfig)
    compare: list[Any] = field(default_factory=list)
    num_speculative_tokens: int = 4
    seed: int = 0
    batch_size: int = 1
    warmup_tokens: int = 8

    def __post_init__(self) -> None:
        """Check the counts."""
        _check_at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _check_at_least("batch_size", self.batch_size, 1)
        _check_at_least("warmup_tokens", self.warmup_tokens, 0)
        if not 0 <= self.seed < _MAX_SEED:
            raise ConfigError(f"seed={self.seed} is not allowed; give an integer in [0, 2^32)")


def register_schemas() -> None:
    """Store every schema in Hydra's ConfigStore; an installed plug-in becomes an option itself.

    So `drafter=<entry point>` works without a YAML file; where its package brings one, that holds.
    """
    store = ConfigStore.instance()
    # YAML files of installed packages, which Hydra's search path plug-ins name.
    options = ConfigRepository(create_config_search_path(None))
    store.store(name=f"run{SCHEMA_SUFFIX}", node=RunConfig)
    for group, name, node in (
        ("target", "target", TargetConfig),
        ("sampling", "sampling", SamplingConfig),
        ("prompts", "prompts", PromptsConfig),
        ("engine", "engine", fillable(EngineConfig)),
        ("workload", "workload_groups", WorkloadConfig),
        ("workload", "workload_poisson", PoissonConfig),
        ("workload", "workload_trace", ArrivalTraceConfig),
        ("tracker", "none", TrackerConfig),
        ("tracker", "csv", CsvConfig),
        ("tracker", "wandb", WandbConfig),
    ):
        store.store(group=group, name=f"{name}{SCHEMA_SUFFIX}", node=node)
    for kind, entry_points in _ENTRY_POINT_GROUPS.items():
        outside = {point.name for point in importlib.metadata.entry_points(group=entry_points)}
        for name in known_names(kind):
            try:
                node = fillable(resolve(kind, name).config_cls)
            # A stranger's module may fail in any way; that must not keep ours from running.
            except Exception as error:
                if name not in outside:
                    raise
                warn_once(logger, f"plug-in {kind} {name!r} cannot be loaded: {error}")
                continue
            store.store(group=kind, name=f"{name}{SCHEMA_SUFFIX}", node=node)
            if name in outside and not options.config_exists(f"{kind}/{name}"):
                store.store(group=kind, name=name, node=node)


def fillable(cls: type) -> type:
    """Return a copy of a config dataclass that Hydra can fill.

    OmegaConf cannot write to a frozen dataclass, knows no Literal, and would run range checks on
    the copy only; the real class checks its ranges when it is built from the values.
    """
    fields = []
    hints = typing.get_type_hints(cls)  # a plug-in may write its annotations as strings
    for f in _init_fields(cls):
        annotation: Any = hints[f.name]
        if typing.get_origin(annotation) is typing.Literal:
            kinds = {type(choice) for choice in typing.get_args(annotation)}
            annotation = kinds.pop() if len(kinds) == 1 else Any
        default: Any = copy.copy(f)  # keeps the default, or the factory of it
        fields.append((f.name, annotation if _is_known_type(annotation) else Any, default))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _is_known_type(annotation: Any) -> bool:
    probe = dataclasses.make_dataclass("Probe", [("value", annotation, field(default=MISSING))])
    try:
        OmegaConf.structured(probe)
    except OmegaConfBaseException:
        return False
    return True


def load_config(cfg: DictConfig) -> RunConfig:
    """Turn a composed configuration into typed objects, checking all that needs no model.

    Raises:
        ConfigError: one sentence that names the key, the value and what is allowed.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, RunConfig), type(config)
    _check_keys(config)
    config.drafter = load_plugin("drafter", config.drafter, "drafter")
    config.verifier = load_plugin("verifier", config.verifier, "verifier")
    config.draft_length = load_plugin("draft_length", config.draft_length, "draft_length")
    config.engine = _load_engine(config)
    config.compare = [_load_compare(item, i) for i, item in enumerate(config.compare)]
    _check_pairings(config)
    return config


def load_plugin(kind: str, given: Any, where: str) -> Plugin:
    """Resolve a plug-in and check its parameters by the dataclass beside its class.

    Args:
        kind: "drafter", "verifier" or "draft_length".
        given: a name, a mapping with a key "name", or an object of the group's schema.
        where: its place in the configuration, for messages.

    Raises:
        ConfigError: an unknown name or key, or a value of a wrong type or range.
    """
    values = {"name": given} if isinstance(given, str) else _as_mapping(given, where)
    name = values.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{where} needs a key 'name'; known: {', '.join(known_names(kind))}")
    config_cls = resolve(kind, name).config_cls
    known = [f.name for f in _init_fields(config_cls)]
    check_known({k: v for k, v in values.items() if k != "name"}, known, f"{where}.")
    own = {k: v for k, v in values.items() if k in known}
    try:
        typed = OmegaConf.merge(OmegaConf.structured(fillable(config_cls)), own)
        merged = vars(OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, prefix=f"{where}.")) from error
    hints = typing.get_type_hints(config_cls)
    for key, value in merged.items():
        is_choice = typing.get_origin(hints[key]) is typing.Literal
        if is_choice and value not in typing.get_args(hints[key]):
            raise ConfigError(
                f"{where}.{key}={value!r} is not allowed; give {type_words(hints[key])}"
            )
    entry, config = build_config(kind, {**merged, "name": name})
    return Plugin(entry, config)


def _load_engine(config: RunConfig) -> EngineConfig:
    """Return the engine's configuration, with as many rows as requests run together."""
    values = _as_mapping(config.engine, "engine")
    check_known(values, [f.name for f in dataclasses.fields(EngineConfig)], "engine.")
    engine = EngineConfig(**values)
    longest = max(config.prompts.context_lengths, default=0)
    if longest >= engine.max_model_len:
        raise ConfigError(
            f"prompts.context_lengths holds {longest}, which leaves no room for an answer with "
            f"engine.max_model_len={engine.max_model_len}; raise it or give shorter prompts"
        )
    rows = engine.max_num_reqs
    if rows is not None and rows < config.batch_size:
        raise ConfigError(
            f"engine.max_num_reqs={rows} has fewer rows than batch_size={config.batch_size}; "
            f"give at least {config.batch_size}, or null"
        )
    return dataclasses.replace(engine, max_num_reqs=rows or config.batch_size)


def _check_pairings(config: RunConfig) -> None:
    """Refuse combinations that no arm could run."""
    verifier = config.verifier.entry.cls(config.verifier.config)
    if verifier.greedy_only and config.sampling.temperature > 0:
        raise ConfigError(
            f"verifier={config.verifier.entry.name} takes sampling.temperature=0 only, got "
            f"{config.sampling.temperature}; use verifier=rejection or verifier=sampled_match"
        )
    first = CompareConfig(config.drafter, config.num_speculative_tokens)
    arms = [("", first), *((f"compare[{i}].", item) for i, item in enumerate(config.compare))]
    for prefix, arm in arms:
        where, drafter, num_drafts = f"{prefix}drafter", arm.drafter, arm.num_speculative_tokens
        k = config.num_speculative_tokens if num_drafts is None else num_drafts
        if k == 0 and not drafter.never_drafts:
            raise ConfigError(
                f"num_speculative_tokens=0 leaves {where}={drafter.entry.name} nothing to draft; "
                "give 1 or more, or the drafter none"
            )
        try:
            config.engine.check(k)
        except ConfigError as error:
            raise ConfigError(f"engine.{error}") from error
        if not drafter.never_drafts:
            make_draft_length((arm.draft_length or config.draft_length).spec, k)
        check_host_drafter(drafter.entry.cls(drafter.config), config.engine)
        check = getattr(verifier, "check", None)
        if check is not None and k > 0:
            check(k)


def _load_compare(item: Any, index: int) -> CompareConfig:
    where = f"compare[{index}]"
    values = _as_mapping(item, where)
    check_known(values, [f.name for f in dataclasses.fields(CompareConfig)], f"{where}.")
    if "drafter" not in values:
        raise ConfigError(f"{where} needs a key 'drafter', for instance {{name: ngram}}")
    num_drafts = values.get("num_speculative_tokens")
    if num_drafts is not None and (isinstance(num_drafts, bool) or not isinstance(num_drafts, int)):
        raise ConfigError(
            f"{where}.num_speculative_tokens={num_drafts!r} is not allowed; give an integer >= 0"
        )
    _check_at_least(f"{where}.num_speculative_tokens", num_drafts, 0)
    drafter = load_plugin("drafter", values["drafter"], f"{where}.drafter")
    draft_length = values.get("draft_length")
    if draft_length is not None:
        draft_length = load_plugin("draft_length", draft_length, f"{where}.draft_length")
    events = values.get("phase_events")
    if events is not None and not isinstance(events, bool):
        raise ConfigError(f"{where}.phase_events={events!r} is not allowed; give true or false")
    return CompareConfig(drafter, num_drafts, draft_length, events)


def _as_mapping(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(k): v for k, v in given.items()}
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dict(vars(given))
    raise ConfigError(f"{where}={given!r} is not allowed; give a mapping")


def _init_fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.init]


def check_known(values: Mapping[str, Any], known: list[str], where: str) -> None:
    """Refuse a key that is not known; `where` is put before it ("engine.").

    Raises:
        ConfigError: names the key and the nearest that is known.
    """
    for key in values:
        if key not in known:
            raise ConfigError(unknown_name("key", key, known, shown=f"{where}{key}"))


def _check_keys(value: Any, where: str = "") -> None:
    """Refuse keys that a `+` added to a schema: OmegaConf lets them through."""
    check_known(vars(value), [f.name for f in dataclasses.fields(value)], where)
    for key, inner in vars(value).items():
        # What is typed `Any` here is checked where it is turned into its own class.
        if dataclasses.is_dataclass(inner) and key not in ("engine", *_ENTRY_POINT_GROUPS):
            _check_keys(inner, f"{where}{key}.")


def _check_at_least(key: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ConfigError(f"{key}={value} is not allowed; give an integer >= {lowest}")
