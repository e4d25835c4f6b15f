"""Paged attention against plain attention per request, with NaN in every slot it must not read."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import attention
from runner.attention import paged_attention, single_request_metadata
from runner.kv_cache import PagedKVCache
from runner.models.hf import HFModel
from specdec.errors import UnsupportedError
from tests.attention_cases import LAYER, AttentionCase, AttentionSizes
from tests.hypotheses import seeds
from tests.models import FAMILIES, tiny_model

CPU = torch.device("cpu")


@st.composite
def sizes(draw: st.DrawFn) -> AttentionSizes:
    lens = draw(st.lists(st.sampled_from([0, 1, 1, 3, 5, 17]), min_size=1, max_size=5).filter(any))
    context_lens = [draw(st.integers(0, 20)) for _ in lens]
    return AttentionSizes(
        query_lens=tuple(lens),
        context_lens=tuple(context_lens),
        num_kv_heads=draw(st.integers(1, 3)),
        packed=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([5, 8, 17])),
        block_size=draw(st.sampled_from([1, 4, 7])),
        window=draw(st.sampled_from([None, 1, 6, 1000])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        num_padding=draw(st.integers(0, 2)),
        past_end=draw(st.integers(0, lens[0])),
        seed=draw(seeds),
    )


def _layer() -> nn.Module:
    module = nn.Module()
    module.layer_idx = LAYER  # pyright: ignore[reportArgumentType]
    return module


def run(case: AttentionCase, scaling: float | None = None) -> Tensor:
    """Run a layer as a transformers model does."""
    output, weights = paged_attention(
        _layer(),
        case.query.transpose(0, 1)[None],
        case.new_keys.transpose(0, 1)[None],
        case.new_values.transpose(0, 1)[None],
        None,
        scaling,
        sliding_window=case.sizes.window,
        attn_metadata=case.metadata,
    )
    assert weights is None
    return output[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes())
def test_output_is_that_of_each_request_alone(sizes: AttentionSizes) -> None:
    case = AttentionCase(sizes, CPU)
    before = [t.clone() for t in (*case.kv.keys, *case.kv.values)]
    case.check(run(case))
    _check_cache(case, before)


def _check_cache(case: AttentionCase, before: list[Tensor]) -> None:
    """Check what the pass wrote: each request's positions, trash for padding, and nothing else."""
    places = range(len(case.rows))
    written = torch.cat([case.slots(place) for place in places])
    tensors = (*case.kv.keys, *case.kv.values)
    untouched = torch.ones(len(tensors[0]), dtype=torch.bool)
    untouched[written] = False
    untouched[case.kv.trash_slot] = False
    for layer, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        same = untouched if layer % 2 == LAYER else torch.ones_like(untouched)
        torch.testing.assert_close(tensor[same], old[same], rtol=0, atol=0, equal_nan=True)
    for place in places:
        assert torch.equal(case.kv.keys[LAYER][case.slots(place)], case.keys[place])
        assert torch.equal(case.kv.values[LAYER][case.slots(place)], case.values[place])
    assert (case.kv.keys[LAYER][case.kv.null_slot] == 0).all()
    trash = case.kv.keys[LAYER][case.kv.trash_slot]
    assert bool(trash.isnan().all()) == bool((case.metadata.slot_mapping >= 0).all())


def test_scaling_that_is_given_replaces_the_default() -> None:
    sizes = AttentionSizes((3,), (9,), 1, 1, head_size=8, block_size=4)
    default, given_, none = (run(AttentionCase(sizes, CPU), s) for s in (None, 8**-0.5, 0.0))
    torch.testing.assert_close(default, given_, rtol=1e-5, atol=1e-5)
    # No scale at all: every key weighs the same.
    mean = AttentionCase(sizes, CPU).values[0].mean(0)
    torch.testing.assert_close(none[-1], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["s_aux", "softcap", "position_bias"])
def test_attention_option_that_is_not_honoured_is_refused(option: str) -> None:
    kv = PagedKVCache(2, 1, 4, 1, 8, torch.float32, CPU)
    metadata = single_request_metadata(kv, torch.arange(1), 1)
    ones = torch.ones(1, 1, 1, 8)
    options: dict[str, Any] = {option: 1.0}
    with pytest.raises(UnsupportedError, match=option):
        paged_attention(_layer(), ones, ones, ones, None, attn_metadata=metadata, **options)


def test_one_token_of_one_request_needs_no_mask() -> None:
    kv = PagedKVCache(2, 1, 8, 1, 8, torch.float32, CPU)
    (group,) = single_request_metadata(kv, torch.tensor([6]), 7).groups
    assert group.mask(None, 3, torch.float32) is None
    assert group.mask(7, 3, torch.float32) is None
    assert group.mask(6, 3, torch.float32) is not None
    (group,) = single_request_metadata(kv, torch.tensor([5]), 7).groups  # its end is not seen
    assert group.mask(None, 3, torch.float32) is not None


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
def test_pages_of_one_request_that_follow_one_another_are_not_copied(
    query_len: int, window: int | None
) -> None:
    outputs = []
    for blocks in ([2, 3, 4], [2, 4, 3], [0, 1, 2]):
        sizes = AttentionSizes((query_len,), (9,), 2, 3, 8, block_size=4, window=window)
        case = AttentionCase(sizes, CPU)
        case.block_table[int(case.rows[0]), :3] = torch.tensor(blocks, dtype=torch.int32)
        case.metadata.slot_mapping.copy_(case.slots(0)[9:])
        for kind, own in ((case.kv.keys, case.keys), (case.kv.values, case.values)):
            kind[LAYER][: case.kv.null_slot] = float("nan")
            kind[LAYER][case.slots(0)[:9]] = own[0][:9]
        outputs.append(run(case))
        case.check(outputs[-1])
        (group,) = case.metadata.groups
        in_order = blocks != [2, 4, 3]
        assert (group.read_slots is None) == in_order
        assert group.first_slot == (4 * blocks[0] if in_order else -1)
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)


class _NoHostData(TorchDispatchMode):
    """Refuse whatever a captured graph could not hold: copies from or to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, output) if isinstance(x, Tensor) and x.dim() > 0]
        on_host = [tuple(x.shape) for x in tensors if x.device.type != "meta"]
        assert not on_host, f"{func} takes or makes host tensors {on_host}"
        return output


def _to_meta(thing: Any, seen: set[int]) -> Any:
    """Return an object of ours with every tensor in it moved to the device that has no data."""
    if isinstance(thing, Tensor):
        return thing.to("meta")
    if isinstance(thing, list):
        return [_to_meta(part, seen) for part in thing]
    if type(thing).__module__.startswith("runner.models") and id(thing) not in seen:
        seen.add(id(thing))
        for name, value in vars(thing).items():
            object.__setattr__(thing, name, _to_meta(value, seen))
    return thing


def _forward_on_meta(model: HFModel) -> None:
    """Run a decoder and its head on a device that has no data: every read of one raises."""
    kv = model.make_kv_cache(1, 8)
    metadata = single_request_metadata(kv, torch.arange(5), 5)
    module: Any = model.model
    module.to("meta")
    kv.keys, kv.values = _to_meta([kv.keys, kv.values], set())
    metadata.slot_mapping = metadata.slot_mapping.to("meta")
    model.fused, model._stream = _to_meta([model.fused, model._stream], set())
    with torch.device("meta"):
        ids, positions = (torch.empty(5, dtype=torch.int64) for _ in range(2))
    with _NoHostData():
        hidden = model.forward(ids, positions, metadata)
        assert model.compute_logits(hidden).shape == (5, model.vocab_size)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_reads_nothing_on_the_host(
    family: str, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a captured forward may do, attention aside, whose kernels need a real device.
    layers = []

    def instead(query: Tensor, *args: Any) -> Tensor:
        layers.append(args[1])
        return torch.empty_like(query)

    monkeypatch.setitem(attention.ATTENTION_BACKENDS, "paged", instead)
    monkeypatch.setattr(PagedKVCache, "write", lambda *args: None)
    model = HFModel(copy.deepcopy(tiny_model(family)), fuse)
    _forward_on_meta(model)
    assert layers == list(range(model.num_layers))


def test_decoder_that_builds_a_mask_is_noticed() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")), fuse=False)
    model.model.set_attn_implementation("sdpa")  # a mask is made for it, by looking at positions
    with pytest.raises(RuntimeError, match="meta"):
        _forward_on_meta(model)
