"""The shadow app end to end on a tiny model: files, texts of a run folder, refusals."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import experiments.run
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.run import RunResult
from experiments.run import execute as execute_run
from experiments.schemas import load_config
from experiments.shadow import execute, load_shadow, main, register_shadow
from experiments.shadow_texts import read_texts
from specdec.errors import ConfigError
from specdec.metrics import accepted_length
from tests.models import byte_tokenizer, tiny_model

QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "short", "turns": ["a b a b a b"]},
    {"question_id": "two", "category": "long", "turns": ["one two one two", "and again"]},
    {"question_id": 3, "category": "long", "turns": ["tell me more of it"]},
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Save a tiny model and questions; return the overrides that both apps take."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    model = tiny_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512
    )
    model.save_pretrained(folder / "model")
    lines = "\n".join(json.dumps(question) for question in QUESTIONS)
    (folder / "questions.jsonl").write_text(lines)
    return [
        f"target.name={folder / 'model'}",
        "target.dtype=float32",
        "engine.device=cpu",
        "engine.max_model_len=256",
        "prompts=file",
        f"prompts.path={folder / 'questions.jsonl'}",
        "sampling.max_tokens=14",
    ]


def composed(app: str, overrides: list[str]) -> Any:
    register_shadow()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return compose(app, overrides=overrides)


def plain(cfg: Any) -> dict[str, Any]:
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return resolved


def shadow(folder: Path, overrides: list[str]) -> pd.DataFrame:
    cfg = composed("shadow", overrides)
    execute(load_shadow(cfg), folder, "python -m experiments.shadow", plain(cfg))
    return pd.read_csv(folder / "shadow.csv")


@pytest.fixture(scope="module")
def run_folder(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `ngram` and `layer_skip` beside the autoregressive arm, without the report."""
    folder = tmp_path_factory.mktemp("run")
    arms = "compare=[{drafter:{name:layer_skip,num_layers:2},num_speculative_tokens:3}]"
    cfg = composed(
        "run",
        [*given, arms, "num_speculative_tokens=3", "equality.enabled=false", "warmup_tokens=0"],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments.run, "_report", lambda run: RunResult(folder, folder, [], None))
        execute_run(load_config(cfg), folder, "python -m experiments.run", plain(cfg))
    return folder


DRAFTERS = "drafters=[ngram,{name:layer_skip,num_layers:2},{name:suffix,use_global:false}]"


@pytest.mark.parametrize("recorded", [True, False])
def test_the_table_has_what_a_run_measures(
    given: list[str], run_folder: Path, tmp_path: Path, recorded: bool
) -> None:
    texts = "texts=null" if recorded else f"texts={run_folder}"
    table = shadow(tmp_path, [*given, DRAFTERS, "num_speculative_tokens=[1,3]", texts])
    assert set(table["category"]) == {"all", "short", "long"}
    assert set(table["method"]) == {"scored", "played along the texts"}
    whole = table[table["category"] == "all"].set_index(["drafter", "k"])
    assert whole["num_texts"].tolist() == [4] * 6
    assert whole["num_prompts"].tolist() == [3] * 6
    requests = pd.read_parquet(run_folder / "requests.parquet")
    for drafter in ("ngram", "layer_skip"):
        real = requests.loc[requests["arm"] == f"{drafter} K=3"]
        line = whole.loc[(drafter, 3)]
        length = accepted_length(real)
        assert line["accepted_length"] == pytest.approx(length.value)
        assert line["num_steps"] == real["is_verify"].sum()
        for i in (1, 2, 3):
            share = (real["num_accepted"] >= i).sum() / (real["num_drafted"] >= i).sum()
            assert line[f"acceptance_at_{i}"] == pytest.approx(share, nan_ok=True)
    record = json.loads((tmp_path / "shadow.json").read_text())
    assert record["provenance"]["dtype"] == "float32"
    assert list(record["drafters"]) == ["ngram", "layer_skip", "suffix"]
    assert (tmp_path / "shadow.png").read_bytes().startswith(b"\x89PNG")


def test_laws_are_judged_under_rejection(given: list[str], tmp_path: Path) -> None:
    drafters = (
        "drafters=[{name:layer_skip,num_layers:2},{name:layer_skip,num_layers:2,sampling:gumbel}]"
    )
    sampling = ["sampling.temperature=1.5", "sampling.top_k=40", "num_speculative_tokens=[2]"]
    table = shadow(tmp_path, [*given, drafters, *sampling])
    names = ["layer_skip sampling=argmax", "layer_skip sampling=gumbel"]
    whole = table[table["category"] == "all"].set_index("drafter")
    assert whole.index.tolist() == names
    assert whole.loc[names[0], "num_steps"] == round(whole.loc[names[0], "num_steps"])
    assert whole.loc[names[1], "num_steps"] != round(whole.loc[names[1], "num_steps"])


def test_texts_of_another_run_are_refused(given: list[str], run_folder: Path) -> None:
    cfg = composed("shadow", [*given, "sampling.temperature=0.5"])
    with pytest.raises(ConfigError, match=r"sampling.temperature=0.0, and sampling.temperature"):
        read_texts(run_folder, plain(cfg), same_noise=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts(run_folder / "nowhere", plain(cfg), same_noise=False)
    cfg = composed("shadow", [*given, "engine.weight_dtype=fp8"])
    with pytest.raises(ConfigError, match=r"engine.weight_dtype=auto, and engine.weight_dtype"):
        read_texts(run_folder, plain(cfg), same_noise=False)
    cfg = composed("shadow", [*given, "verifier=sampled_match"])
    assert len(read_texts(run_folder, plain(cfg), same_noise=False)) == 4
    with pytest.raises(ConfigError, match=r"verifier.name=rejection"):
        read_texts(run_folder, plain(cfg), same_noise=True)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["drafters=[none]"], ["drafters[0]=none", "never drafts"]),
        (["drafters=[]"], ["drafters=[]"]),
        (["drafters=[{name:ngram,max_m:2}]"], ["drafters[0].max_m", "max_n"]),
        (["drafters=[ngrams]"], ["ngrams", "ngram"]),
        (["num_speculative_tokens=[0,2]"], ["num_speculative_tokens=[0, 2]", ">= 1"]),
        (["verifier=typical"], ["verifier=typical", "lossy"]),
        (["verifier=block", "sampling=temp08"], ["verifier=block", "rejection"]),
        (["verifier=greedy", "sampling=temp08"], ["verifier=greedy", "sampled_match"]),
        (["starts_per_pass=0"], ["starts_per_pass=0", ">= 1"]),
        (["engine.block_size=0"], ["engine.block_size=0"]),
    ],
)
def test_a_mistake_is_told_before_anything_loads(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_shadow(composed("shadow", overrides))
    for part in parts:
        assert part in str(refused.value)


def test_the_command_line_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = f"hydra.run.dir={tmp_path}"
    monkeypatch.setattr("sys.argv", ["shadow", "drafters=[none]", run_dir])
    assert main() == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: drafters[0]=none")


def test_the_preset_composes() -> None:
    config = load_shadow(composed("shadow", ["shadow=dry_run"]))
    assert config.num_speculative_tokens == [1, 3]
