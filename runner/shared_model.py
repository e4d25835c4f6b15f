"""A small causal model that reads and writes with the target's embedding and output head.

A folder of it has a transformers config with two more keys, and safetensors of its decoder layers
and last norm alone:

    embedding           "target": embedding and output head are the target's
    draft_vocab_size    rows of the output head; fewer than the target's with the tensor

    d2t                 [draft_vocab_size] int64: row i is the target's token i + d2t[i]
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runner.head_files import check_shape, plain_config, read_head, write_head
from runner.models.hf import HFModel
from specdec.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)

_KEY, _VALUE = "embedding", "target"
# Of a config, what says nothing of the layers.
_NO_MODEL_KEYS = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype")


def shares_embedding(name: str) -> bool:
    """Return whether a model's name is a folder that takes the target's embedding."""
    path = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get(_KEY) == _VALUE


def save_shared_model(
    path: str | Path,
    config: Any,
    tensors: dict[str, Tensor],
    target_ids: Tensor | None,
    vocab_size: int,
    max_file_bytes: int | None = None,
) -> None:
    """Save decoder layers and last norm.

    Args:
        path: folder, made where it is missing.
        config: transformers config of the decoder.
        tensors: the decoder's state, without an embedding.
        target_ids: [V_draft] int64, the tokens that the output head has; None = all.
        vocab_size: of the target.
        max_file_bytes: of one file; None writes one.
    """
    stored = dict(tensors)
    num_ids = vocab_size if target_ids is None else len(target_ids)
    if target_ids is not None:
        stored["d2t"] = target_ids.cpu() - torch.arange(num_ids)
    own = {"vocab_size": vocab_size, _KEY: _VALUE, "draft_vocab_size": num_ids}
    write_head(path, {**plain_config(config), **own}, stored, max_file_bytes)


def load_shared_model(path: str, target: HFModel) -> tuple[HFModel, Tensor | None]:
    """Load layers that `save_shared_model` wrote, in the target's dtype, on its device.

    Args:
        path: folder.
        target: whose embedding and output head are taken.

    Returns:
        The model, and [V_draft] int64 the target's id of each of its output head's rows, or None
        where they are the same.

    Raises:
        ConfigError: it was made for another target.
        WeightsError: files or tensors are missing, damaged, unknown or of a wrong shape.
    """
    values, tensors = read_head(path)
    num_ids = values.get("draft_vocab_size")
    for what, own, wanted in (
        ("hidden size", values.get("hidden_size"), target.hidden_size),
        ("vocabulary", values.get("vocab_size"), target.vocab_size),
    ):
        if own != wanted:
            raise ConfigError(
                f"draft model {path!r} takes the embedding of a target of {what} {own}, this one "
                f"has {wanted}; give a model that was trained for this target"
            )
    target_ids = _target_ids(path, tensors.pop("d2t", None), num_ids, target)
    model: Any = _empty_model(path, values)
    decoder = model.get_decoder()
    decoder.embed_tokens = None
    wanted_state = decoder.state_dict()
    for name in sorted(set(wanted_state) ^ set(tensors)):
        what = "lacks the" if name in wanted_state else "holds an unknown"
        raise WeightsError(f"model {path!r} {what} tensor {name!r}; copy it again from its source")
    for name, tensor in tensors.items():
        check_shape(path, name, tensor, tuple(wanted_state[name].shape), "sizes in config.json")
        tensors[name] = tensor.to(target.device, target.dtype)
    decoder.load_state_dict(tensors, assign=True)
    decoder.embed_tokens = target.model.get_input_embeddings()
    model.lm_head = target.head if target_ids is None else target.head_of(target_ids)
    model.config.vocab_size = target.vocab_size
    # Positions' frequencies stay float32.
    adapter = HFModel(model.to(target.device))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    logger.info("loaded %s: %.1f M parameters of its own", path, num_parameters / 1e6)
    return adapter, target_ids


def _empty_model(path: str, values: dict[str, Any]) -> nn.Module:
    """Build the model with weights that mean nothing, and next to no embedding."""
    kind = str(values.get("model_type"))
    kept = {name: value for name, value in values.items() if name not in _NO_MODEL_KEYS}
    kept |= {"vocab_size": 1, "tie_word_embeddings": False}
    kept |= {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **kept))
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(f"model {path!r}: its config cannot be read: {reason}") from error


def _target_ids(path: str, offsets: Tensor | None, num_ids: Any, target: HFModel) -> Tensor | None:
    """Return the target's id of each row of the output head, on its device."""
    if offsets is None and num_ids == target.vocab_size:
        return None
    if offsets is None or len(offsets) != num_ids:
        raise WeightsError(
            f"model {path!r} drafts {num_ids} of {target.vocab_size} tokens and its tensor 'd2t', "
            f"which says which, is missing or of another length; copy it again from its source"
        )
    ids = offsets.long() + torch.arange(len(offsets))
    if bool((ids < 0).any()) or bool((ids >= target.vocab_size).any()):
        raise WeightsError(f"model {path!r}: 'd2t' names tokens that the target does not have")
    return ids.to(target.device)
