"""What bad input gets: one clear sentence, and no model is loaded for a wrong configuration."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, Engine, SamplingParams
from specdec.errors import (
    CapacityError,
    ConfigError,
    SpecdecError,
    UnsupportedError,
    WeightsError,
)
from tests.models import byte_tokenizer, tiny_model, tiny_target

TOKENIZER = byte_tokenizer()
V = len(TOKENIZER)


@functools.cache
def target() -> Any:
    """Return a tiny target with a tokenizer."""
    return tiny_target(tiny_model("llama", vocab_size=V), TOKENIZER)


def make_llm(drafter: Any = "ngram", verifier: str = "rejection", **options: Any) -> LLM:
    """Return an LLM over the tiny target."""
    return LLM(target(), drafter, verifier, **{"max_model_len": 32, **options})


def refused(kind: type[SpecdecError], act: Callable[[], Any], *parts: str) -> None:
    """Check that an act is refused in one sentence that holds every part."""
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message


# --- configuration, before anything loads ---------------------------------------------------------


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the target is loaded."""

    def load(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the target was loaded before the configuration was checked")

    monkeypatch.setattr("specdec.engine.load_target", load)


WRONG_CONFIG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_model_length": 64}, ("'max_model_length'", "did you mean 'max_model_len'", "dtype")),
    ({"max_model_len": 1}, ("max_model_len=1 ", ">= 2")),
    ({"max_model_len": "64"}, ("max_model_len='64'", "int")),
    ({"max_model_len": 64.5}, ("max_model_len=64.5", "int")),
    ({"graph_num_reqs": ["a"]}, ("graph_num_reqs=['a']", "list[int]")),
    ({"max_num_reqs": 0}, ("max_num_reqs=0 ", ">= 1")),
    ({"max_num_reqs": True}, ("max_num_reqs=True", "int")),
    ({"block_size": 0}, ("block_size=0 ", ">= 1")),
    ({"num_kv_blocks": 0}, ("num_kv_blocks=0 ", ">= 1")),
    ({"max_steps_in_flight": 0}, ("max_steps_in_flight=0 ", ">= 1")),
    ({"max_num_batched_tokens": 0}, ("max_num_batched_tokens=0 ", ">= 1")),
    ({"max_num_batched_tokens": 4, "drafter": "ngram"}, ("max_num_batched_tokens=4 ", "5")),
    ({"seed": "one"}, ("seed='one'", "int")),
    ({"dtype": "fp8"}, ("dtype='fp8'", "float32, bfloat16, float16")),
    ({"device": "tpu"}, ("device='tpu'", "cpu, cuda")),
    ({"device": "cpu:1"}, ("device='cpu:1'", "cuda:<index>")),
    ({"device": "cuda:first"}, ("device='cuda:first'", "cuda:<index>")),
    ({"num_speculative_tokens": -1}, ("num_speculative_tokens=-1", ">= 0")),
    ({"num_speculative_tokens": "4"}, ("num_speculative_tokens='4'", "integer")),
    ({"num_speculative_tokens": 2.0}, ("num_speculative_tokens=2.0", "integer")),
    ({"num_speculative_tokens": True}, ("num_speculative_tokens=True", "integer")),
    ({"drafter": "ngrm"}, ("unknown drafter 'ngrm'", "did you mean 'ngram'", "oracle")),
    ({"drafter": "no_such_package:Mine"}, ("'no_such_package:Mine'", "cannot import")),
    ({"drafter": ":"}, ("drafter ':'", "cannot import")),
    ({"drafter": None}, ("unknown drafter", "ngram")),
    ({"drafter": {"max_n": 3}}, ("{'max_n': 3}", "no key 'name'")),
    ({"drafter": {"name": "ngram", "maxn": 3}}, ("'ngram'", "'maxn'", "did you mean 'max_n'")),
    ({"drafter": {"name": "ngram", "max_n": "3"}}, ("'ngram'", "max_n='3'", "int")),
    ({"drafter": {"name": "ngram", "max_n": 1, "min_n": 2}}, ("ngram", "min_n=2", "max_n=1")),
    ({"drafter": {"name": "draft_model", "model": ""}}, ("draft_model", "model=")),
    (
        {"drafter": {"name": "draft_model", "model": "target", "sampling": "gumbl"}},
        ("draft_model", "sampling='gumbl'", "'gumbel'"),
    ),
    ({"drafter": {"name": "oracle", "rates": [0.5, 1.5]}}, ("oracle", "1.5", "[0, 1]")),
    ({"drafter": {"name": "oracle", "texts": [[1, "a"]]}}, ("oracle", "[[1, 'a']]", "list[")),
    ({"drafter": {"name": "oracle", "rates": 0.5}}, ("oracle", "rates=0.5", "list")),
    ({"verifier": "rejections"}, ("unknown verifier", "did you mean 'rejection'", "greedy")),
    ({"verifier": {"name": "greedy", "k": 1}}, ("'greedy'", "'k'", "allowed: name")),
    ({"target": 5}, ("target=5", "a name, a folder")),
]


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("options", "parts"), WRONG_CONFIG, ids=[str(c[0]) for c in WRONG_CONFIG])
@pytest.mark.parametrize("make", [LLM, Engine])
def test_wrong_configuration_is_refused_before_anything_loads(
    make: Any, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(ConfigError, lambda: make(**{"target": "smollm2-135m-instruct", **options}), *parts)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_gpu_that_is_not_there_is_refused_before_anything_loads() -> None:
    refused(ConfigError, lambda: LLM(device="cuda"), "device='cuda'", "no GPU", "cpu")


def test_max_model_len_beyond_the_targets_context_is_refused() -> None:
    refused(ConfigError, lambda: make_llm(max_model_len=513), "max_model_len=513", "512")


def test_options_that_a_loaded_target_contradicts_are_refused() -> None:
    refused(ConfigError, lambda: make_llm(dtype="bfloat16"), "dtype='bfloat16'", "float32")
    make_llm(dtype="float32", device="cpu")


# --- requests -------------------------------------------------------------------------------------

WRONG_PROMPTS: list[tuple[Any, tuple[str, ...]]] = [
    ("", ("empty", "at least one token")),
    ([], ("no prompt",)),
    ([[]], ("empty",)),
    (["fine", ""], ("empty",)),
    ("x" * 40, ("40 tokens", "at most 31", "max_model_len=32")),
    ([1] * 32, ("32 tokens", "at most 31", "max_model_len=32")),
    ([1, V, 2], (f"token id {V} ", f"[0, {V})")),
    ([1, -1], ("token id -1 ", f"[0, {V})")),
    ([2**40], (f"token id {2**40} ",)),
    ([0.5], ("0.5", "a string, a list of token ids")),
    (None, ("None", "a string, a list of token ids")),
    (7, ("7", "a string, a list of token ids")),
    (b"bytes", ("bytes", "a string, a list of token ids")),
    (["fine", None], ("None", "a string, a list of token ids")),
    ([[1, "two"]], ("1", "a string, a list of token ids")),
    ({"role": "user", "content": "x"}, ("content", "a list of chat messages")),
    ([{"role": "user"}], ("{'role': 'user'}", "'role' and 'content'")),
    ([{"role": "user", "content": None}], ("None", "'role' and 'content'")),
    ([[{"role": "user", "content": "x"}, "y"]], ("'y'", "'role' and 'content'")),
    ("half \ud800", ("no valid text", "surrogates")),
]


@pytest.mark.parametrize(
    ("prompts", "parts"), WRONG_PROMPTS, ids=[ascii(c[0])[:40] for c in WRONG_PROMPTS]
)
def test_wrong_prompt_is_refused_and_leaves_nothing_queued(
    prompts: Any, parts: tuple[str, ...]
) -> None:
    llm = make_llm()
    refused(ConfigError, lambda: llm.generate(prompts, SamplingParams(max_tokens=1)), *parts)
    assert not llm.engine.has_requests
    (output,) = llm.generate("x", SamplingParams(max_tokens=1))
    assert len(output.token_ids) == 1


def test_longest_prompt_that_leaves_room_for_a_token_is_taken() -> None:
    (output,) = make_llm().generate([1] * 31)
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


def test_ids_from_numpy_are_taken() -> None:
    assert make_llm().generate(np.array([1, 2]))[0].prompt_token_ids == [1, 2]


def test_text_for_a_target_without_tokenizer_is_refused() -> None:
    llm = LLM(tiny_target(tiny_model("llama")), max_model_len=32)
    for prompt in ("x", [{"role": "user", "content": "x"}]):
        refused(ConfigError, functools.partial(llm.generate, prompt), "no tokenizer", "token ids")


def test_chat_that_the_template_cannot_render_is_refused() -> None:
    message = [{"role": "user", "content": "x"}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    llm = LLM(tiny_target(tiny_model("llama", vocab_size=V), tokenizer), max_model_len=32)
    refused(ConfigError, lambda: llm.generate(message), "chat template", "roles must alternate")
    tokenizer.chat_template = None
    refused(ConfigError, lambda: llm.generate(message), "no chat template", "a string")


def test_numbers_of_parameters_and_labels_must_be_that_of_the_prompts() -> None:
    llm = make_llm()
    refused(ConfigError, lambda: llm.generate(["x", "y"], [SamplingParams()]), "1 sampling", "2")
    refused(ConfigError, lambda: llm.generate(["x", "y"], labels=["a"]), "1 labels", "2")


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 0.0, [None], ["x"]]
)
def test_parameters_of_another_type_are_refused_by_their_place(params: Any) -> None:
    llm = make_llm()
    shown = f"[0]={params[0]!r}" if isinstance(params, list) else f"={params!r}"
    refused(ConfigError, lambda: llm.generate(["x"], params), f"params{shown}", "a SamplingParams")
    assert not llm.engine.has_requests


def test_of_several_prompts_the_refused_one_is_named() -> None:
    llm, few = make_llm(num_kv_blocks=2, block_size=8), SamplingParams(max_tokens=4)
    refused(ConfigError, lambda: llm.generate(["a", "x" * 40], few), "prompt 1: the prompt has 40")
    params = [few, SamplingParams(max_tokens=20)]
    refused(CapacityError, lambda: llm.generate(["a", "b"], params), "prompt 1: ", "KV blocks")
    with pytest.raises(ConfigError, match=r"^the prompt has 40"):
        llm.generate("x" * 40)
    assert not llm.engine.has_requests


@pytest.mark.usefixtures("nothing_loads")
def test_an_unknown_option_is_told_the_constructors_own_names() -> None:
    for given, meant in (("num_spec", "num_speculative_tokens"), ("draftr", "drafter")):
        parts = f"{given!r}", f"did you mean {meant!r}", "draft_length, device", "max_model_len"
        refused(ConfigError, lambda given=given: LLM(**{given: 3}), *parts)


def test_id_of_a_running_request_is_refused_and_can_be_used_again_later() -> None:
    engine = make_llm().engine
    engine.add_request("a", "x", SamplingParams(max_tokens=2))
    refused(ConfigError, lambda: engine.add_request("a", "y"), "'a'", "already running")
    while engine.has_requests:
        engine.step()
    engine.add_request("a", "y")


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": 1e39}, "temperature=1e+39"),
    ({"temperature": 1e-30}, "temperature=1e-30"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": None}, "max_tokens=None"),
    ({"seed": 2**63}, f"seed={2**63}"),
    ({"seed": 0.5}, "seed=0.5"),
    ({"stop": ""}, "stop=''"),
    ({"stop": ["x", ""]}, "stop=['x', '']"),
    ({"stop": [1]}, "stop=[1]"),
    ({"stop_token_ids": 3}, "stop_token_ids=3"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids=['a']"),
    ({"stop_token_ids": [[1]]}, "stop_token_ids=[[1]]"),
    ({"ignore_eos": "no"}, "ignore_eos='no'"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
    ({"min_p": 1.01}, "min_p=1.01"),
    ({"min_p": float("nan")}, "min_p=nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
    ({"frequency_penalty": 2.5}, "frequency_penalty=2.5"),
    ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias={'3': 1.0}"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias={-1: 1.0}"),
    ({"logit_bias": {3: float("-inf")}}, "logit_bias={3: -inf}"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[]"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids=[1.5]"),
    ({"bad_words": [""]}, "bad_words=['']"),
    ({"bad_words": [3]}, "bad_words=[3]"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
]


@pytest.mark.parametrize(("fields", "part"), WRONG_PARAMS, ids=[str(c[0]) for c in WRONG_PARAMS])
def test_sampling_parameter_out_of_range_is_refused(fields: dict[str, Any], part: str) -> None:
    refused(ConfigError, lambda: SamplingParams(**fields), part, "give")


def test_greedy_verifier_refuses_temperature() -> None:
    llm = make_llm(verifier="greedy")
    params = SamplingParams(temperature=0.7)
    refused(ConfigError, lambda: llm.generate("x", params), "'greedy'", "0.7", "rejection")


def test_draft_budget_above_the_engines_is_refused() -> None:
    llm = make_llm(num_speculative_tokens=3)
    params = SamplingParams(num_speculative_tokens=4)
    refused(ConfigError, lambda: llm.generate("x", params), "num_speculative_tokens=4", "3")


def test_a_refused_request_changes_nobodys_seed() -> None:
    one, other = (make_llm(num_kv_blocks=2, block_size=8) for _ in range(2))
    refused(CapacityError, lambda: other.generate("x", SamplingParams(max_tokens=20)), "KV blocks")
    few = SamplingParams(max_tokens=4)
    assert other.generate("x", few)[0].seed == one.generate("x", few)[0].seed


def test_kv_cache_too_small_for_a_request_is_refused() -> None:
    llm = make_llm(num_kv_blocks=2, block_size=8)
    params = SamplingParams(max_tokens=20)
    parts = ("21 tokens", "3 KV blocks", "there are 2", "num_kv_blocks")
    refused(CapacityError, lambda: llm.generate("x", params), *parts)
    assert len(llm.generate("x", SamplingParams(max_tokens=15))[0].token_ids) == 15


# --- weights and tokenizers -----------------------------------------------------------------------


def save(folder: Path, tokenizer: Any = TOKENIZER) -> Path:
    """Save the tiny target, as a user's folder would look."""
    tiny_model("llama", vocab_size=V).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> LLM:
    """Load a folder as the target."""
    return LLM(str(folder), "none", dtype="float32", max_model_len=32)


def test_sound_folder_loads_by_string_or_path(tmp_path: Path) -> None:
    expected = make_llm("none").generate("x", SamplingParams(temperature=0))[0].token_ids
    for name in (save(tmp_path), str(tmp_path)):
        llm = LLM(name, "none", dtype="float32", max_model_len=32)
        assert llm.generate("x", SamplingParams(temperature=0))[0].token_ids == expected


@pytest.mark.parametrize("kept", [0.0, 1e-5, 0.5, 0.999])
def test_truncated_weights_are_refused(tmp_path: Path, kept: float) -> None:
    file = save(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data))])
    refused(WeightsError, lambda: load(tmp_path), "model.safetensors", "damaged")


def test_overwritten_weights_are_refused(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    refused(WeightsError, lambda: load(tmp_path), "model.safetensors", "damaged")


def test_missing_weight_is_refused_and_not_filled_with_random_numbers(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refused(WeightsError, lambda: load(tmp_path), "model.layers.1.mlp.up_proj.weight", "lacks 1")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    config = save(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 64}))
    refused(WeightsError, lambda: load(tmp_path), str(tmp_path))


def test_pickle_is_refused(tmp_path: Path) -> None:
    (save(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(WeightsError, lambda: load(tmp_path), "pytorch_model.bin", "safetensors", "pickle")


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no_such_family"}'])
def test_unusable_config_is_refused(tmp_path: Path, content: str) -> None:
    (save(tmp_path) / "config.json").write_text(content)
    refused(WeightsError, lambda: load(tmp_path), "cannot load model", str(tmp_path))


def test_damaged_or_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    (save(tmp_path / "damaged") / "tokenizer.json").write_text("{")
    refused(WeightsError, lambda: load(tmp_path / "damaged"), "cannot load tokenizer", "damaged")
    save(tmp_path / "missing", None)
    refused(WeightsError, lambda: load(tmp_path / "missing"), "cannot load tokenizer", "missing")


def test_folder_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    refused(WeightsError, lambda: load(tmp_path), str(tmp_path), "config.json")
    refused(WeightsError, lambda: load(tmp_path / "none"), "none", "does not exist")


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, byte_tokenizer(["lamp"]))
    drafter = {"name": "draft_model", "model": str(tmp_path)}
    parts = ("another tokenizer", f"{V + 1} and {V} tokens", "'<eos>'", str(tmp_path))
    refused(ConfigError, lambda: make_llm(drafter), *parts)


def test_draft_model_with_the_same_tokenizer_is_taken(tmp_path: Path) -> None:
    drafter = {"name": "draft_model", "model": str(save(tmp_path))}
    (output,) = make_llm(drafter).generate("x", SamplingParams(temperature=0))
    assert output.stats.num_accepted == output.stats.num_drafted > 0


def test_draft_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    drafter = {"name": "draft_model", "model": str(tmp_path / "none")}
    refused(WeightsError, lambda: make_llm(drafter), str(tmp_path / "none"), "does not exist")


HEADS = ("eagle", "eagle3", "medusa", "block_parallel", "draft_model")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("name", HEADS)
def test_a_local_folder_of_a_drafter_is_checked_before_the_target_loads(
    name: str, tmp_path: Path
) -> None:
    def make(path: str) -> LLM:
        return LLM(drafter={"name": name, "model" if name == "draft_model" else "path": path})

    for path in ("/no/such", "./no_such", "~/no_such_folder", "no/such/"):
        refused(WeightsError, lambda path=path: make(path), repr(path), "does not exist")
    (tmp_path / "file").touch()
    refused(WeightsError, lambda: make(str(tmp_path / "file")), "is no folder")
    refused(WeightsError, lambda: make(str(tmp_path)), str(tmp_path), "no config.json")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    refused(WeightsError, lambda: make(str(tmp_path)), f"did you mean {tmp_path / 'drafter'}")
    with pytest.raises(AssertionError, match="the target was loaded"):
        make("some/hub-id")  # may be one of the hub
    with pytest.raises(AssertionError, match="the target was loaded"):
        make(str(tmp_path / "drafter"))


def test_every_error_of_ours_is_a_specdec_error() -> None:
    for kind in (ConfigError, UnsupportedError, CapacityError, WeightsError):
        assert issubclass(kind, SpecdecError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [65, 66], "bad_words": ["A", "B"]},
        {"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2},
        {"allowed_token_ids": [TOKENIZER.eos_token_id, 65], "bad_words": ["A"], "min_tokens": 1},
    ],
)
def test_parameters_that_leave_no_token_are_refused(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    refused(ConfigError, lambda: make_llm().generate([1], params), "leave no token to draw")
    fields["allowed_token_ids"].append(67)  # with another token they are honoured
    (output,) = make_llm().generate([1], SamplingParams(**fields, max_tokens=2))
    assert set(output.token_ids) <= set(fields["allowed_token_ids"])


def test_arrays_of_token_ids_are_prompts_alone_and_in_a_list() -> None:
    prompt, params = [72, 105, 72], SamplingParams(temperature=0.0, max_tokens=3)
    (expected,) = make_llm().generate(prompt, params)
    for prompts in (np.array(prompt), [np.array(prompt)], np.array([prompt, prompt])):
        for output in make_llm().generate(prompts, params):  # pyright: ignore[reportArgumentType]
            assert output.prompt_token_ids == prompt
            assert output.token_ids == expected.token_ids
