"""How linear layers are launched: files that pin it, and the rule for shapes that none holds."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.linear_candidates import candidates, with_prefetch
from experiments.provenance import hash_linear_choices
from experiments.tune_linears import (
    SHIPPED_MODELS,
    merge_records,
    model_shape,
    read_earlier,
    wanted_limits,
    wanted_models,
)
from runner.models import layers, linear_choices
from runner.models.layers import StreamedLinear
from runner.models.linear_choices import (
    SHIPPED,
    TOKEN_LIMITS,
    choices_digest,
    choose_linear,
    file_name,
    load_choices,
    read_choices,
    replace_choice,
    rule,
    token_limit,
)
from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.weights import cache_dir
from specdec.errors import ConfigError
from tests.models import tiny_model

H200, BF16 = "NVIDIA H200", torch.bfloat16
SHARED_BYTES = 227 * 2**10  # that a program may have on Hopper


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test a cache folder of its own, and forget what was read."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    load_choices.cache_clear()
    linear_choices._choose.cache_clear()


def stage_bytes(launch: LinearLaunch, glu: bool) -> int:
    """Return the bytes of weights and inputs that a program has in flight."""
    weights = launch.block_n * launch.block_k * (2 if glu else 1)
    inputs = (launch.block_t + launch.more_t) * launch.block_k
    return 2 * (weights + inputs) * launch.num_stages


def write_choice(launch: dict[str, Any] | None) -> None:
    line = {"rows": 4096, "columns": 4096, "glu": False, "max_tokens": 16, "launch": launch}
    path = cache_dir() / "linears" / file_name(H200, BF16)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"choices": [line]}), encoding="utf-8")


def test_every_shipped_file_is_read_and_says_where_it_comes_from() -> None:
    files = sorted(SHIPPED.glob("*.json"))
    assert [file.name for file in files] == ["nvidia_h200_bfloat16.json"]
    for file in files:
        choices = read_choices(file)
        record = json.loads(file.read_text(encoding="utf-8"))
        assert {"commit", "command", "device", "versions"} <= set(record["provenance"])
        assert file.name == file_name(record["device"], BF16)
        for (shape, limit), launch in choices.items():
            assert limit in TOKEN_LIMITS
            if launch is not None:
                assert launch.tiled or launch.block_t + launch.more_t >= limit
                assert not shape.glu or launch.splits == 1
                assert stage_bytes(launch, shape.glu) <= SHARED_BYTES


def test_shipped_choices_are_those_that_were_measured_best() -> None:
    # A change of this hash is a change of every text in bfloat16: it has to be meant.
    assert choices_digest(load_choices(H200, BF16)) == "44823adfdd8e"


def test_a_record_of_a_gpu_says_which_choices_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: H200)
    assert hash_linear_choices(torch.device("cpu"), BF16) is None
    before = hash_linear_choices(torch.device("cuda"), BF16)
    assert before == choices_digest(load_choices(H200, BF16))
    load_choices.cache_clear()
    write_choice(asdict(LinearLaunch(16, 32, 64, splits=8)))
    assert hash_linear_choices(torch.device("cuda"), BF16) != before


def test_equal_files_give_equal_choices_whatever_their_order() -> None:
    choices = load_choices(H200, BF16)
    assert choices_digest(dict(reversed(choices.items()))) == choices_digest(choices)
    shape, limit = next(iter(choices))
    changed = choices | {(shape, limit): LinearLaunch(16, 16, 16)}
    assert choices_digest(changed) != choices_digest(choices)


def test_a_file_of_ones_own_goes_before_the_shipped_one() -> None:
    own = LinearLaunch(16, 32, 64, splits=8)
    write_choice(asdict(own))
    assert load_choices(H200, BF16)[LinearShape(4096, 4096), 16] == own
    assert LinearShape(6144, 4096) in {shape for shape, _ in load_choices(H200, BF16)}


def test_a_choice_of_the_library_is_kept() -> None:
    write_choice(None)
    assert load_choices(H200, BF16)[LinearShape(4096, 4096), 16] is None


@pytest.mark.parametrize("text", ["{", "[]", '{"choices": [{"rows": 1}]}'])
def test_a_damaged_file_is_named(text: str) -> None:
    write_choice(None)
    path = cache_dir() / "linears" / file_name(H200, BF16)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=path.name):
        load_choices(H200, BF16)


@pytest.mark.parametrize(
    ("shape", "launch", "said"),
    [
        (LinearShape(64, 64, glu=True), LinearLaunch(16, 16, 32, splits=2), "have no splits"),
        (LinearShape(64, 64, eight_bit=True), LinearLaunch(16, 16, 32, tiled=True), "8-bit"),
        (LinearShape(60, 64), LinearLaunch(16, 16, 32, tiled=True), "multiples of 8"),
        (LinearShape(64, 60), LinearLaunch(16, 16, 32, tiled=True), "multiples of 8"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_while_the_file_is_read(
    shape: LinearShape, launch: LinearLaunch, said: str
) -> None:
    write_choice(None)
    path = cache_dir() / "linears" / file_name(H200, BF16)
    line = {**asdict(shape), "max_tokens": 16, "launch": asdict(launch)}
    path.write_text(json.dumps({"choices": [line]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_choices(H200, BF16)


def test_what_is_measured_instead_takes_the_place_of_a_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_choices, "_is_streaming_device", lambda index: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200)
    shape, device = LinearShape(4096, 4096), torch.device("cuda")
    chosen = choose_linear(shape, 5, BF16, device)
    other = LinearLaunch(16, 32, 64, splits=8)
    assert chosen not in (None, other)
    replace_choice(H200, BF16, shape, 16, other)
    assert choose_linear(shape, 5, BF16, device) == other
    replace_choice(H200, BF16, shape, 16, None)
    assert choose_linear(shape, 5, BF16, device) is None


def test_what_gives_no_largest_output_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = StreamedLinear(torch.randn(24, 32)), torch.randn(5, 32)
    expected = layer(x).argmax(1)
    for launch in (
        LinearLaunch(16, 16, 32, tiled=True),
        LinearLaunch(16, 16, 32, splits=2),
        LinearLaunch(16, 16, 32, more_t=16),
    ):
        monkeypatch.setattr(layers, "choose_linear", lambda *_, launch=launch: launch)
        assert torch.equal(layers.top1(layer, x), expected)
        assert torch.equal(layers.largest(layer, x)[1], expected)


def test_ranges_of_tokens() -> None:
    assert [token_limit(n) for n in (1, 16, 17, 64, 65, 320, 321)] == [
        16,
        16,
        32,
        64,
        160,
        320,
        None,
    ]


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("rows", [48, 960, 4096, 128256])
@pytest.mark.parametrize("columns", [64, 576, 4096, 14336])
def test_the_rule_gives_launches_that_fit(
    rows: int, columns: int, glu: bool, eight_bit: bool
) -> None:
    for limit in TOKEN_LIMITS:
        launch = rule(LinearShape(rows, columns, glu, eight_bit), limit)
        if launch is None:
            assert limit > 64
            assert not eight_bit
            continue
        assert launch.block_t + launch.more_t == min(limit, 160)
        assert not glu or launch.splits == 1
        assert stage_bytes(launch, glu) <= SHARED_BYTES


def test_the_rule_leaves_rows_that_are_not_aligned_to_the_library() -> None:
    assert rule(LinearShape(64, 100), 16) is None


def test_a_cpu_and_float32_take_the_library() -> None:
    shape = LinearShape(4096, 4096)
    assert choose_linear(shape, 5, BF16, torch.device("cpu")) is None
    assert choose_linear(shape, 5, torch.float32, torch.device("cuda")) is None


def test_a_rank_has_its_share_of_a_layer() -> None:
    shapes = SHIPPED_MODELS["llama-8b"].share(2).shapes()
    sizes = [(6144 // 2, 4096), (4096, 2048), (7168, 4096), (4096, 7168), (128256 // 2, 4096)]
    assert [(shape.rows, shape.columns) for shape in shapes] == sizes
    assert SHIPPED_MODELS["llama-8b"].share(1) == SHIPPED_MODELS["llama-8b"]
    assert SHIPPED_MODELS["llama-8b"].share(16).kv_heads == 1  # ranks then have copies of them
    for ranks in (0, 2):
        with pytest.raises(ConfigError, match=f"ranks={ranks} is not allowed; give a divisor of 9"):
            SHIPPED_MODELS["smollm2-135m"].share(ranks)


def test_candidates_fit_the_device_and_cover_every_shape() -> None:
    for model in SHIPPED_MODELS.values():
        for shape in model.shapes():
            for limit in TOKEN_LIMITS:
                for launch in candidates(shape, limit):
                    assert stage_bytes(launch, shape.glu) <= SHARED_BYTES
                    assert all(one.prefetch % 16 == 0 for one in with_prefetch(launch, shape))
            assert list(candidates(shape, 16)), shape
            narrow = replace(shape, eight_bit=True)
            for limit in TOKEN_LIMITS:
                assert all(not launch.tiled for launch in candidates(narrow, limit))
            assert list(candidates(narrow, 320)), shape


def test_a_weight_of_8_bits_has_choices_of_its_own() -> None:
    wide, narrow = LinearLaunch(16, 32, 64), LinearLaunch(16, 64, 128, splits=2)
    shape = LinearShape(4096, 4096)
    lines = [
        {**asdict(shape), "max_tokens": 16, "launch": asdict(wide)},
        {**asdict(shape), "eight_bit": True, "max_tokens": 16, "launch": asdict(narrow)},
    ]
    path = cache_dir() / "linears" / file_name(H200, BF16)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"choices": lines}), encoding="utf-8")
    choices = load_choices(H200, BF16)
    assert choices[shape, 16] == wide
    assert choices[replace(shape, eight_bit=True), 16] == narrow
    assert len(merge_records({"choices": lines[1:]}, {"choices": lines[:1]})["choices"]) == 2


def test_shapes_of_a_model_by_name(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3")
    model.config.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    shape = model_shape(str(tmp_path / "model"))
    assert LinearShape((4 + 2 * 2) * 24, 64) in shape.shapes()


def test_nothing_is_prefetched_from_behind_a_row() -> None:
    # 9 steps of 64 over 2 programs: the last one begins at the fifth step.
    shape, launch = LinearShape(576, 576), LinearLaunch(16, 16, 64, splits=2)
    most = max(one.prefetch for one in with_prefetch(launch, shape))
    assert most == 2 * (576 - 5 * 64)
    narrow = replace(shape, eight_bit=True)
    assert max(one.prefetch for one in with_prefetch(launch, narrow)) == 576 - 5 * 64
    odd = LinearShape(576, 584, eight_bit=True)  # every second row begins at 8 bytes
    assert {one.prefetch for one in with_prefetch(launch, odd)} == {0}


def test_a_second_model_leaves_the_choices_of_the_first() -> None:
    write_choice(asdict(LinearLaunch(16, 32, 64)))
    path = cache_dir() / "linears" / file_name(H200, BF16)
    line = {"rows": 64, "columns": 64, "glu": False, "max_tokens": 16, "launch": None}
    record = {"provenance": {"commit": "b"}, "choices": [line]}
    path.write_text(json.dumps(merge_records(record, read_earlier(path))), encoding="utf-8")
    assert set(read_choices(path)) == {(LinearShape(64, 64), 16), (LinearShape(4096, 4096), 16)}
    again = {"provenance": {"commit": "c"}, "choices": [line | {"launch": None}]}
    merged = merge_records(again, read_earlier(path))
    assert len(merged["choices"]) == 2
    assert merged["earlier"] == [None, {"commit": "b"}]
    assert read_earlier(path.with_name("other.json")) is None


def test_what_cannot_be_measured_is_said_before_anything_is() -> None:
    with pytest.raises(ConfigError, match="models='llama-9b' is not allowed; give llama-8b"):
        wanted_models("llama-8b,llama-9b", None)
    with pytest.raises(ConfigError, match="limits='8' is not allowed; give of 16"):
        wanted_limits("16,8")
    assert wanted_limits("16,320") == [16, 320]
