"""Names to models and tokenizers: the embedded target, a local folder, or a hub id."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from runner.models.fp8 import SAMPLE_TEXT
from runner.models.hf import PROVEN_FAMILIES, HFModel
from runner.rank_weights import load_part
from runner.tensor_parallel import TensorParallel
from runner.weights import EMBEDDED_NAME, check_weight_files, ensure_embedded_target
from specdec.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)

disable_progress_bar()  # specdec.log owns the terminal's progress


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into the dtype; "auto" is bf16 where the device is fast at it, else fp32.

    Raises:
        ConfigError: the name is unknown.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if _fast_bf16(device) else torch.float32
    if name not in known:
        raise ConfigError(f"dtype={name!r} is not allowed; give auto, {', '.join(known)}")
    return known[name]


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_device(name: str) -> torch.device:
    """Turn a device's name into the device; "auto" takes a GPU where there is one.

    Raises:
        ConfigError: the name is unknown, or a GPU is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise ConfigError(f"device={name!r} is not allowed; give auto, cpu, cuda or cuda:<index>")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} finds no GPU; give cpu")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: there are {torch.cuda.device_count()} GPUs, from 0 on")
    return torch.device(name)


def locate(name: str) -> str:
    """Return what transformers can load for a model's name: a folder, or the hub id as it is.

    Raises:
        WeightsError: the folder holds no usable safetensors.
    """
    if name == EMBEDDED_NAME:
        return str(ensure_embedded_target())
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_weight_files(folder)
        return str(folder)
    if name.startswith((".", "/", "~")):
        raise WeightsError(f"model folder {name!r} does not exist; give a folder or a hub id")
    return name


def read_config(name: str) -> Any:
    """Read the config of a model, and nothing else of it.

    Raises:
        WeightsError: it cannot be found or read.
    """
    source = locate(name)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise WeightsError(_cannot_load("model", name, error)) from error


@dataclass(frozen=True)
class LoadedTarget:
    """A target that several engines may share."""

    name: str
    model: HFModel
    tokenizer: Any | None


def load_target(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel: TensorParallel | None = None,
    weight_dtype: str = "auto",
) -> LoadedTarget:
    """Load a target and its tokenizer; see `load_model`.

    Args:
        name: of the model.
        dtype: to run it in.
        device: to run it on.
        tensor_parallel: ranks that share its layers.
        weight_dtype: "auto" keeps `dtype`, "fp8" rounds the layers' weights to 8 bits, and says
            what that does to the law of the next token over a text.

    Raises:
        WeightsError: they cannot be found or read.
        UnsupportedError: the architecture cannot be run here.
        ConfigError: its layers cannot be divided among the ranks.
    """
    model, tokenizer = load_model(name, dtype, device, tensor_parallel), load_tokenizer(name)
    if weight_dtype == "fp8":
        ids = torch.tensor(tokenizer.encode(SAMPLE_TEXT))
        effect = model.quantize(ids[: model.max_position_embeddings])
        logger.info(
            "8-bit weights: over %d tokens the likeliest one stayed at %.1f %%, KL %.4f nats, "
            "logits moved by %.1f %%",
            effect.num_tokens,
            effect.top1_agreement * 100,
            effect.mean_kl,
            effect.relative_error * 100,
        )
    return LoadedTarget(name, model, tokenizer)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        WeightsError: it cannot be found or read.
    """
    source = locate(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise WeightsError(_cannot_load("tokenizer", name, error)) from error


def load_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel: TensorParallel | None = None,
) -> HFModel:
    """Load a causal language model from safetensors.

    Args:
        name: of the model.
        dtype: to run it in.
        device: to run it on.
        tensor_parallel: ranks that share its layers; each reads its own part of the files.

    Raises:
        WeightsError: it cannot be found or read.
        UnsupportedError: its architecture cannot be run here.
        ConfigError: its layers cannot be divided among the ranks.
    """
    source = locate(name)
    started = time.perf_counter()
    num_bytes = None
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if _is_read_in_part(name, config, tensor_parallel):
            assert tensor_parallel is not None, "a part is one of several"
            model, missing, num_bytes = load_part(source, config, dtype, device, tensor_parallel)
        else:
            model, missing = _load_whole(source, config, dtype)
    except ConfigError:  # a ValueError, too, and says what is wrong by itself
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(_cannot_load("model", name, error)) from error
    if missing:  # transformers would go on with random values
        raise WeightsError(
            f"model {name!r} lacks {len(missing)} of its weights, the first is {missing[0]!r}; "
            f"copy it again from its source"
        )
    adapter = HFModel(model.to(device), tensor_parallel=tensor_parallel)
    logger.info(
        "loaded %s: %.0f M parameters, %s, %s, %.1f s",
        name,
        adapter.num_parameters / 1e6,
        str(dtype).removeprefix("torch."),
        device,
        time.perf_counter() - started,
    )
    if num_bytes is not None and tensor_parallel is not None:
        place = (tensor_parallel.rank, tensor_parallel.size)
        logger.info("rank %d of %d read %.1f MB of it", *place, num_bytes / 1e6)
    return adapter


def _load_whole(source: str, config: Any, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """Return a model, and the names of tensors that its files lack, sorted."""
    # With output_loading_info the result is a pair, which the annotations do not know.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, info = loaded
    return model, sorted(info["missing_keys"])


def _is_read_in_part(name: str, config: Any, tensor_parallel: TensorParallel | None) -> bool:
    """Return whether a rank reads only its part of the files."""
    if tensor_parallel is None or tensor_parallel.size == 1:
        return False
    if config.model_type in PROVEN_FAMILIES and not hasattr(config, "quantization_config"):
        return True
    logger.info("%s is read whole on every rank, for its family is not proven", name)
    return False


def eos_token_ids(model: HFModel, tokenizer: Any | None) -> frozenset[int]:
    """Return the ids that end a text: the generation config's, else the tokenizer's."""
    configured = getattr(model.model.generation_config, "eos_token_id", None)
    if configured is None and tokenizer is not None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])


def check_same_vocabulary(target: Any, draft: Any, name: str) -> None:
    """Check that two tokenizers give the same ids to the same tokens.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    expected, given = target.get_vocab(), draft.get_vocab()
    if expected == given:
        return
    differing = [t for t in expected if given.get(t) != expected[t]] or list(
        given.keys() - expected.keys()
    )
    token = min(differing, key=lambda t: expected.get(t, given.get(t, 0)))
    raise ConfigError(
        f"draft model {name!r} has another tokenizer than the target ({len(given)} and "
        f"{len(expected)} tokens; {token!r} has id {given.get(token)} and {expected.get(token)}); "
        f"give a draft model with the target's tokenizer, or set cross_vocab=True"
    )


def _cannot_load(what: str, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"cannot load {what} {name!r}: {reason}"
