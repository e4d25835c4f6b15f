"""Folders of draft heads: a config.json beside safetensors, checked; never a pickle."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.weights import check_weight_files
from specdec.errors import WeightsError

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w.-]+")


def read_head(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a head's config and tensors, on the CPU.

    Args:
        path: folder, or hub id.

    Raises:
        WeightsError: there is no such folder or hub id, or its files are missing, damaged or a
            pickle.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _from_hub(path)
    check_weight_files(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{folder / 'config.json'} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{folder / 'config.json'} holds no mapping")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return config, tensors


def _from_hub(name: str) -> Path:
    """Fetch a head's config and safetensors, once; a pickle beside them is left where it is.

    Raises:
        WeightsError: it cannot be a hub id, or the hub does not give it.
    """
    if not _HUB_ID.fullmatch(name):
        raise WeightsError(
            f"head folder {name!r} does not exist; give a folder with config.json and "
            f"*.safetensors, or a hub id"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # of the network, the hub, or its licences: the reason is shown
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(
            f"head {name!r} is no folder here, and the hub does not give it ({reason}); give a "
            f"folder with config.json and *.safetensors, or a hub id that you may read"
        ) from error


def plain_config(config: Any) -> dict[str, Any]:
    """Return a transformers config's options, without the folder that it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def write_head(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    max_file_bytes: int | None = None,
) -> None:
    """Write a head's folder, which is made where it is missing.

    Args:
        path: folder.
        config: what config.json is to hold.
        tensors: by name.
        max_file_bytes: tensors are spread over files of at most so many bytes of them; None writes
            one file. A tensor that is larger alone has a file of its own.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors refuses views of shared memory, and a head may show one tensor twice.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    for old in folder.glob("model*.safetensors"):  # of an earlier save, perhaps in more files
        old.unlink()
    files = _spread(own, max_file_bytes)
    for i, part in enumerate(files, 1):
        name = "model" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}"
        file = folder / f"{name}.safetensors"
        save_file(part, file)
        file.chmod(0o644)  # the writer makes it private
    text = json.dumps(dict(config), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _spread(tensors: dict[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """Divide tensors, in their order, into parts of at most so many bytes."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_bytes is not None and parts[-1] and size + tensor.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def check_shape(path: str, name: str, tensor: Tensor, wanted: tuple[int, ...], why: str) -> None:
    """Refuse a tensor of another shape than it must have.

    Args:
        path: folder of the head.
        name: of the tensor.
        tensor: as it was read.
        wanted: its shape.
        why: what the wanted shape follows from.

    Raises:
        WeightsError: names both shapes.
    """
    if tuple(tensor.shape) != wanted:
        raise WeightsError(
            f"head {path!r}: tensor {name!r} has shape {list(tensor.shape)}, needed is "
            f"{list(wanted)} ({why}); give a head that was trained for this target"
        )
