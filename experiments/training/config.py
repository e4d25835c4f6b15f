"""Options of the stages `fit` and `eval`."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from experiments.provenance import shown_path
from runner.weights import EMBEDDED_NAME
from specdec.errors import ConfigError


@dataclass
class EvalConfig:
    """How the accepted length is measured through the engine.

    Args:
        target: "smollm2-135m-instruct" (embedded), a hub id, or a local folder.
        dtype: of the target; "auto" is bf16 where the device is fast at it, else fp32.
        device: "auto", "cpu", "cuda" or "cuda:<index>".
        fitted: folder of a run of the stage `fit`, whose drafter is measured; "" = none, None =
            that of the same run of the app, where there is one.
        drafters: what else is measured: names, or mappings with a key "name".
        files: question files, whose first turns are asked; empty takes prompts of `data`.
        data: dataset folder, whose split "valid" gives prompts.
        num_speculative_tokens: values of K.
        temperatures: of the target.
        verifier: rule, by name.
        max_prompts: of each file, or of the split, at most.
        max_prompt_len: tokens of a prompt of the split at most.
        max_tokens: new tokens a prompt.
        max_num_reqs: prompts side by side.
        max_model_len: tokens of a prompt with its answer; longer prompts are left out.
        graph_scope: "auto", "step", "draft" or "none"; capturing pays for long evaluations alone.
        seed: of the noise.
    """

    target: str = EMBEDDED_NAME
    dtype: str = "auto"
    device: str = "auto"
    fitted: str | None = None
    drafters: list[object] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    data: str = ""
    num_speculative_tokens: list[int] = field(default_factory=lambda: [5])
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    verifier: str = "rejection"
    max_prompts: int = 128
    max_prompt_len: int = 1024
    max_tokens: int = 128
    max_num_reqs: int = 256
    max_model_len: int = 2048
    graph_scope: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        counts = ("max_prompts", "max_prompt_len", "max_tokens", "max_num_reqs")
        _check_at_least("eval", self, dict.fromkeys(counts, 1))
        if not self.num_speculative_tokens or min(self.num_speculative_tokens) < 1:
            raise ConfigError(
                f"eval.num_speculative_tokens={self.num_speculative_tokens} is not allowed; give "
                f"integers >= 1"
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(
                f"eval.temperatures={self.temperatures} is not allowed; give numbers >= 0"
            )


def quick_eval() -> EvalConfig:
    """Return a measurement that is short enough for the middle of a training run."""
    return EvalConfig(max_prompts=64, max_prompt_len=512, graph_scope="none")


@dataclass
class FitConfig:
    """What is trained, on what, and for how long.

    A run ends with the first of `max_steps`, `max_tokens`, `max_seconds` and `max_epochs`, and the
    learning rate falls along the one that is nearest to its end.

    Args:
        method: "eagle3", "draft_model", "medusa" or "block_parallel".
        target: "smollm2-135m-instruct" (embedded), a hub id, or a local folder.
        dtype: of the target; "auto" is bf16 on a GPU and fp32 on a CPU. What is trained is kept in
            fp32, and on a GPU computed in bf16.
        device: "auto", "cpu" or "cuda"; each process has a GPU of its own.
        data: dataset folder of the stage `data`, or a pattern of several ("runs/data-*").
        states: folder of texts that the drafter `record` wrote: they and their hidden states are
            learned from instead, and the target's layers are not run; "" = computed online.
        loss: "kl" (soft cross-entropy), "tv" (probability of a rejection) or "ce" (the text).
        unroll: passes of a head, which are the drafts that it is trained for.
        step_decay: weight of a pass as a part of that of the pass before.
        draft_vocab_size: most frequent tokens of the training text that are drafted, for methods
            with an output head of their own choice; 0 = all.
        learn_prompts: learn from prompts, too, not from answers alone.
        aux_layers: target layers that heads read, from 0; None takes the usual three.
        copied_layers: target layers that a draft model starts from; negative ones from the end.
        num_layers: decoder layers of a block-parallel head.
        warm_start: start from the target's weights where there are any.
        init_from: checkpoint folder of an earlier run whose weights and vocabulary to start from.
        max_seq_len: tokens of a sequence; longer ones are cut.
        batch_tokens: tokens of a batch, padding included.
        accumulate: batches a step.
        cache_gb: memory of the device in which the target's states are kept from one epoch to the
            next, 1e9 bytes each; 0 = they are computed in every epoch.
        optimizer: "adamw", or "muon" for matrices and AdamW for the rest.
        lr, weight_decay, warmup, final_lr: highest rate, decay, part of the run in which the rate
            rises, and what it falls to as a part of the highest.
        max_grad_norm: gradients are cut to this norm.
        max_steps, max_tokens, max_seconds, max_epochs: budgets; 0 = no such one.
        chunk_rows: positions whose logits are held at a time.
        log_every, save_every, eval_every: steps; 0 = never (but for the save at the end).
        keep_checkpoints: newest ones that stay.
        save_dtype: of the drafter's files, "bfloat16" or "float32".
        resume: go on from the newest checkpoint in the folder of the run.
        seed: of the order of the data and of random weights.
        eval: of the measurement every `eval_every` steps; its target, device and dtype are those of
            this run.
    """

    method: str = "eagle3"
    target: str = EMBEDDED_NAME
    dtype: str = "auto"
    device: str = "auto"
    data: str = ""
    states: str = ""
    loss: str = "kl"
    unroll: int = 5
    step_decay: float = 0.8
    draft_vocab_size: int = 8192
    learn_prompts: bool = False
    aux_layers: list[int] | None = None
    copied_layers: list[int] = field(default_factory=lambda: [0, -1])
    num_layers: int = 2
    warm_start: bool = True
    init_from: str = ""
    max_seq_len: int = 2048
    batch_tokens: int = 20480
    accumulate: int = 1
    cache_gb: float = 0.0
    optimizer: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: float = 0.03
    final_lr: float = 0.05
    max_grad_norm: float = 1.0
    max_steps: int = 0
    max_tokens: int = 0
    max_seconds: float = 0.0
    max_epochs: int = 1
    chunk_rows: int = 4096
    log_every: int = 20
    save_every: int = 500
    eval_every: int = 0
    keep_checkpoints: int = 2
    save_dtype: str = "bfloat16"
    resume: bool = True
    seed: int = 0
    eval: EvalConfig = field(default_factory=quick_eval)

    def __post_init__(self) -> None:
        """Check the ranges."""
        positive = ("unroll", "num_layers", "max_seq_len", "batch_tokens", "accumulate")
        positive += ("chunk_rows", "log_every", "keep_checkpoints")
        lowest: dict[str, int] = dict.fromkeys(positive, 1)
        budgets = ("max_steps", "max_tokens", "max_seconds", "max_epochs")
        lowest |= dict.fromkeys((*budgets, "save_every", "eval_every", "draft_vocab_size"), 0)
        _check_at_least("fit", self, lowest)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"fit.device={self.device!r} is not allowed; give auto, cpu or cuda, and choose "
                f"among GPUs by CUDA_VISIBLE_DEVICES"
            )
        if self.save_dtype not in ("bfloat16", "float32"):
            raise ConfigError(
                f"fit.save_dtype={self.save_dtype!r} is not allowed; give bfloat16 or float32"
            )
        if not any(getattr(self, name) for name in budgets):
            raise ConfigError(f"fit has no end; give one of {', '.join(budgets)}")
        for name, low, high in (
            ("cache_gb", 0.0, float("inf")),
            ("step_decay", 0.0, 1.0),
            ("warmup", 0.0, 1.0),
            ("final_lr", 0.0, 1.0),
            ("lr", 0.0, float("inf")),
            ("max_grad_norm", 0.0, float("inf")),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"fit.{name}={value} is not allowed; give a number from {low} to {high}"
                )


def shown_config(value: Any) -> Any:
    """Return options as a record has them: it is published, so no folder outside is named."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: shown_config(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shown_config(part) for part in value]
    if isinstance(value, str) and (os.sep in value or value.startswith("~")):
        return shown_path(value)
    return value


def _check_at_least(what: str, config: object, lowest: Mapping[str, int]) -> None:
    """Refuse numbers that are too small."""
    for name, least in lowest.items():
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"{what}.{name}={value} is not allowed; give {least} or more")
