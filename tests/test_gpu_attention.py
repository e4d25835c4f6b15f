"""Paged attention on a GPU: long contexts, real shapes, capture."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.paged_attention import paged_attention_forward
from tests.attention_cases import LAYER, AttentionCase, AttentionSizes

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LLAMA_8B: dict[str, Any] = {"num_kv_heads": 8, "packed": 4, "head_size": 128}
SMOLLM_135M: dict[str, Any] = {"num_kv_heads": 3, "packed": 3, "head_size": 64}


def run(case: AttentionCase, metadata: Any = None) -> Tensor:
    metadata = metadata or case.metadata
    return paged_attention_forward(case.query, metadata, LAYER, case.scaling, case.sizes.window)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ((1, 1, 1), (32_767, 5000, 17)),
        ((5, 5, 5, 5), (32_763, 900, 0, 4096)),
        ((1,) * 20, tuple(range(1, 4000, 200))),
        ((1500, 5, 1), (2500, 8000, 31_000)),
    ],
    ids=["decode", "verify", "many", "chunk"],
)
@pytest.mark.parametrize("shape", [LLAMA_8B, SMOLLM_135M], ids=["8B", "135M"])
@pytest.mark.parametrize(
    ("dtype", "window"),
    [(BF16, None), (torch.float32, None), (BF16, 1000)],
    ids=["bf16", "fp32", "window"],
)
def test_long_contexts(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    shape: dict[str, Any],
    dtype: torch.dtype,
    window: int | None,
    device: torch.device,
) -> None:
    sizes = AttentionSizes(
        query_lens, context_lens, **shape, dtype=dtype, window=window, num_padding=1
    )
    case = AttentionCase(sizes, device)
    case.write()
    case.check(run(case))


@pytest.mark.parametrize(
    ("head_size", "packed", "dtype"),
    [
        (16, 1, BF16),
        (24, 7, BF16),
        (64, 3, torch.float32),
        (80, 5, BF16),
        (96, 8, torch.float16),
        (128, 4, torch.float32),
        (128, 24, BF16),
        (256, 2, BF16),
        (256, 16, torch.float32),
    ],
)
@pytest.mark.parametrize("query_lens", [(9, 3), (150, 1)])
def test_every_shape_launches(
    head_size: int,
    packed: int,
    dtype: torch.dtype,
    query_lens: tuple[int, ...],
    device: torch.device,
) -> None:
    sizes = AttentionSizes(query_lens, (300, 77), 2, packed, head_size, dtype=dtype)
    case = AttentionCase(sizes, device)
    case.write()
    case.check(run(case))


def test_captured_pass_gives_the_bits_of_an_eager_one(device: torch.device) -> None:
    # The eager pass knows how long the requests are, the captured one only how long they may get.
    sizes = AttentionSizes((5,) * 6, (900, 3, 0, 2000, 64, 127), **SMOLLM_135M, dtype=BF16)
    case = AttentionCase(sizes, device)
    case.write()
    captured = case.with_(max_seq_len=8192)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run(case, captured)  # compiles
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.kv.write(LAYER, captured.slot_mapping, case.new_keys, case.new_values)
        output = run(case, captured)
    for _ in range(2):
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, run(case))
        # Other lengths and places of the same shape, without another capture.
        case.metadata.seq_lens[3] -= 1000
        case.metadata.positions[15:20] -= 1000
        case.metadata.slot_mapping.fill_(-1)
        case.metadata.idx_mapping[1] = -1
