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
    choices = runner.draft_choices
    graphs.launches.clear()  # the memory profile is no step of the run
    if config.graph_scope == "none":
        return
    for num_verified in reversed(choices):
        sizes = reversed(graphs.sizes[num_verified])
        for shape in itertools.product(sizes, reversed(choices), (False, True)):
            _capture_shape(runner, num_verified, *shape)
    runner.padding_is_plain = False
    graphs.launches.clear()
    graphs.log_cost()


def _capture_shape(
    runner: "ModelRunner", num_verified: int, size: int, num_drafted: int, plain: bool
) -> None:
    """Capture the parts of one shape that are not captured yet."""
    graphs, config = runner.graphs, runner.config
    parts = graph_parts(
        config.num_speculative_tokens, config.graph_scope, runner.drafter.capabilities
    )
    keys: dict[Part, GraphKey] = {
        part: GraphKey.of(part, size, num_verified, num_drafted, plain)
        for part in parts
        # Its passes have one token a request: the number of drafts verified does not matter.
        if part != "propose" or num_verified == num_drafted > 0
    }
    runner.padding_is_plain = plain
    # Runs eager, as nothing of this shape is captured yet: every kernel is compiled by it.
    plan = padding_plan(size, num_verified + 1, False, config.max_model_len, num_drafted)
    runner.execute_model(plan).output.wait()
    functions = runner.graph_functions(size, num_verified, num_drafted, plain)
    captured = [(key, functions[part]) for part, key in keys.items()]
    if config.steps_per_launch > 1 and "step" in keys and num_verified == num_drafted:
        captured.append(runner.repeated_step(keys["step"]))
    for key, function in captured:
        if key in graphs:
            continue
        try:
            with torch.inference_mode(), runner.on_device():
                graphs.capture(key, function)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the graph of {size} requests does not fit the device's memory beside "
                f"{runner.num_kv_blocks} KV blocks; lower num_kv_blocks, graph_num_reqs or the "
                f"choices of draft_length"
            ) from error
        except Exception as error:  # whatever a plug-in's code raises, the reason is shown
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedError(
                f"part {key.part!r} of a step with drafter {type(runner.drafter).__name__} cannot "
                f"be captured in a CUDA graph ({reason}); set graph_safe=False in the drafter's "
                f"capabilities, or graph_scope='none'"
            ) from error
