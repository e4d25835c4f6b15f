"""Files of EAGLE-style heads: what is read from each layout, what is refused, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.eagle import EagleConfig
from drafters.heads.checkpoint import load_head, save_head
from specdec import Engine
from specdec.errors import ConfigError, SpecdecError, UnsupportedError, WeightsError
from tests.head_cases import AUX_IDS, CASES, DEFAULT_AUX_LAYERS, HeadFiles
from tests.models import tiny_model, tiny_target

V, LAYERS = 17, 6


@pytest.fixture(scope="module")
def model() -> Any:
    """Build the target."""
    return tiny_model("llama", vocab_size=V, num_hidden_layers=LAYERS)


def files_of(name: str, model: Any, folder: Path) -> HeadFiles:
    return HeadFiles(CASES[name], model, folder / "head")


@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_read(name: str, model: Any, tmp_path: Path) -> None:
    files = files_of(name, model, tmp_path)
    case, head = files.case, load_head(files.path, files.case.method)
    assert head.layout == case.layout
    assert head.tensors.keys() == files.tensors.keys()
    for key, tensor in files.tensors.items():
        assert torch.equal(head.tensors[key], tensor), key
    expected = files.aux_layers if case.method == "eagle3" else ()
    assert head.resolved_aux_layers(LAYERS) == expected
    if case.draft_vocab_size:
        assert head.target_ids is not None
        assert files.target_ids is not None
        assert head.target_ids.tolist() == files.target_ids.tolist()


def test_the_usual_layers_are_those_before_two_the_middle_and_the_third_last() -> None:
    assert DEFAULT_AUX_LAYERS == (2 - 1, LAYERS // 2 - 1, LAYERS - 3 - 1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_again(name: str, model: Any, tmp_path: Path) -> None:
    files = files_of(name, model, tmp_path)
    head = load_head(files.path, files.case.method)
    shares = files.case.method == "eagle3" and not head.spec.owns_lm_head
    if shares:
        with pytest.raises(ConfigError, match="shares the target's output head"):
            save_head(str(tmp_path / "saved"), head, "target", 4)
    save_head(str(tmp_path / "saved"), head, "target", 4, files.head if shares else None)
    again = load_head(str(tmp_path / "saved"), files.case.method)
    written = {"lm_head.weight"} if shares else set()
    assert again.tensors.keys() == head.tensors.keys() | written
    for key, tensor in head.tensors.items():
        assert torch.equal(again.tensors[key], tensor), key
    own, other = dict(vars(head.spec)), dict(vars(again.spec))
    assert other.pop("owns_lm_head") == (own.pop("owns_lm_head") or shares)
    layers = [spec.pop("layer_config") for spec in (own, other)]
    assert own == other
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert getattr(layers[0], key) == getattr(layers[1], key)
    assert layers[0].rope_parameters == layers[1].rope_parameters
    assert layers[0].model_type == layers[1].model_type
    assert (head.target_ids is None) == (again.target_ids is None)
    if head.target_ids is not None:
        assert torch.equal(head.target_ids, again.target_ids)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    if files.case.method == "eagle3":
        proposal = config["speculators_config"]["proposal_methods"][0]
        assert proposal["speculative_tokens"] == 4
        assert config["speculators_config"]["verifier"]["name_or_path"] == "target"
        assert again.layout == "speculators"
    else:
        assert config["rope_theta"] == 500.0
        assert again.layout == "EAGLE"


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3"])
def test_the_targets_embedding_is_written_where_it_is_given(
    name: str, model: Any, tmp_path: Path
) -> None:
    files = files_of(name, model, tmp_path)
    head = load_head(files.path, files.case.method)
    assert not head.spec.owns_embedding
    save_head(str(tmp_path / "saved"), head, "target", embedding=files.embedding)
    again = load_head(str(tmp_path / "saved"), files.case.method)
    assert again.spec.owns_embedding
    assert torch.equal(again.tensors["embed_tokens.weight"], files.embedding)


def load_error(files: HeadFiles, **changes: Any) -> SpecdecError:
    """Return what loading says after keys of config.json were changed; None removes a key."""
    config = {**files.config(), **changes}
    files.write({key: value for key, value in config.items() if value is not None})
    with pytest.raises(SpecdecError) as caught:
        load_head(files.path, files.case.method)
    return caught.value


@pytest.mark.parametrize(
    ("name", "changes", "kind", "parts"),
    [
        ("EAGLE", {"num_hidden_layers": 2}, UnsupportedError, ["2 layers", "one"]),
        ("EAGLE", {"model_type": "gpt2"}, UnsupportedError, ["'gpt2'", "llama, qwen3"]),
        ("EAGLE", {"hidden_size": 32}, WeightsError, ["q_proj", "[96, 64]", "its config"]),
        (
            "EAGLE",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedError,
            ["dynamic"],
        ),
        ("EAGLE-3", {"draft_vocab_size": 12}, WeightsError, ["lm_head.weight", "[11, 64]"]),
        ("EAGLE-3", {AUX_IDS: [2, 3]}, WeightsError, ["3 hidden states", "2 layers"]),
        ("EAGLE, speculators", {"layernorms": True}, UnsupportedError, ["layernorms=True"]),
        ("EAGLE-3", {"fc_norm": True}, WeightsError, ["fc_norm.0.weight", "fc_norm.2.weight"]),
        (
            "EAGLE-3, speculators",
            {"norm_before_residual": None},
            WeightsError,
            ["norm_before_residual"],
        ),
        (
            "EAGLE-3, speculators",
            {"transformer_layer_config": None},
            WeightsError,
            ["transformer_layer_config"],
        ),
        (
            "EAGLE-3, speculators",
            {"speculators_model_type": "mlp"},
            ConfigError,
            ["'mlp'"],
        ),
        (
            "EAGLE-3, speculators",
            {"speculators_model_type": "eagle"},
            ConfigError,
            ["is an eagle head", "drafter=eagle"],
        ),
    ],
)
def test_configs_that_do_not_go_with_the_tensors_are_refused(
    name: str,
    changes: dict[str, Any],
    kind: type[Exception],
    parts: list[str],
    model: Any,
    tmp_path: Path,
) -> None:
    error = load_error(files_of(name, model, tmp_path), **changes)
    assert isinstance(error, kind)
    for part in parts:
        assert part in str(error)


def test_tensors_that_are_missing_or_too_many_are_named(model: Any, tmp_path: Path) -> None:
    files = files_of("EAGLE-3", model, tmp_path)
    tensors = files.stored()
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(4)
    del tensors["norm.weight"]
    files.write(tensors=tensors)
    with pytest.raises(WeightsError, match=r"missing tensors \['norm.weight'\].*q_norm"):
        load_head(files.path, "eagle3")
    files.write(tensors={"blocks.0.weight": torch.ones(3)})
    with pytest.raises(WeightsError, match="no known layout"):
        load_head(files.path, "eagle3")


def test_what_training_left_is_ignored(model: Any, tmp_path: Path) -> None:
    files = files_of("EAGLE-3, speculators", model, tmp_path)
    left = {
        "verifier_norm.weight": torch.ones(4),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    files.write(tensors={**files.stored(), **left})
    assert load_head(files.path, "eagle3").tensors.keys() == files.tensors.keys()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("d2t"), "lacks 'd2t'"),
        (lambda t: t.update(d2t=t["d2t"] + V), "as many different ones"),
        (lambda t: t.update(d2t=-torch.arange(11)), "as many different ones"),
        (lambda t: t.update(t2d=t["t2d"].logical_not()), "name different tokens"),
    ],
)
def test_vocabulary_maps_that_do_not_hold_are_refused(
    change: Any, reason: str, model: Any, tmp_path: Path
) -> None:
    files = files_of("EAGLE-3", model, tmp_path)
    tensors = files.stored()
    change(tensors)
    files.write(tensors=tensors)
    with pytest.raises(WeightsError, match=reason):
        load_head(files.path, "eagle3")


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_a_pickle_is_refused_with_the_way_out(suffix: str, model: Any, tmp_path: Path) -> None:
    files = files_of("EAGLE", model, tmp_path)
    folder = Path(files.path)
    (folder / "model.safetensors").rename(folder / f"pytorch_model{suffix}")
    with pytest.raises(WeightsError, match=r"only safetensors are loaded.*convert it"):
        load_head(files.path, "eagle")


def test_a_head_of_another_kind_is_refused_by_the_name_of_its_drafter(
    model: Any, tmp_path: Path
) -> None:
    files = files_of("EAGLE", model, tmp_path)
    with pytest.raises(ConfigError, match="is an eagle head; use drafter=eagle"):
        load_head(files.path, "eagle3")


def test_a_head_needs_its_folder() -> None:
    with pytest.raises(ConfigError, match="drafter eagle needs path="):
        EagleConfig()
    with pytest.raises(WeightsError, match="does not exist"):
        load_head("/nowhere/head", "eagle")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocab_size": V + 3}, ["vocabulary 17", "has 20"]),
        ({"hidden_size": 32, "head_dim": 16}, ["hidden size 64", "has 32"]),
        ({"num_hidden_layers": 4}, ["target layer 4", "4 layers"]),
    ],
)
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3, speculators"])
def test_a_head_of_another_target_is_refused(
    changes: dict[str, Any], parts: list[str], name: str, model: Any, tmp_path: Path
) -> None:
    files = files_of(name, model, tmp_path)
    other = tiny_target(
        tiny_model("llama", **{"vocab_size": V, "num_hidden_layers": LAYERS, **changes})
    )
    drafter = {"name": files.case.method, "path": files.path}
    if files.case.method == "eagle" and "num_hidden_layers" in changes:
        Engine(other, drafter, "greedy", 2, max_model_len=64)  # reads the last one alone
        return
    with pytest.raises(ConfigError) as caught:
        Engine(other, drafter, "greedy", 2, max_model_len=64)
    for part in parts:
        assert part in str(caught.value)


def test_an_embedding_like_the_targets_takes_no_memory(model: Any, tmp_path: Path) -> None:
    files = files_of("EAGLE", model, tmp_path)
    drafter = {"name": "eagle", "path": files.path}
    files.write(tensors={**files.stored(), "embed_tokens.weight": files.embedding})
    engine: Any = Engine(tiny_target(model), drafter, "greedy", 2, max_model_len=64)
    assert engine.drafter.head.embed_tokens is None
    files.write(tensors={**files.stored(), "embed_tokens.weight": files.embedding + 1})
    engine = Engine(tiny_target(model), drafter, "greedy", 2, max_model_len=64)
    assert engine.drafter.head.embed_tokens is not None
