"""Write the model card of a trained drafter from the records of its stages.

    python -m experiments.training.card --fit out/eagle3 --eval eval.json --overlap overlap.json \\
        --data ds0 ds1 --out drafters/trained/smollm2-135m-instruct/eagle3

Several folders after `--fit` are the runs in their order, of which each but the first began with
what the one before left. The card says nothing that is not in the records.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.training.config import FitConfig
from experiments.training.curve import read_curve
from experiments.training.dataset import SPLITS, dataset_folders, read_meta
from experiments.training.eval import markdown
from specdec.errors import ConfigError, SpecdecError

_NUM_CURVE_LINES = 10
_WHAT = {
    "eagle3": "An EAGLE-3 head: one decoder layer that reads three of the target's layers. Its "
    "output layer is the target's own rows of the draft vocabulary, which the files do not repeat.",
    "draft_model": "A small causal model: a few decoder layers, which began as the target's. "
    "Embedding and output layer are the target's own and are not in the files; the output layer "
    "has the rows of the draft vocabulary alone.",
    "medusa": "Medusa heads: one block for each draft, on the target's last hidden state.",
    "block_parallel": "A block-parallel head: all drafts in one pass, from masks. Its output layer "
    "is the target's own.",
}
# Options that a reader wants to see even where they are the defaults.
_SHOWN = ("loss", "unroll", "step_decay", "draft_vocab_size", "optimizer", "lr", "batch_tokens")


def write_card(
    fits: Sequence[Path],
    evaluation: Path | None,
    data: Sequence[Path],
    overlap: Path | None,
    out: Path,
) -> Path:
    """Write `README.md` into a drafter's folder.

    Args:
        fits: folders of the stage `fit`, in the order in which they were run.
        evaluation: `eval.json` of the stage `eval`; None leaves the results out.
        data: dataset folders.
        overlap: a file with what `overlap_report` gave; None leaves it out.
        out: the drafter's folder.

    Raises:
        ConfigError: a record is missing or damaged.
    """
    records = [_read(folder / "fit.json") for folder in fits]
    method = str(records[-1]["config"]["method"])
    target = str(records[-1]["config"]["target"])
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if not size:
        raise ConfigError(f"{out} holds no drafter; give the folder that `fit` left in `drafter/`")
    parts = [
        f"# {method} for {target}",
        f"{_WHAT[method]} {size / 1e6:.1f} MB in {records[-1]['config']['save_dtype']}; draft "
        f"vocabulary: {_vocabulary(records[-1])}. A draft never changes what the target writes, "
        f"only how fast; see docs/verifiers.md.",
        f"    python -m experiments.run drafter={method}",
        "## Training",
        _runs(fits, records),
        *_options(records),
        "### Curve of the last run",
        "Acceptance (sum of min(p, q)) and agreement (same best token) of the first and the last "
        "pass on training batches; length: mean accepted length at K=5, greedy, that the engine "
        "measured on the held-out split during the run.",
        _curve(read_curve(fits[-1] / "curve.jsonl")),
        "## Data",
        "Written by the target itself (`python -m experiments.train`, stage `data`): answers to "
        "its own questions and to instructions from `experiments/training/seeds.json`, and work "
        "on passages that it wrote. Looping and repeated texts are dropped, and families of texts "
        "that belong together are kept in one split.",
        _data(data),
    ]
    if overlap is not None:
        parts += [
            "### Overlap with the question files of the results",
            "They were read for testing alone. Share of the training text's n-grams (tokens) that "
            "stand in a question, share of the questions' n-grams that stand in the training text, "
            "and questions that are a training prompt word for word.",
            _overlap(_read(overlap)),
        ]
    if evaluation is not None:
        parts += _results(_read(evaluation), method)
    path = out / "README.md"
    path.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n", encoding="utf-8")
    return path


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a record of a stage") from error


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _vocabulary(record: Mapping[str, Any]) -> str:
    size, coverage = record["config"]["draft_vocab_size"], record["figures"]["vocabulary_coverage"]
    return f"{size} tokens, {coverage:.2%} of the answers" if coverage < 1 else "the target's"


def _runs(fits: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the runs."""
    rows = []
    for i, (folder, record) in enumerate(zip(fits, records, strict=True)):
        config, figures, source = record["config"], record["figures"], record["provenance"]
        begin = f"run {i}" if i else "the target's layers" if config["warm_start"] else "random"
        rows.append(
            (
                i + 1, begin, config["data"], f"{figures['num_tokens'] / 1e6:.1f} M",
                figures["num_steps"], f"{figures['seconds']:.0f} s", source["device"],
                config["seed"], str(source["commit"])[:10],
            )
        )  # fmt: skip
        assert folder.is_dir(), folder
    head = ("run", "starts from", "data", "tokens seen", "steps", "time", "device", "seed")
    return table((*head, "commit"), rows)


def _options(records: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Give the options of each run that are worth saying."""
    defaults = vars(FitConfig(max_epochs=1))
    left_out = {"eval", "data", "target", "seed", "method", "init_from", "device", "log_every"}
    left_out |= {"save_every", "eval_every", "cache_gb", "chunk_rows", "max_epochs", "resume"}
    for i, record in enumerate(records, 1):
        config = record["config"]
        shown = {
            name: value
            for name, value in config.items()
            # A name that this version does not know is of an option that is no more.
            if name in defaults.keys() - left_out and (name in _SHOWN or value != defaults[name])
        }
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        yield f"Options of run {i}: {text}. Versions: " + ", ".join(
            f"{name} {version}" for name, version in record["provenance"]["versions"].items()
        )


def _curve(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return some lines of a curve, at even distances, and all that the engine measured."""
    trained = [line for line in lines if "loss" in line]
    # The very last line may stand for a handful of batches.
    steps = [round(i * (len(trained) - 2) / _NUM_CURVE_LINES) for i in range(_NUM_CURVE_LINES + 1)]
    shown = {index: trained[index] for index in steps}
    rows: list[tuple[int, Sequence[object]]] = []
    for line in shown.values():
        rows.append(
            (
                line["step"],
                (
                    line["step"], f"{line['num_tokens'] / 1e6:.1f}", f"{line['loss']:.3f}",
                    _ends(line["accepted"]), _ends(line["agreed"]), "",
                ),
            )
        )  # fmt: skip
    for line in lines:
        for name, value in line.items():
            if name.startswith("length_"):
                rows.append((line["step"], (line["step"], "", "", "", "", f"{value:.2f}")))
    head = ("step", "tokens (M)", "loss", "acceptance", "agreement", "length")
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


def _ends(values: Sequence[float]) -> str:
    """Return the first and the last of some figures."""
    return ", ".join(f"{value:.3f}" for value in (values[0], *values[1:][-1:]))


def _data(folders: Sequence[Path]) -> str:
    """Return tables of what datasets hold, and how they were written."""
    metas = [(path, read_meta(path)) for given in folders for path in dataset_folders(given)]
    rows: list[Sequence[object]] = []
    totals: Counter[str] = Counter()
    shares: dict[str, list[str]] = {}  # folders by what they were asked for
    for path, meta in metas:
        counts, config = meta["counts"], meta["config"]
        train, valid = (counts[split] for split in SPLITS)
        totals.update(train["by_source"])
        wanted = ", ".join(f"{kind} {share:g}" for kind, share in sorted(config["shares"].items()))
        shares.setdefault(wanted, []).append(path.name)
        writing = config["writing"]
        rows.append(
            (
                path.name, config["seed"], train["sequences"], f"{train['tokens'] / 1e6:.2f} M",
                f"{train['answer_tokens'] / 1e6:.2f} M", valid["sequences"],
                f"{writing['question_temperature']:g}, {writing['passage_temperature']:g}",
            )
        )  # fmt: skip
    head = ("dataset", "seed", "sequences", "tokens", "of answers", "held out")
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(totals.items()))
    asked = "; ".join(f"{wanted} ({', '.join(names)})" for wanted, names in shares.items())
    writing = metas[0][1]["config"]["writing"]
    drawn = ", ".join(
        f"{share:.0%} at {temperature:g}"
        for temperature, share in zip(
            writing["temperatures"], writing["temperature_shares"], strict=True
        )
    )
    return (
        table((*head, "temperature of questions, passages"), rows)
        + f"\n\nShares of the prompts: {asked}. Temperatures of answers: {drawn}. Sequences by "
        f"kind: {kinds}."
    )


def _overlap(report: Mapping[str, Any]) -> str:
    sizes = list(next(iter(report.values()))["ngrams"])
    head = ["file", "turns", "same prompt"]
    head += [f"{what}, n={n}" for n in sizes for what in ("of training", "of questions")]
    rows = []
    for name, entry in report.items():
        row: list[object] = [name, entry["num_turns"], entry["num_training_prompts"]]
        for n in sizes:
            shares = entry["ngrams"][n]
            row += [f"{shares['train_share']:.5%}", f"{shares['question_share']:.2%}"]
        rows.append(row)
    return table(head, rows)


def _results(record: Mapping[str, Any], method: str) -> list[str]:
    """Return the results of one drafter, at its default options and at others."""
    config, source = record["config"], record["provenance"]
    own = [line for line in record["lines"] if line["drafter"].split()[0] == method]
    return [
        "## Results",
        f"Mean accepted length (committed tokens a verification step, bonus included) through the "
        f"engine, with 95 % bootstrap intervals over prompts: first turns, {config['max_tokens']} "
        f"new tokens, verifier {config['verifier']}, {source['dtype']}, {source['device']}, commit "
        f"{str(source['commit'])[:10]}. At a temperature above 0, `sampling=gumbel` draws drafts "
        f"and verifies them against their own law; the default drafts the most likely token.",
        markdown(own),
    ]


def main() -> int:
    """Write a card on the command line."""
    parser = argparse.ArgumentParser(description="model card of a trained drafter")
    parser.add_argument("--fit", type=Path, nargs="+", required=True, help="folders of fit")
    parser.add_argument("--eval", type=Path, help="eval.json of the stage eval")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="dataset folders")
    parser.add_argument("--overlap", type=Path, help="file with the report of overlap")
    parser.add_argument("--out", type=Path, required=True, help="the drafter's folder")
    given = parser.parse_args()
    try:
        print(write_card(given.fit, given.eval, given.data, given.overlap, given.out))
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
