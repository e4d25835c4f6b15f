"""Checkpoints of EAGLE-style heads: three published layouts in, one of them out.

    EAGLE repository    the config of a Llama with one layer; `fc`, and `layers.0` for EAGLE or
                        `midlayer` for EAGLE-3
    SpecForge           as EAGLE-3 there; the config has `eagle_config` or an architecture *Eagle3
    speculators         the config has `speculators_model_type` and `transformer_layer_config`;
                        `fusion_fc` and `transformer` for EAGLE, `fc` and `layers.0` for EAGLE-3

In memory all have the names of `drafters.heads.modules`. Published ids of target layers are of two
kinds: `eagle_aux_hidden_state_layer_ids` at the top of a config counts hidden states *before* a
layer (id i is what layer i - 1 gives, as in vLLM), inside `eagle_config` it counts layers whose
*output* is meant (as SpecForge captures them and SGLang reads them). Where neither is given, they
are the outputs of layers 1, n // 2 - 1 and n - 4 of n.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from drafters.heads.modules import LAYER_FAMILIES, HeadSpec, make_head
from runner.head_files import plain_config, read_head, write_head
from runner.models.hf import refuse_unsound
from specdec.errors import ConfigError, SpecdecError, UnsupportedError, WeightsError

logger = logging.getLogger(__name__)

Layout = Literal["EAGLE", "SpecForge", "speculators"]

_PREFIXES = {
    "midlayer.": "layer.",
    "layers.0.": "layer.",
    "transformer.": "layer.",
    "fusion_fc.": "fc.",
}
_MAPS = ("d2t", "t2d")
# Left from training, and of no use here: the target's own, and what follows from the config.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
# Of a config, what says nothing of the layer.
_NO_LAYER_KEYS = ("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "layer_types")
_REFUSED_FLAGS = ("layernorms",)
_NUM_AUX = 3
SHARED = "target"  # value of `lm_head` in a config: a reduced vocabulary has the target's own rows


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head's weights, under our names, and what they are built into."""

    spec: HeadSpec
    tensors: dict[str, Tensor]
    target_ids: Tensor | None = None  # [V_draft] int64; None: the whole vocabulary of the target
    layout: Layout = "speculators"

    def resolved_aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target layers whose outputs are fused, of a target of so many layers."""
        if self.spec.num_aux == 0 or self.spec.aux_layers is not None:
            return self.spec.aux_layers or ()
        return 1, num_layers // 2 - 1, num_layers - 4


def load_head(path: str, method: str) -> HeadCheckpoint:
    """Load a head in any of the layouts.

    Args:
        path: folder with config.json and *.safetensors.
        method: "eagle" or "eagle3".

    Raises:
        ConfigError: it is another kind of head.
        WeightsError: files or tensors are missing, damaged, unexpected or of a wrong shape.
        UnsupportedError: it is understood, and cannot be run here.
    """
    config, tensors = read_head(path)
    tensors = {_own_name(name): tensor for name, tensor in tensors.items() if not _is_left(name)}
    layout, found = _detect(path, config, tensors)
    if found != method:
        raise ConfigError(f"head {path!r} is an {found} head; use drafter={found}")
    for flag in _REFUSED_FLAGS:
        if config.get(flag):
            raise UnsupportedError(
                f"head {path!r}: {flag}={config[flag]!r} of its config is not supported; give a "
                f"head without it"
            )
    maps = {name: tensors.pop(name) for name in _MAPS if name in tensors}
    try:
        spec = _make_spec(path, found, config, tensors)
        _check_tensors(path, layout, spec, tensors)
    except SpecdecError:
        raise
    except Exception as error:  # of transformers, or of building what the config describes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise WeightsError(
            f"head {path!r}: its config.json does not describe a head ({reason}); copy it again "
            f"from its source"
        ) from error
    target_ids = _target_ids(path, spec, maps)
    if target_ids is not None and not spec.owns_lm_head and config.get("lm_head") != SHARED:
        raise WeightsError(
            f"head {path!r} drafts {spec.draft_vocab_size} of {spec.layer_config.vocab_size} "
            f"tokens and lacks 'lm_head.weight'; add it to its tensors, or say in its config that "
            f'it has the target\'s rows ("lm_head": "{SHARED}")'
        )
    return HeadCheckpoint(spec, tensors, target_ids, layout)


def _own_name(name: str) -> str:
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _is_left(name: str) -> bool:
    return name in _IGNORED or name.endswith(_IGNORED_SUFFIX)


def _detect(
    path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Layout, str]:
    """Return the layout of a checkpoint, and which kind of head it holds.

    Raises:
        WeightsError: it is none of the known ones.
    """
    is_eagle3 = "layer.hidden_norm.weight" in tensors
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in ("eagle", "eagle3"):
            raise ConfigError(f"head {path!r}: speculators_model_type={kind!r} is no EAGLE head")
        return "speculators", kind
    if "fc.weight" not in tensors or not any(name.startswith("layer.") for name in tensors):
        names = ", ".join(sorted(tensors)[:4])
        raise WeightsError(
            f"head {path!r} is in no known layout (EAGLE repository, SpecForge, speculators): "
            f"'fc.weight' and 'midlayer.*' or 'layers.0.*' are looked for, there are {names}, ..."
        )
    own = [str(name) for name in config.get("architectures") or []]
    is_specforge = "eagle_config" in config or any(name.endswith("Eagle3") for name in own)
    return "SpecForge" if is_specforge else "EAGLE", "eagle3" if is_eagle3 else "eagle"


def _make_spec(
    path: str, method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> HeadSpec:
    """Read a config.

    Raises:
        WeightsError, UnsupportedError: as `load_head`.
    """
    is_speculators, is_eagle3 = "speculators_model_type" in config, method == "eagle3"
    values = config.get("transformer_layer_config") if is_speculators else config
    if not isinstance(values, Mapping):
        raise WeightsError(f"head {path!r}: its config lacks transformer_layer_config")
    layer_config = _layer_config(path, values)
    size, vocab_size = layer_config.hidden_size, layer_config.vocab_size
    # A head may read a larger target than it is; an EAGLE one predicts the target's own features.
    target_size = (config.get("target_hidden_size") or size) if is_eagle3 else size
    num_aux = 0
    if is_eagle3:
        # Where it is missing, that is what will be said.
        fused = tensors.get("fc.weight")
        num_aux = _NUM_AUX if fused is None else max(fused.shape[-1] // target_size, 1)
    if is_eagle3 and is_speculators and "norm_before_residual" not in config:
        raise WeightsError(
            f"head {path!r}: its config lacks norm_before_residual, which readers of this layout "
            f"take for true or for false; write what the head was trained with"
        )
    draft_vocab_size = (config.get("draft_vocab_size") if is_eagle3 else None) or vocab_size
    return HeadSpec(
        method="eagle3" if is_eagle3 else "eagle",
        layer_config=layer_config,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_size,
        num_aux=num_aux,
        aux_layers=_aux_layers(path, config, num_aux) if is_eagle3 else None,
        fc_bias="fc.bias" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
        owns_embedding="embed_tokens.weight" in tensors,
        owns_lm_head="lm_head.weight" in tensors,
    )


def _layer_config(path: str, values: Mapping[str, Any]) -> Any:
    """Build the transformers config of the decoder layer."""
    kind = values.get("model_type") or "llama"
    if kind not in LAYER_FAMILIES:
        raise UnsupportedError(
            f"head {path!r} has a layer of model type {kind!r}; supported: "
            f"{', '.join(LAYER_FAMILIES)}"
        )
    num_layers = values.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise UnsupportedError(f"head {path!r} has {num_layers} layers; heads of one are supported")
    kept = {name: value for name, value in values.items() if name not in _NO_LAYER_KEYS}
    config = AutoConfig.for_model(kind, **kept)
    refuse_unsound(config)
    return config


def _aux_layers(path: str, config: Mapping[str, Any], num_aux: int) -> tuple[int, ...] | None:
    """Return the target layers whose outputs are fused; None for the usual ones."""
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = (config.get("eagle_config") or {}).get(name)
    layers = outputs or [before - 1 for before in config.get(name) or []]
    if len(layers or [0] * _NUM_AUX) != num_aux:
        raise WeightsError(
            f"head {path!r}: 'fc.weight' fuses {num_aux} hidden states, its config names "
            f"{len(layers) or _NUM_AUX} layers; give a head whose {name} is complete"
        )
    return tuple(layers) or None


def _check_tensors(
    path: str, layout: Layout, spec: HeadSpec, tensors: Mapping[str, Tensor]
) -> None:
    """Check names and shapes.

    Raises:
        WeightsError: names what is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in make_head(spec).state_dict().items()}
    who = f"head {path!r} ({layout} layout of {spec.method})"
    missing, unexpected = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
    if missing or unexpected:
        raise WeightsError(
            f"{who}: missing tensors {missing or 'none'}, unexpected {unexpected or 'none'} (the "
            f"decoder layer is called 'layer' here); give a complete head of one decoder layer"
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(
                f"{who}: tensor {name!r} has shape {list(tensors[name].shape)}, its config "
                f"asks for {list(shape)}"
            )


def _target_ids(path: str, spec: HeadSpec, maps: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target's id of each id of the head, [V_draft] int64.

    Raises:
        WeightsError: the maps are missing, or do not fit one another.
    """
    vocab_size, num_ids = spec.layer_config.vocab_size, spec.draft_vocab_size
    offsets = maps.get("d2t")
    if offsets is None:
        if num_ids != vocab_size:
            raise WeightsError(
                f"head {path!r} drafts {num_ids} of {vocab_size} tokens and lacks 'd2t', which "
                f"says which; add it to its tensors"
            )
        return None
    # What is stored is an offset: id i of the head is id i + d2t[i] of the target.
    ids = torch.arange(len(offsets)) + offsets.long()
    in_range = bool(((ids >= 0) & (ids < vocab_size)).all())
    if len(ids) != num_ids or not in_range or len(ids.unique()) != num_ids:
        raise WeightsError(
            f"head {path!r}: 'd2t' must send {num_ids} ids to as many different ones of "
            f"{vocab_size}, as offsets; copy it again from its source"
        )
    known = maps.get("t2d")
    if known is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if not torch.equal(known.bool(), expected):
            raise WeightsError(f"head {path!r}: 't2d' and 'd2t' name different tokens")
    return None if num_ids == vocab_size and not offsets.any() else ids


def save_head(
    folder: str,
    checkpoint: HeadCheckpoint,
    target: str,
    num_speculative_tokens: int = 5,
    lm_head: Tensor | None = None,
    embedding: Tensor | None = None,
    shares_lm_head: bool = False,
) -> None:
    """Write a head in the layout that vLLM and speculators load.

    That is the layout of speculators for EAGLE-3, and that of the EAGLE repository for EAGLE, which
    speculators does not have any more.

    Args:
        folder: made where it is missing.
        checkpoint: the head.
        target: name of the target, for readers that load it themselves.
        num_speculative_tokens: drafts a step that readers propose by default.
        lm_head: [V_draft, hidden], the target's output head, or its rows, where an EAGLE-3 head
            has none of its own.
        embedding: [V, hidden], the target's, where the head has none of its own. vLLM does without;
            speculators goes on with memory that was never written, so give it to train the head on.
        shares_lm_head: write no output head where it is the target's; only this project's readers
            load such a folder.

    Raises:
        ConfigError: there is no output head to write: a reader would go on with random values.
    """
    spec, tensors = checkpoint.spec, dict(checkpoint.tensors)
    layer = plain_config(spec.layer_config)
    # Readers of older transformers know these names alone.
    rope = dict(spec.layer_config.rope_parameters)
    layer["rope_theta"] = rope.get("rope_theta")
    layer["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if spec.method == "eagle":
        config = {**layer, "architectures": ["LlamaForCausalLM"], "bias": spec.fc_bias}
    else:
        config = _speculators_config(spec, layer, target, num_speculative_tokens)
        _add_maps(checkpoint, tensors)
        if not spec.owns_lm_head and shares_lm_head:
            config["lm_head"] = SHARED
        elif not spec.owns_lm_head:
            if lm_head is None:
                raise ConfigError("this head shares the target's output head; give it as lm_head")
            tensors["lm_head.weight"] = lm_head
    if embedding is not None and not spec.owns_embedding:
        tensors["embed_tokens.weight"] = embedding
    renamed = {name.replace("layer.", "layers.0.", 1): t for name, t in tensors.items()}
    write_head(folder, config, renamed)


def _speculators_config(
    spec: HeadSpec, layer: dict[str, Any], target: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head in the layout of speculators."""
    layers = spec.aux_layers
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "eagle_aux_hidden_state_layer_ids": layers and [output + 1 for output in layers],
    }


def _add_maps(checkpoint: HeadCheckpoint, tensors: dict[str, Tensor]) -> None:
    """Add both maps of a reduced vocabulary."""
    ids = checkpoint.target_ids
    if ids is not None:
        known = torch.zeros(checkpoint.spec.layer_config.vocab_size, dtype=torch.bool)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = known.index_fill_(0, ids, True)
