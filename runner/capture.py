"""Capture the parts of uniform steps that a drafter and a scope allow, shape by shape."""

import itertools
from typing import TYPE_CHECKING

import torch

from runner.cuda_graphs import GraphKey, Part
from runner.input_batch import padding_plan
from specdec.errors import CapacityError, UnsupportedError
from specdec.protocols import DrafterCapabilities

if TYPE_CHECKING:
    from runner.model_runner import ModelRunner


def graph_parts(num_speculative_tokens: int, scope: str, wants: DrafterCapabilities) -> list[Part]:
    """Return the parts of a step that a scope and a drafter allow to capture."""
    k = num_speculative_tokens
    drafts = k > 0 and wants.graph_safe
    parts: list[Part] = []
    if scope == "step":
        parts.append("step" if drafts or k == 0 else "target")
    if scope == "draft" and drafts:
        parts.append("draft")
    if scope != "none" and drafts and wants.splits_first_pass:
        parts.append("propose")
    return parts


def capture_graphs(runner: "ModelRunner") -> None:
    """Capture every part for every size, from the largest on.

    Raises:
        UnsupportedError: the drafter does what a graph cannot hold.
        CapacityError: the device's memory does not hold the graphs.
    """
    graphs, config = runner.graphs, runner.config
    k, name = config.num_speculative_tokens, type(runner.drafter).__name__
    graphs.launches.clear()  # the memory profile is no step of the run
    if config.graph_scope == "none":
        return
    parts = graph_parts(k, config.graph_scope, runner.drafter.capabilities)
    for size, plain in itertools.product(reversed(graphs.sizes), (False, True)):
        runner.padding_is_plain = plain
        # Runs eager, as nothing of this shape is captured yet: every kernel is compiled by it.
        plan = padding_plan(size, k + 1, max_seq_len=config.max_model_len)
        runner.execute_model(plan).output.wait()
        functions = runner.graph_functions(size, plain)
        for part in parts:
            varies = part in ("step", "target")
            if plain and not varies:
                continue  # a drafter's passes know nothing of the sampler's parameters
            try:
                with torch.inference_mode(), runner.on_device():
                    graphs.capture(GraphKey(part, size, k, k, plain), functions[part])
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"the graph of {size} requests does not fit the device's memory beside "
                    f"{runner.num_kv_blocks} KV blocks; lower num_kv_blocks or graph_num_reqs"
                ) from error
            except Exception as error:  # whatever a plug-in's code raises, the reason is shown
                reason = " ".join(str(error).split())[:200]
                raise UnsupportedError(
                    f"part {part!r} of a step with drafter {name} cannot be captured in a CUDA "
                    f"graph ({reason}); set graph_safe=False in the drafter's capabilities, or "
                    f"graph_scope='none'"
                ) from error
    runner.padding_is_plain = False
    graphs.launches.clear()
    graphs.log_cost()
