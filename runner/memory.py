"""How many KV blocks the device's memory allows.

On a GPU the largest steps are run once, as padding through `execute_model` (they touch no state),
and the KV cache gets what is left. On a CPU it gets what all rows could need, at most 2 GiB; pages
are mapped only when they are first written.
"""

import logging
from typing import TYPE_CHECKING

import torch

from runner.input_batch import padding_plan
from specdec.errors import CapacityError

if TYPE_CHECKING:
    from runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_CPU_LIMIT_BYTES = 2 * 2**30
_GPU_FRACTION = 0.9  # of the device's memory, for weights, activations and KV together


def choose_num_kv_blocks(runner: "ModelRunner") -> int:
    """Return the number of KV blocks for a runner whose caches are still minimal.

    Raises:
        CapacityError: not even one request of `max_model_len` tokens fits.
    """
    config = runner.config
    per_block = sum(kv.bytes_per_block for kv in runner.kv_caches)
    blocks_per_req = -(-config.max_model_len // config.block_size)
    full = config.max_num_reqs * blocks_per_req
    if runner.device.type == "cuda":
        available = _profile_gpu(runner)
    else:
        available = _CPU_LIMIT_BYTES
    num_blocks = min(full, available // per_block)
    if config.least_of_ranks is not None:
        num_blocks = config.least_of_ranks(num_blocks)
    if num_blocks < blocks_per_req:
        raise CapacityError(
            f"the KV cache has {max(available, 0) / 2**30:.2f} GiB, which is "
            f"{max(num_blocks, 0)} blocks; one request of max_model_len={config.max_model_len} "
            f"takes {blocks_per_req}; lower max_model_len, max_num_reqs or max_num_batched_tokens"
        )
    return num_blocks


def _profile_gpu(runner: "ModelRunner") -> int:
    """Run the largest steps as padding and return the bytes left for KV."""
    config = runner.config
    torch.cuda.reset_peak_memory_stats(runner.device)
    kept = torch.cuda.memory_allocated(runner.device)
    longest = min(config.max_model_len, config.max_num_batched_tokens)
    width = config.num_speculative_tokens + 1
    for query_len, is_prefill in ((longest, True), (width, False), (1, False)):
        places = min(config.max_num_reqs, config.max_num_batched_tokens // query_len)
        plan = padding_plan(places, query_len, is_prefill, config.max_model_len)
        runner.execute_model(plan).output.wait()
    peak = torch.cuda.max_memory_allocated(runner.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    others = total - free - torch.cuda.memory_reserved(runner.device)
    # What graphs allocate while they are captured stays theirs. They share one pool, and none is
    # larger than the largest step: it is needed once more.
    graphs = peak - kept if config.graph_scope != "none" else 0
    return int(total * _GPU_FRACTION) - others - peak - graphs


def log_memory(runner: "ModelRunner") -> None:
    """Log what the caches, the drafter and the token table take."""
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB; drafter state: %d bytes; token table: "
        "%.1f MiB of %s memory",
        runner.num_kv_blocks,
        runner.config.block_size,
        sum(kv.num_bytes for kv in runner.kv_caches) / 2**30,
        runner.drafter.state_bytes(),
        runner.state.all_token_ids.tensor.nbytes / 2**20,
        "pinned host" if runner.config.token_table == "pinned" else "device",
    )
