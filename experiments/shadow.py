"""Score many drafters on one recorded text: `python -m experiments.shadow drafters=[ngram]`.

The target's text is recorded once, or taken from a run folder. Every drafter then says what it
would propose at each position where a step of a real run would start, and so what its accepted
length would be with any K (`experiments.shadow_walk`): without running the target again.
"""

import dataclasses
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from experiments.arms import choose_questions, request_seed
from experiments.cli import SCHEMA_SUFFIX, explain, hydra_app
from experiments.provenance import collect_provenance, shown_command
from experiments.run_folder import RunFolder
from experiments.schemas import (
    Plugin,
    PromptsConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    check_known,
    load_plugin,
    register_schemas,
)
from experiments.shadow_play import PlaySetup, play_drafter
from experiments.shadow_report import Prediction, draw, render, summarise
from experiments.shadow_score import Scorer, ScoreSizes, load_drafter
from experiments.shadow_texts import Law, TargetPass, Text, read_texts, record_turns, text_of
from experiments.shadow_walk import StartScores, walk
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.log import progress, setup_logging
from specdec.protocols import Drafter, ScoringDrafter

logger = logging.getLogger(__name__)

SCORED = "scored"
_TABLE_WIDTH = 120


@dataclass
class ShadowConfig:
    """`experiments.shadow`; groups are those of `experiments.run`.

    After `load_shadow`, `verifier` and every one of `drafters` are a `Plugin`, `engine` an
    `EngineConfig`.

    Args:
        drafters: names, or mappings with a key "name".
        verifier: the rule whose runs are predicted; a lossless one.
        num_speculative_tokens: every K to predict.
        texts: folder of a finished `experiments.run` to take texts from; None records them.
        seed: of the texts' noise.
        batch_size: requests that run together while texts are recorded.
        starts_per_pass: positions that a drafter is scored at in one call.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    drafters: list[Any] = field(default_factory=list)
    verifier: Any = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompts: PromptsConfig = MISSING
    engine: Any = MISSING
    num_speculative_tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    texts: str | None = None
    seed: int = 0
    batch_size: int = 1
    starts_per_pass: int = 64


@dataclass(frozen=True)
class Contender:
    """A drafter with its name in the table."""

    name: str
    plugin: Plugin


def load_shadow(cfg: DictConfig) -> ShadowConfig:
    """Turn a composed configuration into typed objects, checking all that needs no model.

    Raises:
        ConfigError: one sentence that names the key, the value and what is allowed.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, ShadowConfig), type(config)
    check_known(vars(config), [f.name for f in dataclasses.fields(config)], "")
    ks = config.num_speculative_tokens
    if not ks or min(ks) < 1 or len(set(ks)) < len(ks):
        raise ConfigError(
            f"num_speculative_tokens={ks} is not allowed; give a list of unlike integers >= 1"
        )
    for key in ("batch_size", "starts_per_pass"):
        if getattr(config, key) < 1:
            raise ConfigError(f"{key}={getattr(config, key)} is not allowed; give an integer >= 1")
    if not config.drafters:
        raise ConfigError("drafters=[] names none; give for instance drafters=[ngram]")
    config.drafters = [
        load_plugin("drafter", given, f"drafters[{i}]") for i, given in enumerate(config.drafters)
    ]
    for i, drafter in enumerate(config.drafters):
        if drafter.never_drafts:
            raise ConfigError(f"drafters[{i}]={drafter.entry.name} never drafts; leave it out")
    config.verifier = load_plugin("verifier", config.verifier, "verifier")
    config.engine = _load_engine(config)
    _check_rule(config)
    return config


def _load_engine(config: ShadowConfig) -> EngineConfig:
    values = {str(key): value for key, value in dict(vars(config.engine)).items()}
    check_known(values, [f.name for f in dataclasses.fields(EngineConfig)], "engine.")
    engine = EngineConfig(**values)
    try:
        engine.check(max(config.num_speculative_tokens))
    except ConfigError as error:
        raise ConfigError(f"engine.{error}") from error
    return dataclasses.replace(engine, max_num_reqs=engine.max_num_reqs or config.batch_size)


def _check_rule(config: ShadowConfig) -> None:
    """Refuse a rule whose runs do not follow from recorded texts."""
    name, sampled = config.verifier.entry.name, config.sampling.temperature > 0
    rule = config.verifier.entry.cls(config.verifier.config)
    if not rule.lossless:
        raise ConfigError(
            f"verifier={name} is lossy, so its runs write other texts than the target; give "
            f"greedy, sampled_match, coupled or rejection"
        )
    if sampled and (rule.greedy_only or not (rule.text_equal or name == "rejection")):
        raise ConfigError(
            f"verifier={name} cannot be predicted at sampling.temperature="
            f"{config.sampling.temperature}; give sampled_match, coupled or rejection"
        )
    if sampled and not rule.text_equal and config.engine.logits_processors:
        raise ConfigError(
            "engine.logits_processors change the law that verifier=rejection judges drafts by, "
            "which is not followed here; leave them out, or give verifier=sampled_match"
        )


def name_drafters(plugins: Sequence[Plugin]) -> list[Contender]:
    """Name drafters, so that two of one kind can be told apart."""
    named, used = [], Counter[str]()
    for plugin in plugins:
        name = plugin.entry.name
        rivals = [p.spec for p in plugins if p.entry.name == name]
        for key, value in plugin.spec.items():
            if any(rival[key] != value for rival in rivals):
                name += f" {key}={Path(value).name if isinstance(value, str) else value}"
        name = name if len(name) <= 48 else plugin.entry.name
        used[name] += 1
        named.append(Contender(name if used[name] == 1 else f"{name} #{used[name]}", plugin))
    return named


class ShadowRun:
    """Stages of one shadow run, and what each took.

    Args:
        config: from `load_shadow`.
        resolved: the same as plain values.
    """

    def __init__(self, config: ShadowConfig, resolved: Mapping[str, Any]) -> None:
        self.config, self._resolved = config, dict(resolved)
        self.device = resolve_device(config.engine.device)
        self.dtype = resolve_dtype(config.engine.dtype, self.device)
        self.seconds: Counter[str] = Counter()
        self.texts: list[Text] = []
        self._rule: Any = config.verifier.entry.cls(config.verifier.config)

    def run(self) -> list[Prediction]:
        """Record, score and walk; returns a prediction for each drafter and K."""
        config = self.config
        contenders = name_drafters(config.drafters)
        if config.texts is not None:
            same_noise = config.sampling.temperature > 0 and self._rule.text_equal
            self.texts = read_texts(Path(config.texts), self._resolved, same_noise)
        started = time.perf_counter()
        weight_dtype = config.engine.weight_dtype
        target = load_target(config.target.name, self.dtype, self.device, None, weight_dtype)
        self.seconds["load"] = time.perf_counter() - started  # pyright: ignore
        if not self.texts:
            self._record(target)
        if not self.texts:
            raise ConfigError("no question fits engine.max_model_len; raise it")
        scorers = self._scorers(contenders, target)
        scores = self._score(scorers, target)
        predictions = []
        for contender in contenders:
            predictions += self._predict(contender, scores.get(contender.name), target)
        return predictions

    def _record(self, target: LoadedTarget) -> None:
        """Let the target write the texts."""
        config, started = self.config, time.perf_counter()
        engine = Engine(target, "none", config.verifier.spec, 0, config=config.engine)
        seeds = cast(RunConfig, config)  # of both, seed and sampling are read
        turns = record_turns(
            engine,
            choose_questions(config.prompts),
            config.batch_size,
            lambda name: config.sampling.params(seed=request_seed(seeds, name)),
        )
        limits = config.sampling.max_tokens, config.engine.max_model_len
        self.texts = [text_of(turn, *limits) for turn in turns if turn.finish_reason != "abort"]
        self._add("record", started)

    def _scorers(self, contenders: Sequence[Contender], target: LoadedTarget) -> dict[str, Scorer]:
        """Load the drafters that can score."""
        config, scorers = self.config, {}
        sizes = ScoreSizes(
            config.engine.max_model_len,
            max(len(text.token_ids) for text in self.texts),
            max(config.num_speculative_tokens),
            config.starts_per_pass,
        )
        for contender in contenders:
            started = time.perf_counter()
            drafter: Drafter = contender.plugin.entry.cls(contender.plugin.config)
            if not drafter.capabilities.on_cpu:
                load_drafter(drafter, target, sizes)
            if drafter.capabilities.can_score:
                temperature, model = config.sampling.temperature, target.model
                scorers[contender.name] = Scorer(
                    cast(ScoringDrafter, drafter), self._rule, model, temperature, sizes
                )
            else:
                logger.warning(
                    "drafter %s cannot score; the engine plays it, text by text, for each K",
                    contender.name,
                )
            self._add(f"load {contender.name}", started)
        return scorers

    def _score(
        self, scorers: Mapping[str, Scorer], target: LoadedTarget
    ) -> dict[str, list[StartScores]]:
        """Score every drafter on every text, the target's states being computed once a text."""
        sampling, scores = self.config.sampling, {name: [] for name in scorers}
        wants = [scorer.drafter.capabilities for scorer in scorers.values()]
        judges_laws = sampling.temperature > 0 and not self._rule.text_equal
        law = None
        if judges_laws and any(own.offers_q for own in wants):
            law = Law(sampling.temperature, sampling.top_p, sampling.top_k)
        layers = [layer for own in wants for layer in own.aux_layers]
        idle = law is None and not layers and all(own.hidden_states == "none" for own in wants)
        longest = max(len(text.token_ids) for text in self.texts)
        chunk = self.config.engine.max_num_batched_tokens
        states = TargetPass(target.model, longest, layers, law, chunk, idle)
        with progress("scoring", total=len(self.texts)) as bar:
            for text in self.texts if scorers else ():
                started = time.perf_counter()
                found = states.run(text)
                started = self._add("target", started)
                for name, scorer in scorers.items():
                    scores[name].append(scorer.score(text, found))
                    started = self._add(name, started)
                bar.advance(text.request_id)
        return scores

    def _predict(
        self, contender: Contender, scores: Sequence[StartScores] | None, target: LoadedTarget
    ) -> list[Prediction]:
        """Return what a drafter gives with each K."""
        config, predictions = self.config, []
        for k in sorted(config.num_speculative_tokens):
            started, method = time.perf_counter(), SCORED
            if scores is not None:
                outcomes = [walk(own, k) for own in scores]
            else:
                params = config.sampling.params(seed=None)
                setup = PlaySetup(target, config.verifier, config.engine, params)
                outcomes, method = play_drafter(setup, contender.plugin, k, self.texts)
            predictions.append(Prediction(contender.name, k, method, outcomes))
            self._add(contender.name, started)
        return predictions

    def _add(self, what: str, started: float) -> float:
        """Add the time since `started`; returns the time now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[what] += now - started  # pyright: ignore[reportArgumentType]
        return now


def execute(config: ShadowConfig, path: Path, command: str, resolved: Mapping[str, Any]) -> None:
    """Run a checked configuration; write `shadow.csv`, `shadow.json` and `shadow.png`.

    Args:
        config: from `load_shadow`.
        path: folder.
        command: for the provenance.
        resolved: the configuration as plain values.

    Raises:
        SpecdecError: a question file, run folder, device, target, drafter or disk that cannot be
            used.
    """
    folder, started = RunFolder(path), time.perf_counter()
    run = ShadowRun(config, resolved)
    provenance = collect_provenance(command, config.seed, run.device, run.dtype)
    folder.write_text("config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(resolved))))
    summary = summarise(run.run(), run.texts)
    provenance["duration_s"] = round(time.perf_counter() - started, 1)
    folder.write_text("shadow.csv", summary.to_csv(index=False))
    record = {
        "provenance": provenance,
        "verifier": config.verifier.entry.name,
        "temperature": config.sampling.temperature,
        "target": config.target.name,
        "drafters": {c.name: c.plugin.spec for c in name_drafters(config.drafters)},
        "num_texts": len(run.texts),
        "num_starts": sum(text.num_starts for text in run.texts),
        "seconds": {name: round(value, 3) for name, value in run.seconds.items()},
    }
    folder.write_json("shadow.json", record)
    draw(summary, path / "shadow.png")
    console = Console()
    console.width = max(console.width if console.is_terminal else 0, _TABLE_WIDTH)
    console.print(render(summary))
    taken = ", ".join(f"{name} {value:.1f} s" for name, value in run.seconds.items())
    console.print(f"took     {taken}", soft_wrap=True, highlight=False)
    console.print(f"table    {path / 'shadow.csv'}", soft_wrap=True, highlight=False)


def shadow_task(cfg: DictConfig) -> None:
    """Run one composed configuration in Hydra's output folder."""
    setup_logging(logging.getLogger().level)
    hydra_config = HydraConfig.get()
    config = load_shadow(cfg)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict), type(resolved)
    command = shown_command("experiments.shadow", hydra_config.overrides.task)
    folder = Path(hydra_config.runtime.output_dir)
    execute(config, folder, command, {str(k): v for k, v in resolved.items()})


def register_shadow() -> None:
    """Store the schemas of the app in Hydra's ConfigStore."""
    register_schemas()
    ConfigStore.instance().store(name=f"shadow{SCHEMA_SUFFIX}", node=ShadowConfig)


def main() -> int:
    """Run the app on the command line; returns the exit code."""
    register_shadow()
    return hydra_app("shadow", shadow_task, "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
