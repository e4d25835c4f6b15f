"""The stage `data`: the target writes the texts that its drafters are trained on.

    python -m experiments.training.data --config data.json --out folder

Texts come from our own engine at a large batch, shard by shard. A shard is fixed by the options and
the seed; one that is complete is never written again, so a run that was stopped goes on with the
next. The folder's layout is told in `experiments.training.dataset`.
"""

import dataclasses
import gc
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.provenance import collect_provenance, shown_path
from experiments.training.dataset import (
    META_NAME,
    SPLITS,
    TokenSequence,
    read_meta,
    read_sequences,
    shard_name,
    shard_paths,
    write_meta,
    write_shard,
)
from experiments.training.filters import SeenTexts, share_of
from experiments.training.overlap import overlap_report
from experiments.training.player import Player
from experiments.training.seeds import SeedPrompts
from experiments.training.shard import (
    FAMILIES,
    SOURCES,
    ChatFormat,
    ShardWriter,
    WritingConfig,
    Written,
    counts_of,
)
from experiments.training.stage import StageRun, stage_main
from runner.loader import (
    LoadedTarget,
    eos_token_ids,
    load_target,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError
from specdec.log import progress

logger = logging.getLogger(__name__)

_NUM_ROWS = {"cuda": 1024, "cpu": 32}
_NUM_BATCHED_TOKENS = {"cuda": 16384, "cpu": 2048}


@dataclass
class DataConfig:
    """Options of the stage `data`.

    Args:
        target: the chat model, by name, folder or hub id.
        device, dtype: where and in what it runs; "auto" as an engine has it.
        seed: of every draw.
        num_shards: shards of the dataset.
        prompts_per_shard: answers that a shard asks for, about.
        max_seconds: begin no further shard after so long, but always a first one; None = no limit.
        shares: of the prompts, by kind: free (the chat model's own questions), writing, code,
            maths, questions, sentences (all from templates) and passages (long prompts, and the
            passages in them); kinds that are not named get none.
        writing: how texts are drawn and which are dropped.
        valid_share: of the families that are kept for validation.
        max_num_reqs: texts written together; None = 1024 on a GPU, 32 on a CPU.
        max_num_batched_tokens: tokens of a step; None = 16384 on a GPU, 2048 on a CPU.
        max_model_len: tokens of a text at most, prompt included.
        overlap_files: question files that the dataset is compared with, for the record alone.
    """

    target: str = "smollm2-135m-instruct"
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    num_shards: int = 4
    prompts_per_shard: int = 8192
    max_seconds: float | None = None
    shares: dict[str, float] = field(
        default_factory=lambda: {
            "free": 0.36,
            "writing": 0.08,
            "code": 0.12,
            "maths": 0.12,
            "questions": 0.1,
            "sentences": 0.04,
            "passages": 0.18,
        }
    )
    writing: WritingConfig = field(default_factory=WritingConfig)
    valid_share: float = 0.02
    max_num_reqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int = 2048
    overlap_files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check every range."""
        for name in ("num_shards", "prompts_per_shard", "max_num_reqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name}={value} is not allowed; give an integer >= 1")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ConfigError(f"data.max_seconds={self.max_seconds} is not allowed; give > 0")
        if not 0 <= self.valid_share < 1:
            raise ConfigError(
                f"data.valid_share={self.valid_share} is not allowed; give a number in [0, 1)"
            )
        for kind, share in self.shares.items():
            if kind not in FAMILIES:
                raise ConfigError(
                    f"data.shares names {kind!r}, which is no kind; known: {', '.join(FAMILIES)}"
                )
            if isinstance(share, bool) or not isinstance(share, int | float) or share < 0:
                raise ConfigError(f"data.shares.{kind}={share!r} is not allowed; give >= 0")
        if not any(counts_of(self.shares, self.prompts_per_shard).values()):
            raise ConfigError(
                f"data.shares={self.shares} and data.prompts_per_shard={self.prompts_per_shard} "
                "leave no prompt; give more"
            )
        writing = self.writing
        least = max(writing.max_question_tokens, writing.max_passage_tokens)
        least = max(least, writing.max_answer_tokens) + 64  # the chat template and a short prompt
        if self.max_model_len < least:
            raise ConfigError(
                f"data.max_model_len={self.max_model_len} is too little for the texts that "
                f"data.writing asks for; give at least {least}"
            )

    def fingerprint(self, seeds: SeedPrompts) -> str:
        """Return what two datasets have in common whose shards are the same."""
        values = dataclasses.asdict(self)
        for name in ("device", "num_shards", "max_seconds", "overlap_files"):
            del values[name]
        values["target"] = shown_path(self.target)
        values["dtype"] = str(resolve_dtype(self.dtype, resolve_device(self.device)))
        text = json.dumps([values, seeds.digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_data(
    config: DataConfig, run: StageRun, target: LoadedTarget | None = None
) -> Mapping[str, Any]:
    """Write the shards that a dataset lacks, then its report.

    Args:
        config: options.
        run: where to.
        target: one that is loaded already.

    Returns:
        Sequences, tokens and speed.

    Raises:
        ConfigError: the folder holds a dataset of other options, or the target is no chat model.
        CapacityError: a file cannot be written.
    """
    seeds = SeedPrompts(config.seed)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        meta = _begin_meta(config, run, seeds)
        for split in SPLITS:  # one that a run was stopped at is written anew
            for path in shard_paths(run.folder, split)[len(meta["shards"]) :]:
                path.unlink()
        num_missing = config.num_shards - len(meta["shards"])
        tokenizer = target.tokenizer if target is not None else None
        if num_missing > 0:
            tokenizer = _write_shards(config, run, seeds, target, meta)
        else:
            logger.info("all %d shards are there", len(meta["shards"]))
        if config.overlap_files:
            tokenizer = tokenizer or load_tokenizer(config.target)
            meta["overlap"] = _overlap(config, run.folder, ChatFormat(tokenizer), tokenizer)
            write_meta(run.folder, meta)
    except OSError as error:
        raise CapacityError(f"{run.folder} cannot be written: {error.strerror or error}") from error
    speed = [shard["tokens_per_s"] for shard in meta["shards"]]
    return {
        **meta["counts"],
        "shards": len(meta["shards"]),
        "tokens_per_s": round(sum(speed) / len(speed), 1),
    }


def _begin_meta(config: DataConfig, run: StageRun, seeds: SeedPrompts) -> dict[str, Any]:
    """Return what the folder says of itself, or the beginning of that.

    Raises:
        ConfigError: it holds shards of other options.
    """
    fingerprint = config.fingerprint(seeds)
    if (run.folder / META_NAME).exists():
        meta = read_meta(run.folder)
        if meta.get("fingerprint") != fingerprint:
            raise ConfigError(
                f"{run.folder} holds a dataset of other options; give another folder, or the "
                f"options of its {META_NAME}"
            )
        return meta
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return {
        "sources": list(SOURCES),
        "fingerprint": fingerprint,
        "seeds": seeds.digest,
        "config": dataclasses.asdict(config)
        | {
            "target": shown_path(config.target),
            "overlap_files": [Path(name).name for name in config.overlap_files],
        },
        "provenance": collect_provenance(run.command, config.seed, device, dtype),
        "counts": {},
        "shards": [],
        "overlap": {},
    }


def _write_shards(
    config: DataConfig,
    run: StageRun,
    seeds: SeedPrompts,
    target: LoadedTarget | None,
    meta: dict[str, Any],
) -> Any:
    """Write what is missing; returns the target's tokenizer."""
    device = resolve_device(config.device)
    if target is None:
        target = load_target(config.target, resolve_dtype(config.dtype, device), device)
    chat, seen = ChatFormat(target.tokenizer), SeenTexts(config.writing.max_shared)
    for split in SPLITS:
        for path in shard_paths(run.folder, split)[: len(meta["shards"])]:
            seen.add_all(read_sequences(path))
    engine, num_rows = _make_engine(config, target)
    player = Player(engine, num_rows, eos_token_ids(target.model, target.tokenizer))
    counts = counts_of(config.shares, config.prompts_per_shard)
    started = time.monotonic()
    for shard in range(len(meta["shards"]), config.num_shards):
        elapsed = time.monotonic() - started
        if meta["shards"] and config.max_seconds is not None and elapsed > config.max_seconds:
            logger.info("stopped after %d shards: max_seconds", len(meta["shards"]))
            break
        writer = ShardWriter(config.writing, chat, seeds, seen, config.max_model_len)
        writer.begin(player, config.seed, shard, counts)
        record = _play(player, shard, config.num_shards)
        record |= _write(run.folder, shard, config.valid_share, writer)
        meta["shards"].append(record)
        meta["counts"] = _sum_counts(meta["shards"])
        meta["provenance"]["duration_s"] = round(sum(s["seconds"] for s in meta["shards"]), 1)
        write_meta(run.folder, meta)
        _tell(record, run, shard, config.num_shards)
    del engine, player
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return target.tokenizer


def _make_engine(config: DataConfig, target: LoadedTarget) -> tuple[Engine, int]:
    """Build an autoregressive engine for a large batch; returns its rows, too."""
    kind = target.model.device.type
    num_rows = config.max_num_reqs or _NUM_ROWS[kind]
    shapes = {max(1, num_rows * sixteenths // 16) for sixteenths in (1, 4, 8, 12, 16)}
    engine = Engine(
        # Without its tokenizer: the engine would decode every text, and few are read.
        dataclasses.replace(target, tokenizer=None),
        "none",
        num_speculative_tokens=0,
        device=str(target.model.device),
        dtype=str(target.model.dtype).removeprefix("torch."),
        seed=config.seed,
        max_num_reqs=num_rows,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or _NUM_BATCHED_TOKENS[kind],
        graph_num_reqs=sorted(shapes),
        penalties=False,
    )
    return engine, num_rows


def _play(player: Player, shard: int, num_shards: int) -> dict[str, Any]:
    """Write the queued texts; returns how many tokens and how fast."""
    tokens_before, seconds_before = player.num_tokens, player.seconds

    def speed() -> float:
        seconds = player.seconds - seconds_before
        return (player.num_tokens - tokens_before) / seconds if seconds else 0.0

    with progress(f"shard {shard + 1}/{num_shards}", total=player.num_queued) as bar:
        player.play(lambda: bar.advance(f"{speed():.0f} tokens/s"))
    return {
        "written_tokens": player.num_tokens - tokens_before,
        "seconds": round(player.seconds - seconds_before, 3),
        "tokens_per_s": round(speed(), 1),
    }


def _write(folder: Path, shard: int, valid_share: float, writer: ShardWriter) -> dict[str, Any]:
    """Write a shard's files; returns what they hold and what was dropped."""
    parts: dict[str, list[Written]] = {split: [] for split in SPLITS}
    for written in writer.finish():
        parts["valid" if share_of(written.root) < valid_share else "train"].append(written)
    for split, texts in parts.items():
        write_shard(folder / shard_name(split, shard), [text.sequence for text in texts])
    return {
        "splits": {split: _count([t.sequence for t in texts]) for split, texts in parts.items()},
        "dropped": dict(sorted(writer.dropped.items())),
    }


def _count(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """Return how many sequences and tokens there are, of which sources and temperatures."""
    sources = Counter(SOURCES[sequence.source] for sequence in sequences)
    temperatures = Counter(f"{sequence.temperature:g}" for sequence in sequences)
    return {
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
        "answer_tokens": sum(len(sequence.answer) for sequence in sequences),
        "by_source": dict(sorted(sources.items())),
        "by_temperature": dict(sorted(temperatures.items())),
    }


def _sum_counts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over shards, by split."""
    sums: dict[str, Any] = {}
    for split in SPLITS:
        parts = [shard["splits"][split] for shard in shards]
        sums[split] = {
            name: sum(part[name] for part in parts)
            for name in ("sequences", "tokens", "answer_tokens")
        }
        for name in ("by_source", "by_temperature"):
            total = sum((Counter(part[name]) for part in parts), Counter())
            sums[split][name] = dict(sorted(total.items()))
    dropped = sum((Counter(shard["dropped"]) for shard in shards), Counter())
    return {**sums, "dropped": dict(sorted(dropped.items()))}


def _tell(record: Mapping[str, Any], run: StageRun, shard: int, num_shards: int) -> None:
    """Log a shard, and hand its figures to the tracker."""
    train, valid = record["splits"]["train"], record["splits"]["valid"]
    logger.info(
        "shard %d/%d: %d + %d sequences, %d + %d tokens, %.0f tokens/s, dropped %s",
        shard + 1,
        num_shards,
        train["sequences"],
        valid["sequences"],
        train["tokens"],
        valid["tokens"],
        record["tokens_per_s"],
        ", ".join(f"{n} {reason}" for reason, n in record["dropped"].items()) or "none",
    )
    run.log(
        {
            "data/tokens_per_s": record["tokens_per_s"],
            "data/sequences": train["sequences"],
            "data/tokens": train["tokens"],
            "data/dropped": sum(record["dropped"].values()),
        },
        shard,
    )


def _overlap(config: DataConfig, folder: Path, chat: ChatFormat, tokenizer: Any) -> dict[str, Any]:
    """Compare the whole dataset with question files."""
    sequences = [
        sequence
        for split in SPLITS
        for path in shard_paths(folder, split)
        for sequence in read_sequences(path)
    ]
    user_texts = (chat.user_text(s.token_ids[: s.num_prompt].tolist()) for s in sequences)
    return overlap_report(sequences, user_texts, config.overlap_files, tokenizer)


if __name__ == "__main__":
    sys.exit(stage_main("data", DataConfig, run_data))
