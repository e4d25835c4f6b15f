"""Models of `bench=e2e`: random weights made on the device, heads for them, and the real target.

A model is built once and shared by all engines of a run. Weights are drawn anew from a fixed seed,
never zero: matrix products of zeros take less power, and so less time.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafters.autoregressive import AutoregressiveDrafter
from drafters.draft_sampling import DraftSamplingConfig
from drafters.heads.checkpoint import HeadCheckpoint, save_head
from drafters.heads.modules import HeadSpec, make_head
from experiments.e2e_cases import Case, ModelShape, ShapeSet
from runner.loader import LoadedTarget, load_target
from runner.models.hf import HFModel
from runner.weights import EMBEDDED_NAME, GGUF_SHA256, cache_dir, verify_folder
from specdec.errors import WeightsError
from specdec.protocols import TargetView
from specdec.registry import register_drafter

_STD = 0.02
_ROUNDED_OVER = (
    16  # tokens that the effect of 8-bit weights is seen over: these weights say nothing
)
_SEEDS = {"8b": 1, "8b_fp8": 1, "135m": 2, "draft_model": 3, "head": 4}


@dataclass
class ModelInHandConfig(DraftSamplingConfig):
    """A draft model that is loaded already.

    Args:
        model: an `HFModel` of the target's vocabulary.
    """

    name: str = "model_in_hand"
    model: Any = None


@register_drafter("model_in_hand", ModelInHandConfig)
class ModelInHandDrafter(AutoregressiveDrafter):
    """Drafts with a model that several engines share."""

    config: ModelInHandConfig

    def load(self, target: TargetView) -> None:
        """Take the model."""
        self.use_model(self.config.model, target)


def random_model(shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> HFModel:
    """Build a model with random weights, in its dtype from the first byte on."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(), torch.device(device):
            model: Any = LlamaForCausalLM(shape.config())
    finally:
        torch.set_default_dtype(before)
    fill_randomly(model.parameters(), seed, device)
    return HFModel(model)


@torch.no_grad()
def fill_randomly(tensors: Any, seed: int, device: torch.device) -> None:
    """Draw matrices around 0 and vectors (those of norms) around 1."""
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in tensors:
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, _STD, generator=generator)


def save_random_head(shape: ModelShape, target: HFModel, rows: int, folder: Path) -> str:
    """Save an EAGLE-3 head with random weights; returns its folder.

    Args:
        shape: of the target, and of the head's layer.
        target: gives dtype and device.
        rows: of the output layer.
        folder: where it goes.
    """
    depth = shape.num_layers
    spec = HeadSpec(
        "eagle3",
        dataclasses.replace(shape, num_layers=1).config(),
        rows,
        shape.hidden_size,
        num_aux=3,
        aux_layers=(1, depth // 2 - 1, depth - 4),
        owns_lm_head=True,
    )
    with torch.device("meta"):
        state = make_head(spec).state_dict()
    empty = {
        name: torch.empty(tensor.shape, dtype=target.dtype, device=target.device)
        for name, tensor in state.items()
    }
    fill_randomly(empty.values(), _SEEDS["head"], target.device)
    ids = torch.arange(rows) * (target.vocab_size // rows)
    save_head(str(folder), HeadCheckpoint(spec, empty, ids), "random")
    return str(folder)


@contextmanager
def constant_text(model: HFModel) -> Iterator[None]:
    """Let a model say one token for ever: every logit is 0 while its last norm is.

    So each n-gram look-up finds a match. What is computed stays as it was.
    """
    decoder: Any = model.model.get_decoder()
    norm: Tensor = decoder.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            norm.copy_(kept)


def text_of(drafter: str, model: HFModel) -> AbstractContextManager[None]:
    """Return what makes a model's text one that a drafter finds drafts in."""
    return constant_text(model) if drafter == "ngram" else nullcontext()


class ModelStore:
    """The models of a run, each built when it is first asked for.

    Args:
        shapes: of the run.
        dtype: of all models.
        device: where they live.
        folder: for the files of heads.
    """

    def __init__(
        self, shapes: ShapeSet, dtype: torch.dtype, device: torch.device, folder: Path
    ) -> None:
        self.shapes, self.dtype, self.device, self._folder = shapes, dtype, device, folder
        self._targets: dict[str, LoadedTarget] = {}
        self._heads: dict[str, str] = {}
        self._draft_model: HFModel | None = None

    def target(self, name: str) -> LoadedTarget:
        """Return a target.

        Raises:
            WeightsError: it is the real one, and its weights are not on this machine.
        """
        if name not in self._targets:
            if name.endswith("_real"):
                self._targets[name] = load_target(EMBEDDED_NAME, self.dtype, self.device)
            else:
                shape = self.shapes.models[name]
                model = random_model(shape, _SEEDS[name], self.dtype, self.device)
                if shape.eight_bit:
                    model.quantize(torch.arange(_ROUNDED_OVER) % model.vocab_size)
                self._targets[name] = LoadedTarget(f"random-{name}", model, None)
        return self._targets[name]

    def drafter(self, model: str, name: str) -> Any:
        """Return what an engine takes as the drafter of a target."""
        if name == "eagle3" and not model.endswith("_real"):
            if model not in self._heads:
                shape, rows = self.shapes.models[model], self.shapes.head_rows
                self._heads[model] = save_random_head(
                    shape, self.target(model).model, rows, self._folder / f"head-{model}"
                )
            return {"name": "eagle3", "path": self._heads[model]}
        if name == "draft_model":
            if self._draft_model is None:
                self._draft_model = random_model(
                    self.shapes.draft_model, _SEEDS["draft_model"], self.dtype, self.device
                )
            return ModelInHandConfig(model=self._draft_model)
        return name


def why_not_here(case: Case, tiny: bool) -> str | None:
    """Return why a case cannot run on this machine, None where it can.

    The real weights are not fetched for a bench: they are there, or the case is left out.
    """
    if not case.is_real:
        return None
    if tiny:
        return "tiny shapes have no real weights"
    folder = cache_dir() / f"{EMBEDDED_NAME}-{GGUF_SHA256[:12]}"
    if not folder.is_dir():
        return f"the weights of {EMBEDDED_NAME} are not on this machine"
    try:
        problems = verify_folder(folder)
    except WeightsError as error:
        problems = [str(error)]
    return f"the weights of {EMBEDDED_NAME} are damaged: {problems[0]}" if problems else None
