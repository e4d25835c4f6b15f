"""Stage `fit`: train a drafter of a frozen target, whose states are computed as they are needed.

    python -m experiments.training.fit --config fit.json --out folder
    torchrun --nproc-per-node 2 -m experiments.training.fit --config fit.json --out folder

Leaves in the folder: `drafter/`, what the drafter loads; `curve.jsonl`, a line for every few steps;
`checkpoints/`, from which the same command goes on; `fit.json`, the record. Devices, bf16, several
processes and the accumulation of gradients are accelerate's, so `accelerate launch` with a
configuration of FSDP works, too. Needs torch, transformers, safetensors, numpy and accelerate.
"""

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from experiments.provenance import collect_provenance
from experiments.training.checkpoints import (
    Progress,
    full_state,
    newest_checkpoint,
    read_progress,
    read_weights,
    restore,
    save_checkpoint,
)
from experiments.training.config import EvalConfig, FitConfig, shown_config
from experiments.training.curve import Curve, Figures, rate_at
from experiments.training.dataset import TokenDataset
from experiments.training.eval import accepted_line, measure, read_prompts
from experiments.training.frozen_target import (
    PaddedBatch,
    TargetStates,
    load_frozen,
    loss_targets,
    pad_batch,
)
from experiments.training.losses import LossSpec, OutputHead, PassFigures, fused_loss
from experiments.training.optimizers import make_optimizers
from experiments.training.recorded import RecordedTexts
from experiments.training.stage import StageRun, stage_main
from experiments.training.states_cache import StatesCache
from experiments.training.trainee import Trainee, method_class
from experiments.training.vocabulary import choose_vocabulary
from runner.loader import eos_token_ids, resolve_device, resolve_dtype
from runner.weights import TRAINED_FOLDER
from specdec.errors import ConfigError, WeightsError
from specdec.log import progress as progress_bar

logger = logging.getLogger(__name__)


class Trainer:
    """A run of training.

    Args:
        config: of the run.
        run: its folder, and whom it tells.
    """

    def __init__(self, config: FitConfig, run: StageRun) -> None:
        self.config, self.run = config, run
        if config.device == "cuda":
            resolve_device("cuda")  # says so where there is none
        on_cpu = config.device == "cpu" or not torch.cuda.is_available()
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="no" if on_cpu else "bf16",
            gradient_accumulation_steps=config.accumulate,
        )
        self.device = self.accelerator.device
        max_len = min(config.max_seq_len, config.batch_tokens)
        self.recorded = RecordedTexts(config.states, max_len) if config.states else None
        self.dataset = self.recorded or TokenDataset(config.data, "train", max_len)
        where = "cpu" if on_cpu else str(self.device)
        self.target = load_frozen(config.target, config.dtype, where)
        self.checkpoints = run.folder / "checkpoints"
        found = newest_checkpoint(self.checkpoints) if config.resume else None
        self.target_ids, self.coverage = self._vocabulary(found)
        self.trainee = self._build_trainee(found)
        self.head = OutputHead(self.target.head_weight, self.target_ids)
        weights = [config.step_decay**j for j in range(len(self.trainee.offsets))]
        self.spec = LossSpec(config.loss, self.trainee.offsets, weights, config.chunk_rows)
        optimizers = make_optimizers(config, self.trainee)
        self.model: Any
        self.model, *self.optimizers = self.accelerator.prepare(self.trainee, *optimizers)
        self.cache = self._make_cache() if config.cache_gb else None
        self.progress = Progress()
        self._num_batches = 0  # of the epoch, for each process
        self.curve = Curve(run, self.accelerator.is_main_process)
        if found is not None:
            self.progress = read_progress(found)
            restore(found, self.model, self._plain_optimizers)
            logger.info("going on from %s", found.name)
        self.curve.begin(self.progress.step, self.progress.num_tokens, self.progress.seconds)
        num_parameters = sum(parameter.numel() for parameter in self.trainee.parameters())
        logger.info(
            "%s: %.2f M parameters; %d sequences of %.2f M tokens",
            config.method,
            num_parameters / 1e6,
            len(self.dataset),
            self.dataset.num_tokens / 1e6,
        )

    def fit(self) -> dict[str, Any]:
        """Train to the end of the budget, and save."""
        self._started = time.perf_counter() - self.progress.seconds
        last: dict[str, Any] = {}
        figures = Figures()
        with progress_bar("fit", self.config.max_steps or 0) as bar:
            while not self._is_over():
                for members in self._epoch():
                    figures.add(*self._learn(members))
                    if not self.accelerator.sync_gradients:
                        continue
                    self.progress.step += 1
                    self.progress.seconds = self._seconds()
                    last = self._after_step(figures) or last
                    bar.advance(f"loss {last.get('loss', math.nan):.3f}")
                    if self._is_over():
                        break
                else:
                    self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        if figures.num_batches:
            last = self._log(figures) or last
        self._save_checkpoint()
        self._save_drafter(self.run.folder / TRAINED_FOLDER)
        if self.accelerator.is_main_process:
            self._tell_how_to_use()
        return self._record(last)

    def _tell_how_to_use(self) -> None:
        """Log what selects the drafter in a run."""
        spec = self.trainee.drafter(self.run.folder / TRAINED_FOLDER)
        name = spec.pop("name")
        options = [f"drafter={name}", *(f"drafter.{key}={value}" for key, value in spec.items())]
        logger.info("use it: python -m experiments.run %s", shlex.join(options))

    def _epoch(self) -> Iterator[np.ndarray]:
        """Give the batches of the epoch that are left, as indices, counting them."""
        config, rank, ranks = self.config, *self._place
        plan = self.dataset.plan(config.batch_tokens, config.seed, self.progress.epoch, padded=True)
        self._num_batches = len(plan) // ranks
        if not self._num_batches:
            raise ConfigError(
                f"fit.batch_tokens={config.batch_tokens} leaves {len(plan)} batches for {ranks} "
                f"processes; give less"
            )
        for index in range(self.progress.batch, self._num_batches):
            # Counted for all processes, so that they end together.
            members = np.concatenate(plan[index * ranks : (index + 1) * ranks])
            self.progress.batch = index + 1
            self.progress.num_tokens += int(self.dataset.lengths[members].sum())
            yield plan[index * ranks + rank]

    @property
    def _place(self) -> tuple[int, int]:
        """Return which process this is, and how many there are."""
        return self.accelerator.process_index, self.accelerator.num_processes

    def _learn(self, members: np.ndarray) -> tuple[Tensor, PassFigures]:
        """Learn from one batch; returns its loss and what is known of each pass, on the device."""
        config, accelerator = self.config, self.accelerator
        batch = self.dataset.batch(members)
        padded = pad_batch(batch, config.learn_prompts).to(self.device)
        states = self._states(members, padded)
        self._rate = config.lr * rate_at(self._share_done(), config.warmup, config.final_lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate
        with accelerator.accumulate(self.model):
            hidden = self.model(padded, states)
            loss, figures = fused_loss(hidden, self.head, loss_targets(padded, states), self.spec)
            accelerator.backward(loss)
            if accelerator.sync_gradients and config.max_grad_norm:
                accelerator.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return loss.detach(), figures

    def _states(self, members: np.ndarray, batch: PaddedBatch) -> TargetStates:
        """Return what the target says of a batch: recorded, kept, or computed."""
        layers = self.trainee.aux_layers
        if self.recorded is not None:
            return self.recorded.states(members, batch, layers)
        if self.cache is not None:
            return self.cache.states(members, batch)
        return self.target.states(batch, layers)

    def _make_cache(self) -> StatesCache:
        """Return a cache for the whole dataset."""
        if not isinstance(self.dataset, TokenDataset):
            raise ConfigError("fit.cache_gb is not for recorded states; give fit.data, or 0")
        return StatesCache(self.target, self.dataset, self.trainee.aux_layers, self.config.cache_gb)

    def _after_step(self, figures: Figures) -> dict[str, Any] | None:
        """Log, evaluate and save where it is time to; returns what was logged."""
        config, step = self.config, self.progress.step
        line = self._log(figures) if step % config.log_every == 0 else None
        if config.eval_every and step % config.eval_every == 0:
            self._evaluate()
        if config.save_every and step % config.save_every == 0:
            self._save_checkpoint()
        return line

    # --- budgets --------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Return seconds at work, alike in all processes where they end the run."""
        seconds = time.perf_counter() - self._started
        if self.config.max_seconds and self.accelerator.num_processes > 1:
            shared = torch.tensor(seconds, dtype=torch.float64, device=self.device)
            seconds = float(broadcast(shared))  # pyright: ignore[reportArgumentType]
        return seconds

    def _share_done(self) -> float:
        """Return how much of the run is done: the budget that is nearest to its end."""
        config, done = self.config, self.progress
        epochs = done.epoch + done.batch / max(self._num_batches, 1)
        pairs = (
            (done.step, config.max_steps),
            (done.num_tokens, config.max_tokens),
            (done.seconds, config.max_seconds),
            (epochs, config.max_epochs),
        )
        return min(max(value / limit for value, limit in pairs if limit), 1.0)

    def _is_over(self) -> bool:
        config, done = self.config, self.progress
        return any(
            limit and value >= limit
            for value, limit in (
                (done.step, config.max_steps),
                (done.num_tokens, config.max_tokens),
                (done.seconds, config.max_seconds),
                (done.epoch, config.max_epochs),
            )
        )

    # --- what is trained ------------------------------------------------------------------------

    def _vocabulary(self, found: Path | None) -> tuple[Tensor | None, float]:
        """Return the draft vocabulary of the run, and the part of the answers that it covers."""
        config = self.config
        source = found or (Path(config.init_from) if config.init_from else None)
        if source is not None:
            ids = read_weights(source)[1]
        elif method_class(config.method).reduces_vocabulary and config.draft_vocab_size:
            model = self.target.model
            ends = eos_token_ids(model, self.target.loaded.tokenizer)
            size = config.draft_vocab_size
            ids = choose_vocabulary(self.dataset, size, model.vocab_size, ends)[0]
        else:
            ids = None
        if ids is None:
            return None, 1.0
        counts = torch.from_numpy(self.dataset.token_counts(self.target.model.vocab_size)).double()
        return ids.to(self.device), float(counts[ids].sum() / counts.sum())

    def _build_trainee(self, found: Path | None) -> Trainee:
        """Build what is trained, in float32 on the device."""
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            trainee = method_class(config.method)(config, self.target, self.target_ids)
        for parameter in trainee.parameters():
            parameter.data = parameter.data.float()
        if found is None and config.init_from:
            weights, _ = read_weights(Path(config.init_from))
            try:
                trainee.load_state_dict(weights)
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
                raise WeightsError(
                    f"fit.init_from={config.init_from!r} is one of another drafter: {reason}"
                ) from error
        return trainee.to(self.device)

    @property
    def _plain_optimizers(self) -> list[torch.optim.Optimizer]:
        return [getattr(own, "optimizer", own) for own in self.optimizers]

    # --- what is left ---------------------------------------------------------------------------

    def _log(self, figures: Figures) -> dict[str, Any]:
        """Write a line of the curve; returns it."""
        means: Any = self.accelerator.reduce(figures.take(), reduction="mean")
        (loss, *_), accepted, agreed = means.tolist()
        done = self.progress
        line = {
            "step": done.step,
            "epoch": done.epoch,
            "num_tokens": done.num_tokens,
            "seconds": round(self._seconds(), 3),
            "lr": self._rate,
            "loss": loss,
            "accepted": [round(value, 5) for value in accepted],
            "agreed": [round(value, 5) for value in agreed],
        }
        return self.curve.add(line)

    def _evaluate(self) -> None:
        """Measure the accepted length through the engine, on the main process."""
        config = self.config
        folder = self.run.folder / "drafter_now"
        self._save_drafter(folder)
        if self.accelerator.is_main_process:
            started = time.perf_counter()
            values = {**vars(config.eval), "data": config.eval.data or config.data}
            own, loaded = EvalConfig(**values), self.target.loaded
            prompts = read_prompts(own, loaded)
            self.trainee.eval()
            lengths: dict[str, float] = {}
            for k in own.num_speculative_tokens:
                found = measure(loaded, self.trainee.drafter(folder), prompts, own, k)
                for temperature, stats in found.items():
                    length = accepted_line(stats)["accepted_length"]
                    lengths[f"length_k{k}_t{temperature:g}"] = length
            self.trainee.train()
            self.curve.add_lengths(self.progress.step, lengths)
            self._started += time.perf_counter() - started  # no time of the budget
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self) -> None:
        states = full_state(self.model, self._plain_optimizers)
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.checkpoints,
                states,
                self.progress,
                self.target_ids,
                self.config.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()

    def _save_drafter(self, folder: Path) -> None:
        """Write what the drafter loads."""
        state, _ = full_state(self.model, self._plain_optimizers)
        if self.accelerator.is_main_process:
            dtype = resolve_dtype(self.config.save_dtype, torch.device("cpu"))
            state = {name: tensor.to(dtype) for name, tensor in state.items()}
            self.trainee.save(folder, state, self.config.target)
        self.accelerator.wait_for_everyone()

    def _record(self, last: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the record of the run."""
        config = self.config
        provenance = collect_provenance(
            self.run.command, config.seed, self.device, self.target.model.dtype
        )
        provenance["duration_s"] = round(self.progress.seconds, 1)
        folder = self.run.folder / TRAINED_FOLDER
        figures = {
            "loss": last.get("loss"),
            "accepted": last.get("accepted"),
            "agreed": last.get("agreed"),
            "num_steps": self.progress.step,
            "num_tokens": self.progress.num_tokens,
            "seconds": round(self.progress.seconds, 1),
            "vocabulary_coverage": self.coverage,
            "drafter_bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
        }
        if self.accelerator.is_main_process:
            record = {"provenance": provenance, "config": shown_config(config), "figures": figures}
            text = json.dumps(record, indent=2) + "\n"
            (self.run.folder / "fit.json").write_text(text, encoding="utf-8")
        return figures


def run_fit(config: FitConfig, run: StageRun) -> dict[str, Any]:
    """Train; what was stopped goes on.

    Raises:
        ConfigError, WeightsError: the options, the data or the target cannot be used.
    """
    if not config.data and not config.states:
        raise ConfigError("fit needs data=<dataset folder of the stage data>, got none")
    return Trainer(config, run).fit()


if __name__ == "__main__":
    sys.exit(stage_main("fit", FitConfig, run_fit))
