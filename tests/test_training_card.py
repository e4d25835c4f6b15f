"""Model cards say what the records say."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.training.card import main, write_card
from experiments.training.config import FitConfig
from experiments.training.dataset import write_meta
from specdec.errors import ConfigError


def records(folder: Path) -> dict[str, Path]:
    """Write what the stages leave."""
    fit, data, out = folder / "fit", folder / "ds0", folder / "drafter"
    for own in (fit, data, out):
        own.mkdir()
    (out / "model.safetensors").write_bytes(bytes(2_000_000))
    versions = {"torch": "2.13.0"}
    source = {"commit": "abcdef0123456789", "device": "GPU", "dtype": "bfloat16"}
    config = vars(FitConfig(method="eagle3", max_epochs=2, lr=0.5)) | {"eval": {}, "data": "ds0"}
    figures = {"num_tokens": 3_000_000, "num_steps": 70, "seconds": 9.4, "loss": 1.5}
    record: dict[str, Any] = {
        "provenance": {**source, "versions": versions}, "config": config,
        "figures": {**figures, "vocabulary_coverage": 0.9875},
    }  # fmt: skip
    (fit / "fit.json").write_text(json.dumps(record))
    lines: list[dict[str, Any]] = [
        {"step": i, "num_tokens": i * 1e5, "loss": 5 - i / 10, "accepted": [0.1, 0.2],
         "agreed": [0.3, 0.4]} for i in range(1, 31)
    ]  # fmt: skip
    lines.insert(10, {"step": 10, "length_k5_t0": 2.345})
    (fit / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    part = {"sequences": 8, "tokens": 4000, "answer_tokens": 2000, "by_source": {"free": 8}}
    writing = {
        "temperatures": [0.0, 1.0], "temperature_shares": [0.75, 0.25],
        "question_temperature": 0.8, "passage_temperature": 0.7,
    }  # fmt: skip
    options = {"seed": 3, "shares": {"free": 1.0}, "writing": writing}
    write_meta(data, {"counts": {"train": part, "valid": part}, "config": options})
    shares = {"train_share": 0.001, "question_share": 0.5}
    overlap = {"q.jsonl": {"num_turns": 7, "num_training_prompts": 1, "ngrams": {"8": shares}}}
    (folder / "overlap.json").write_text(json.dumps(overlap))
    row = {
        "k": 2, "temperature": 0.0, "file": "all", "category": "all", "accepted_length": 1.75,
        "accepted_length_low": 1.5, "accepted_length_high": 2.0,
    }  # fmt: skip
    rows = [{"drafter": name, **row} for name in ("eagle3", "eagle3 sampling=gumbel", "ngram")]
    evaluation = {
        "provenance": source, "config": {"max_tokens": 64, "verifier": "block"}, "lines": rows
    }  # fmt: skip
    (folder / "eval.json").write_text(json.dumps(evaluation))
    return {"fit": fit, "data": data, "out": out, "overlap": folder / "overlap.json"}


def test_a_card_has_recipe_curve_overlap_and_results(tmp_path: Path) -> None:
    own = records(tmp_path)
    parts = [own["fit"], own["fit"]], tmp_path / "eval.json", [own["data"]], own["overlap"]
    text = write_card(*parts, own["out"]).read_text()
    for words in (
        "# eagle3 for smollm2-135m-instruct",
        "2.0 MB in bfloat16; draft vocabulary: 8192 tokens, 98.75% of the answers",
        "| 1 | the target's layers | ds0 | 3.0 M | 70 | 9 s | GPU | 0 | abcdef0123 |",
        "| 2 | run 1 |",
        "lr 0.5",
        "| 10 |  |  |  |  | 2.35 |",  # 2.345 is a little more in binary
        "| ds0 | 3 | 8 | 0.00 M | 0.00 M | 8 | 0.8, 0.7 |",
        "75% at 0, 25% at 1",
        "| q.jsonl | 7 | 1 | 0.10000% | 50.00% |",
        "64 new tokens, verifier block",
        "| eagle3 | 0.0 | all | all | 1.75 (1.50..2.00) |",
        "| eagle3 sampling=gumbel |",
    ):
        assert words in text, words
    assert "| ngram |" not in text


def test_a_folder_without_a_drafter_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = records(tmp_path)
    with pytest.raises(ConfigError, match="holds no drafter"):
        write_card([own["fit"]], None, [own["data"]], None, tmp_path)
    arguments = ["card", "--fit", str(tmp_path), "--data", str(own["data"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*arguments, "--out", str(own["out"])])
        assert main() == 1
    assert "fit.json cannot be read" in capsys.readouterr().err
