"""Reads from a model's files what one rank of several has of it, and nothing else.

The model is built without memory, cut down to the rank's part, and filled tensor by tensor: of the
layers that are shared, only the rank's rows or columns leave the file.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as _INDEX_NAME
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from runner.models.sharding import Split, fill_linear, split_model
from runner.tensor_parallel import TensorParallel


def find_files(source: str) -> list[str]:
    """Return the safetensors of a model, where transformers finds them.

    Args:
        source: folder or hub id.

    Raises:
        OSError: there are none.
    """
    index = cached_file(source, _INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return [str(cached_file(source, SAFE_WEIGHTS_NAME))]
    files: Any = get_checkpoint_shard_files(source, index)[0]
    return list(files)


class PartReader:
    """Tensors of a model's files, whole or in part.

    Args:
        files: safetensors, open until `close`.
        device: that what is read goes to.
        dtype: that it is turned into.
    """

    def __init__(self, files: list[str], device: torch.device, dtype: torch.dtype) -> None:
        self.num_bytes = 0  # read so far
        self._place = {"device": device, "dtype": dtype}
        self._slices: dict[str, Any] = {}
        self._files = ExitStack()
        for path in files:
            file: Any = self._files.enter_context(safe_open(path, framework="pt"))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def read(self, name: str, shape: torch.Size, take: Callable[[Any], Tensor]) -> Tensor:
        """Read a part of a tensor.

        Args:
            name: of the tensor, which is there.
            shape: that it has to have.
            take: the part of a slice.

        Raises:
            ValueError: it has another shape.
        """
        found = self._slices[name].get_shape()
        if found != list(shape):
            raise ValueError(
                f"tensor {name!r} has shape {found}, by the model's config it has {list(shape)}"
            )
        part = take(self._slices[name])
        self.num_bytes += part.nbytes
        # A copy of its own: a view would keep all that the file maps.
        return part.to(**self._place, copy=True, memory_format=torch.contiguous_format)


def load_part(
    source: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel: TensorParallel,
) -> tuple[Any, list[str], int]:
    """Load a rank's part of a model that `plan_splits` can divide.

    Args:
        source: folder or hub id.
        config: of transformers.
        dtype: of the weights.
        device: where they go.
        tensor_parallel: the ranks.

    Returns:
        The model, cut down; the names of tensors that the files lack, sorted, in which case it is
        not filled; and the bytes read.

    Raises:
        OSError, ValueError: the files cannot be found or read.
        UnsupportedError, ConfigError: the model cannot be divided.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}
    splits = split_model(model, tensor_parallel).splits
    try:
        reader = PartReader(find_files(source), device, dtype)
        try:
            missing = _fill(model, splits, shapes, reader)
        finally:
            reader.close()
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if not missing:
        _finish(model, source, device)
    return model, missing, reader.num_bytes


def _fill(
    model: Any, splits: dict[str, Split], shapes: dict[str, torch.Size], reader: PartReader
) -> list[str]:
    """Fill all parameters; returns the names of those that are in no file, and then fills none."""
    tied: dict[str, str] = model.all_tied_weights_keys  # the output head's to the embedding's
    aliases = tied | {source: name for name, source in tied.items()}
    missing = sorted(
        name for name in shapes if name not in reader and aliases.get(name, name) not in reader
    )
    if missing:
        return missing
    split_names = {f"{name}.{kind}" for name in splits for kind in ("weight", "bias")}
    for name in sorted(shapes.keys() - split_names):
        stored = name if name in reader else aliases[name]
        owner, _, field = name.rpartition(".")
        whole = reader.read(stored, shapes[name], lambda part: part[:])
        setattr(model.get_submodule(owner), field, nn.Parameter(whole, requires_grad=False))
    table = model.get_input_embeddings().weight.detach()
    for name, split in splits.items():
        bias, bias_name = None, f"{name}.bias"
        if bias_name in shapes and split.keeps_bias:
            bias = reader.read(bias_name, shapes[bias_name], split.take_bias)
        weight_name = f"{name}.weight"
        fill_linear(split.linear, _weight(weight_name, split, shapes, reader, tied, table), bias)
    return []


def _weight(
    name: str,
    split: Split,
    shapes: dict[str, torch.Size],
    reader: PartReader,
    tied: dict[str, str],
    table: Tensor,
) -> Tensor:
    """Return the rank's part of a weight; a tied head's is a view of the embedding `table`."""
    own = split.take_weight(table) if name in tied else None
    if own is not None and (name not in reader or tied[name] not in reader):
        return own
    stored = reader.read(name, shapes[name], split.take_weight)
    # Where files hold both, they say whether both are one.
    return own if own is not None and torch.equal(own, stored) else stored


def _finish(model: Any, source: str, device: torch.device) -> None:
    """Set up what is in no file of weights: turns of positions, and how texts end."""
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    with suppress(OSError):  # a model without one has what follows from its config
        model.generation_config = GenerationConfig.from_pretrained(source)
