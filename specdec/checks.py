"""What an engine refuses before anything runs."""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.config import EngineConfig
from specdec.errors import ConfigError, UnsupportedError
from specdec.protocols import Drafter, Verifier
from specdec.types import SamplingParams


def check_pairing(drafter: Drafter, verifier: Verifier, num_speculative_tokens: int) -> None:
    """Check that the verifier can judge the drafter's drafts, so many a step.

    Raises:
        ConfigError: it cannot.
    """
    kinds = {1, 2} if drafter.capabilities.offers_q else {1}
    if not kinds <= verifier.draft_kinds:
        raise ConfigError(
            f"verifier {verifier.name!r} judges draft kinds "
            f"{sorted(verifier.draft_kinds)}, the drafter gives {sorted(kinds)}; "
            f"choose another verifier or drafter"
        )
    check = getattr(verifier, "check", None)
    if check is not None and num_speculative_tokens > 0:
        check(num_speculative_tokens)


def check_host_drafter(drafter: Drafter, config: EngineConfig) -> None:
    """Check a drafter that runs on the host, if it is one: it needs each step's outcome.

    Raises:
        ConfigError: it lacks a method, or more than one step in flight is asked for.
    """
    if not drafter.capabilities.on_cpu:
        return
    name = type(drafter).__name__
    for method in ("propose_on_host", "end_request"):
        if not callable(getattr(drafter, method, None)):
            raise ConfigError(
                f"drafter {name} says on_cpu and has no method {method}; add it, or leave "
                f"on_cpu out"
            )
    if (config.max_steps_in_flight or 1) > 1:
        raise ConfigError(
            f"max_steps_in_flight={config.max_steps_in_flight} does not go with drafter {name}, "
            f"which runs on the host and needs each step's outcome; give 1, or null"
        )


def check_placement(
    model: Any, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Check a model that the caller may have loaded: where it is, it stays.

    Raises:
        ConfigError: device or dtype are given and are not its own, or 8-bit weights are asked for
            and it has none.
    """
    if config.weight_dtype == "fp8" and model.weight_effect is None:
        raise ConfigError(
            "weight_dtype='fp8' is for a target that is loaded by name, and the given one has "
            "other weights; give the name, or call quantize() of its model"
        )
    for name, given, own in (
        ("device", _indexed(device), _indexed(model.device)),
        ("dtype", dtype, model.dtype),
    ):
        if getattr(config, name) != "auto" and given != own:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not that of the loaded target ({own}); "
                f"leave it out, or load the target with it"
            )


def _indexed(device: torch.device) -> torch.device:
    """Return a device with its index, 0 where it has none."""
    return torch.device(device.type, device.index or 0)


def check_wants(drafter: Drafter, token_table: str, num_layers: int) -> None:
    """Refuse a drafter that asks for what is not offered.

    Args:
        drafter: loaded.
        token_table: where the token ids lie.
        num_layers: layers of the target whose output can be read.

    Raises:
        UnsupportedError, ConfigError: one sentence.
    """
    wants, name = drafter.capabilities, type(drafter).__name__
    missing = [layer for layer in wants.aux_layers if not 0 <= layer < num_layers]
    if missing:
        raise ConfigError(
            f"drafter {name} asks for the output of target layer {missing[0]}; the target has "
            f"{num_layers} layers, 0 to {num_layers - 1}: give aux_layers among them"
        )
    if token_table == "pinned" and wants.reads_token_table:
        raise ConfigError(
            f"token_table='pinned' does not go with drafter {name}, which reads token ids by "
            f"torch operations; give token_table='device'"
        )


def check_lengths_of(
    drafter: Drafter, choices: Sequence[int], confidence_threshold: float | None
) -> None:
    """Refuse a draft length that the drafter cannot follow, once it is loaded.

    Raises:
        ConfigError: one sentence.
    """
    wants, name = drafter.capabilities, type(drafter).__name__
    if confidence_threshold is not None and not wants.offers_confidence:
        raise ConfigError(
            f"draft_length confidence does not go with drafter {name}, which does not tell how "
            f"probable its drafts are; use draft_length fixed, by_batch_size or goodput, or a "
            f"drafter such as draft_model"
        )
    if wants.kv is not None and not wants.splits_first_pass and 0 in choices and len(choices) > 1:
        raise ConfigError(
            f"draft_length may choose 0 drafts, which leaves the KV cache of drafter {name} "
            f"behind, as its first pass is part of its proposing; leave 0 out of the choices"
        )


# Parameters that forbid tokens: a rule that keeps drafts without looking at them breaks them.
MASKING = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")


def check_params(
    params: Any, verifier: Verifier, num_speculative_tokens: int, has_tokenizer: bool
) -> SamplingParams:
    """Check a request's parameters against the engine that is to run it.

    Raises:
        ConfigError: no parameters, or parameters that the verifier or the engine's K refuse.
        UnsupportedError: stop strings without a tokenizer.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params={params!r} is not allowed; give SamplingParams")
    if verifier.greedy_only and params.temperature > 0:
        raise ConfigError(
            f"verifier {verifier.name!r} takes temperature 0 only, got "
            f"{params.temperature}; use sampled_match or rejection"
        )
    for name in () if getattr(verifier, "honours_masks", True) else MASKING:
        if getattr(params, name) not in (None, 0, []):
            raise ConfigError(
                f"verifier {verifier.name!r} keeps drafts unjudged, so {name} cannot hold; leave "
                f"{name} out, or use another verifier"
            )
    budget = params.num_speculative_tokens
    if budget is not None and budget > num_speculative_tokens > 0:
        raise ConfigError(
            f"num_speculative_tokens={budget} of the request exceeds the engine's "
            f"{num_speculative_tokens}; give at most that"
        )
    if params.stop_strings and not has_tokenizer:
        raise UnsupportedError(
            "stop strings need a tokenizer, which this target has not; give stop_token_ids"
        )
    return params
