"""Every option composes into typed objects; every mistake is one sentence before a model loads."""

import dataclasses
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

import experiments.run
from drafters.base import DrafterBase, DrafterConfig
from drafters.ngram import NgramConfig
from experiments.arms import advise_on_sampling, choose_questions, plan_arms
from experiments.cli import CONF_DIR, VERSION_BASE, type_words
from experiments.schemas import (
    CompareConfig,
    RunConfig,
    fillable,
    load_config,
    load_plugin,
    register_schemas,
)
from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.protocols import DraftContext
from specdec.registry import register_drafter
from specdec.tracker import CsvConfig, TrackerConfig, WandbConfig

GROUPS = ("target", "drafter", "verifier", "draft_length", "sampling", "prompts", "engine")
GROUPS += ("tracker", "workload")
PRESETS = ("experiment", "debug")
# What an option leaves to the user.
NEEDED = {
    "drafter=plugin": ["drafter.name=ngram"],
    "drafter=medusa": ["drafter.path=heads"],
    "drafter=block_parallel": ["drafter.path=head"],
    "drafter=eagle": ["drafter.path=head"],
    "drafter=record": ["drafter.folder=states"],
    "verifier=plugin": ["verifier.name=greedy"],
    "verifier=synthetic": ["verifier.mean_length=2"],
    "draft_length=plugin": ["draft_length.name=fixed"],
    "prompts=file": ["prompts.path=questions.jsonl"],
    "workload=trace": ["workload.path=arrivals.txt"],
}


@dataclass
class WidthConfig(DrafterConfig):
    """Parameters of a drafter that does not belong to the project."""

    name: str = "width"
    width: int = 2
    mode: Literal["wide", "narrow"] = "wide"


class WidthDrafter(DrafterBase):
    """Drafts nothing."""

    def propose(self, ctx: DraftContext) -> None:
        """Leave every row without drafts."""


register_drafter("width", WidthConfig)(WidthDrafter)


def compose_run(*overrides: str) -> RunConfig:
    register_schemas()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return load_config(compose("run", overrides=list(overrides)))


def options(groups: tuple[str, ...]) -> list[str]:
    return [
        f"{group}={path.stem}"
        for group in groups
        for path in sorted((CONF_DIR / group).glob("*.yaml"))
    ]


@pytest.mark.parametrize("option", options(GROUPS + PRESETS))
def test_every_option_composes_into_typed_objects(option: str) -> None:
    config = compose_run(option, *NEEDED.get(option, []))
    assert isinstance(config.engine, EngineConfig)
    assert isinstance(config.tracker, TrackerConfig)
    specs = plan_arms(config)
    assert specs[0].name == "none"
    assert specs[0].k == 0
    assert len({spec.name for spec in specs}) == len(specs)


def test_every_group_has_its_default_options() -> None:
    assert set(options(GROUPS + PRESETS)) >= {
        *("target=smollm2", "target=llama31-8b", "target=qwen3-8b"),
        *("drafter=none", "drafter=ngram", "drafter=oracle", "drafter=draft_model"),
        *("drafter=layer_skip", "drafter=medusa", "drafter=block_parallel"),
        *("drafter=suffix", "drafter=mixed"),
        *("verifier=greedy", "verifier=rejection", "verifier=sampled_match", "verifier=block"),
        *(f"draft_length={name}" for name in ("fixed", "by_batch_size", "confidence", "goodput")),
        *("verifier=coupled", "verifier=typical", "verifier=synthetic"),
        *("sampling=greedy", "sampling=temp08", "prompts=builtin", "prompts=file"),
        *("tracker=wandb", "tracker=csv", "tracker=none"),
        *("experiment=demo", "debug=default"),
    }


def test_values_reach_the_objects_they_belong_to() -> None:
    config = compose_run(
        "drafter.max_n=5", "seed=7", "target.dtype=float32", "tracker=wandb", "batch_size=3",
        "sampling=temp08",
    )  # fmt: skip
    assert config.drafter.config == NgramConfig(max_n=5)
    assert (config.engine.seed, config.engine.dtype, config.engine.max_num_reqs) == (
        7,
        "float32",
        3,
    )
    assert isinstance(config.tracker, WandbConfig)
    assert config.sampling.params(seed=1).top_p == 0.9


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["sampling.temperature=0.8", "verifier=rejection"], "eagle3 K=4"),
        (["sampling.temperature=0.8", "verifier=block"], "eagle3 K=4"),
        (["sampling.temperature=0.8", "verifier=rejection", "drafter.sampling=gumbel"], None),
        (["sampling.temperature=0.8", "verifier=sampled_match"], None),
        (["sampling.temperature=0", "verifier=rejection"], None),
    ],
)
def test_likeliest_drafts_are_advised_against_where_drawn_ones_are_kept_more_often(
    overrides: list[str], named: str | None
) -> None:
    config = compose_run("drafter=eagle3", "num_speculative_tokens=4", *overrides)
    advice = advise_on_sampling(plan_arms(config), config)
    assert (advice is None) == (named is None)
    if advice is not None:
        assert advice.startswith(f"{named}: ")
        assert config.verifier.entry.name in advice
        assert "drafter.sampling=gumbel" in advice


def test_a_drafter_that_cannot_draw_is_not_advised_to() -> None:
    config = compose_run("drafter=ngram", "sampling.temperature=1", "verifier=rejection")
    assert advise_on_sampling(plan_arms(config), config) is None


def test_the_demo_asks_every_category_and_compares_what_is_there() -> None:
    config = compose_run("experiment=demo")
    questions = choose_questions(config.prompts)
    assert len(questions) == 12
    assert len({question.category for question in questions}) == 6
    drafters = [spec.drafter.entry.name for spec in plan_arms(config)]
    assert drafters == ["none", "ngram", "suffix", "draft_model", "eagle3", "mixed"]


def test_the_command_line_wins_over_a_preset() -> None:
    config = compose_run("experiment=demo", "debug=default", "drafter=none", "tracker=csv")
    assert config.drafter.entry.name == "none"
    assert isinstance(config.tracker, CsvConfig)
    assert config.sampling.max_tokens == 8


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["draft_length=gootput"], ["draft_length=gootput", "'goodput'"]),
        (["draft_length=goodput", "draft_length.half_live=9"], ["half_live", "'half_life'"]),
        (["draft_length=confidence", "draft_length.threshold=2"], ["threshold=2"]),
        (
            ["compare=[{drafter: ngram, draft_length: {name: goodput, choices: [9]}}]"],
            ["9 drafts", "num_speculative_tokens=4"],
        ),
        (["drafter=ngrm"], ["drafter=ngrm", "'ngram'", "draft_model", "oracle"]),
        (["experiment=demoo"], ["experiment=demoo", "'demo'"]),
        (
            ["drafter=suffix", "engine.max_steps_in_flight=2"],
            ["max_steps_in_flight=2", "SuffixDrafter", "give 1, or null"],
        ),
        (["drafter=suffix", "drafter.max_depth=1"], ["max_depth=1", ">= 2"]),
        (
            ["drafter=mixed", "drafter.drafters=[{name:ngram},{name:ngrm}]"],
            ["drafters[1]", "'ngrm'", "'ngram'"],
        ),
        (["drafter.max_m=3"], ["drafter.max_m", "'max_n'", "min_n"]),
        (["drafter.max_n=abc"], ["drafter.max_n='abc'", "an integer"]),
        (["drafter.max_n=0"], ["min_n=1", "max_n=0", "1 <= min_n <= max_n"]),
        (["sampling.temperatur=1"], ["sampling.temperatur", "'temperature'"]),
        (["sampling.temperature=-1"], ["sampling.temperature=-1", "a number in [1e-5"]),
        (["sampling.temperature=hot"], ["sampling.temperature='hot'", "a number"]),
        (["sampling.top_p=0"], ["sampling.top_p=0", "(0, 1]"]),
        (["+sampling.foo=1"], ["sampling.foo", "temperature"]),
        (["+foo=1"], ["foo", "num_speculative_tokens"]),
        (["batchsize=2"], ["batchsize", "'batch_size'"]),
        (["batch_size=0"], ["batch_size=0", ">= 1"]),
        (["batch_size=null"], ["batch_size=None", "an integer"]),
        (["num_speculative_tokens=0"], ["num_speculative_tokens=0", "1 or more"]),
        (["num_speculative_tokens=-1"], ["num_speculative_tokens=-1", ">= 0"]),
        (["seed=-1"], ["seed=-1", "[0, 2^32)"]),
        (["engine.block_sise=8"], ["engine.block_sise", "'block_size'"]),
        (["+engine.sed=8"], ["engine.sed", "'seed'"]),
        (["engine.block_size=0"], ["engine.block_size=0", ">= 1"]),
        (["engine.device=tpu"], ["device='tpu'", "cpu"]),
        (["engine.graph_scope=stp"], ["engine.graph_scope='stp'", "auto, step, draft, none"]),
        (["engine.graph_num_reqs=[4,2]"], ["engine.graph_num_reqs=[4, 2]", "rising", "null"]),
        (["engine.graph_num_reqs=[x]"], ["engine.graph_num_reqs[0]='x'"]),
        (["engine.graph_num_reqs=4"], ["engine.graph_num_reqs=4", "a list"]),
        (["engine.token_table=disk"], ["engine.token_table='disk'", "device, pinned"]),
        (["target.dtype=int8"], ["dtype='int8'", "bfloat16"]),
        (["batch_size=4", "engine.max_num_reqs=2"], ["engine.max_num_reqs=2", "batch_size=4"]),
        (["engine.max_num_batched_tokens=3"], ["engine.max_num_batched_tokens=3", "at least 5"]),
        (["verifier=greedy", "sampling=temp08"], ["verifier=greedy", "0.8", "rejection"]),
        (["drafter=draft_model", "drafter.model=''"], ["draft_model", "model="]),
        (["drafter=medusa"], ["drafter medusa needs path="]),
        (["drafter=block_parallel", "drafter.path=''"], ["block_parallel", "path="]),
        (["drafter=layer_skip", "drafter.num_layers=0"], ["num_layers=0", "1 or more"]),
        (["drafter=draft_model", "drafter.sampling=x"], ["drafter.sampling='x'", "'gumbel'"]),
        (["drafter=oracle", "drafter.rates=[2]"], ["rate 2", "[0, 1]"]),
        (["drafter=plugin"], ["drafter.name", "no value"]),
        (["drafter=plugin", "drafter.name=ngrm"], ["'ngrm'", "'ngram'"]),
        (["drafter=plugin", "drafter.name=ngram", "drafter.max_n=3"], ["+drafter.max_n"]),
        (["drafter=plugin", "drafter.name=nowhere.at:All"], ["nowhere.at", "import"]),
        (["tracker=wandb", "tracker.mode=on"], ["tracker.mode", "offline"]),
        (["prompts=file"], ["prompts.path", "no value"]),
        (["prompts=file", "prompts.path=missing.jsonl"], ["missing.jsonl", "no such file"]),
        (["prompts.limit=0"], ["prompts.limit=0", ">= 1"]),
        (["prompts.categories=[poems]"], ["prompts.categories", "poems", "writing"]),
        (["compare=3"], ["compare=3", "a list"]),
        (["compare=[3]"], ["compare[0]=3", "a mapping"]),
        (["compare=[{drafter:ngram,k:10}]"], ["compare[0].k", "num_speculative_tokens"]),
        (["compare=[{num_speculative_tokens:2}]"], ["compare[0]", "drafter"]),
        (["compare=[{drafter:{name:ngrm}}]"], ["'ngrm'", "'ngram'"]),
        (["compare=[{drafter:{name:ngram,max_m:3}}]"], ["compare[0].drafter.max_m", "'max_n'"]),
        (["compare=[{drafter:{name:ngram,max_n:x}}]"], ["compare[0].drafter.max_n='x'", "integer"]),
        (["compare=[{drafter:ngram,num_speculative_tokens:x}]"], ["compare[0]", "'x'", "integer"]),
        (["drafter.max_n=[1"], ["drafter.max_n=[1"]),
        (["drafter.max_n=1,2"], ["drafter.max_n=1,2", "multirun"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_nothing_loads(
    overrides: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load_nothing(*args: object) -> None:
        raise AssertionError(f"a model was loaded: {args}")

    monkeypatch.setattr(experiments.run, "load_target", load_nothing)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["run.py", *overrides, f"hydra.run.dir={tmp_path}"])
    assert experiments.run.main() == 1
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert said.startswith("error: ")
    for part in parts:
        assert part in said


def test_hydra_full_error_raises_the_error_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["run.py", "batch_size=0", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="batch_size=0"):
        experiments.run.main()


def test_a_drafter_outside_the_project_is_chosen_by_name_or_dotted_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[__name__])
    for name in ("width", "my_package:WidthDrafter"):
        config = compose_run("drafter=plugin", f"drafter.name={name}", "+drafter.width=3")
        assert config.drafter.entry.cls is WidthDrafter
        assert config.drafter.config.width == 3
    with pytest.raises(ConfigError, match=r"drafter\.widht is not known; did you mean 'width'"):
        compose_run("drafter=plugin", "drafter.name=width", "+drafter.widht=3")
    with pytest.raises(ConfigError, match=r"drafter\.width='x' is not allowed; give an integer"):
        compose_run("drafter=plugin", "drafter.name=width", "+drafter.width=x")
    with pytest.raises(ConfigError, match=r"drafter\.mode='x' is not allowed; give 'wide'"):
        compose_run("drafter=plugin", "drafter.name=width", "+drafter.mode=x")


def test_an_installed_drafter_is_an_option_with_typed_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[__name__])
    points = EntryPoints(
        [
            EntryPoint("width", "my_package:WidthDrafter", "specdec.drafters"),
            EntryPoint("broken", "my_package.that_is_not_there:Drafter", "specdec.drafters"),
        ]
    )

    def installed(group: str) -> EntryPoints:
        return points.select(group=group)

    monkeypatch.setattr("specdec.registry.entry_points", installed)
    monkeypatch.setattr("importlib.metadata.entry_points", installed)
    try:
        config = compose_run("drafter=width", "drafter.width=3")
    finally:
        ConfigStore.instance().repo["drafter"].pop("width.yaml", None)
    assert config.drafter.config == WidthConfig(width=3)


def test_arms_that_would_share_a_name_show_what_differs() -> None:
    config = compose_run(
        "compare=[{drafter:{name:ngram,max_n:5}},{drafter:ngram,num_speculative_tokens:10},"
        "{drafter:ngram,num_speculative_tokens:10},{drafter:{name:oracle,texts:[[1,2]]}},"
        "{drafter:{name:oracle,rates:[0.5]}},{drafter:none}]"
    )
    assert [spec.name for spec in plan_arms(config)] == [
        "none",
        "ngram K=4 max_n=3",
        "ngram K=4 max_n=5",
        "ngram K=10",
        "oracle K=4 texts=[[1, 2]] rates=[]",
        "oracle K=4 texts=[] rates=[0.5]",
    ]


def test_arms_whose_difference_is_too_long_are_numbered() -> None:
    texts = [list(range(30)), list(range(31)), list(range(32))]
    config = compose_run("drafter=none")
    config.compare = [
        CompareConfig(plugin, num_speculative_tokens=2)
        for plugin in (
            load_plugin("drafter", {"name": "oracle", "texts": [text]}, "drafter") for text in texts
        )
    ]
    names = [spec.name for spec in plan_arms(config)]
    assert names == ["none", "oracle K=2", "oracle K=2 #2", "oracle K=2 #3"]


def test_arms_may_have_draft_lengths_of_their_own() -> None:
    config = compose_run(
        "draft_length=goodput", "draft_length.half_life=9", "num_speculative_tokens=4",
        "compare=[{drafter: ngram, draft_length: fixed}, {drafter: ngram},"
        "{drafter: ngram, num_speculative_tokens: 2,"
        " draft_length: {name: by_batch_size, table: {1: 2, 8: 0}}},"
        "{drafter: ngram, draft_length: {name: goodput, half_life: 5}}]",
    )  # fmt: skip
    specs = plan_arms(config)
    assert [spec.name for spec in specs] == [
        "none",
        "ngram K=4 goodput half_life=9",
        "ngram K=4",
        "ngram K=2 by_batch_size",
        "ngram K=4 goodput half_life=5",
    ]
    assert specs[0].draft_length.entry.name == "fixed"
    assert specs[3].draft_length.spec == {"name": "by_batch_size", "table": {1: 2, 8: 0}}


def test_a_fillable_copy_keeps_fields_and_defaults() -> None:
    copy = fillable(EngineConfig)
    assert vars(copy()) == dataclasses.asdict(EngineConfig())
    assert OmegaConf.structured(fillable(WidthConfig)).mode == "wide"


def test_annotations_may_be_strings() -> None:
    later = dataclasses.make_dataclass("Later", [("count", "int", dataclasses.field(default=1))])
    copy = OmegaConf.structured(fillable(later))
    with pytest.raises(ValidationError):
        copy.count = "many"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (int | None, "an integer or null"),
        (list[str], "a list (each a text)"),
        (Literal["a", "b"], "'a', 'b'"),
        (dict[str, int], "a mapping"),
        (WidthConfig, "a mapping"),
        (Path, None),
        (Path | None, None),
        (Any, None),
    ],
)
def test_types_are_put_into_words(annotation: Any, words: str | None) -> None:
    assert type_words(annotation) == words
