"""What the device and the CUDA runtime did in a profiled loop, read from a torch profiler trace."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LAUNCH_CALLS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_GRAPH_CALLS = ("cudaGraphLaunch", "cuGraphLaunch")
# Calls that make the host wait for the device, or copy memory that is not pinned.
FORBIDDEN_CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
)


@dataclass(frozen=True)
class _Node:
    """A kernel, copy or fill on the device."""

    name: str
    start_us: float
    end_us: float
    correlation: int


@dataclass(frozen=True)
class DeviceTrace:
    """A profiled loop of steps."""

    num_steps: int
    runtime_calls: Counter[str]  # inside the steps
    nodes: list[_Node]  # launched inside the steps, in order of their start
    launches: list[tuple[str, int]]  # (runtime call, correlation) of each launch
    pageable_copies: list[str]
    num_early_waits: int  # event waits of a step that came before its launch

    def kernel_us(self, part_of_name: str) -> list[float]:
        """Return the microseconds of every kernel whose name holds a text."""
        return [n.end_us - n.start_us for n in self.nodes if part_of_name in n.name]

    def per_step(self) -> dict[str, Any]:
        """Return counts and device times by step."""
        steps = self.num_steps
        spans = self._spans()
        between = [b[0] - a[1] for a, b in itertools.pairwise(spans)]
        inside = [span[1] - span[0] - span[2] for span in spans]
        period = (spans[-1][0] - spans[0][0]) / (len(spans) - 1) if len(spans) > 1 else np.nan
        calls = {name: n / steps for name, n in sorted(self.runtime_calls.items())}
        return {
            "runtime_calls": calls,
            "kernel_launches": sum(calls.get(name, 0.0) for name in _LAUNCH_CALLS),
            "graph_launches": sum(calls.get(name, 0.0) for name in _GRAPH_CALLS),
            "num_nodes": len(self.nodes) / steps,
            "pageable_copies": len(self.pageable_copies) / steps,
            "early_waits": self.num_early_waits / steps,
            "forbidden_calls": {
                name: calls[name] for name in FORBIDDEN_CALLS if calls.get(name, 0.0) > 0
            },
            "profiled_period_us": float(period),
            "profiled_idle_between_launches_us": float(np.median(between)) if between else None,
            "profiled_gaps_inside_launch_us": float(np.median(inside)) if inside else None,
            "profiled_busy_us": float(np.median([span[2] for span in spans])) if spans else None,
        }

    def _spans(self) -> list[tuple[float, float, float]]:
        """Return (start, end, busy) of the nodes of each graph launch."""
        nodes: dict[int, list[_Node]] = {}
        for node in self.nodes:
            nodes.setdefault(node.correlation, []).append(node)
        spans = []
        for call, correlation in self.launches:
            own = nodes.get(correlation, [])
            if call in _GRAPH_CALLS and own:
                start, end = own[0].start_us, max(node.end_us for node in own)
                spans.append((start, end, _union(own)))
        return spans


def _union(nodes: list[_Node]) -> float:
    """Return the microseconds in which at least one of the nodes ran; they come by start."""
    busy, reached = 0.0, -np.inf
    for node in nodes:
        busy += max(0.0, node.end_us - max(node.start_us, reached))
        reached = max(reached, node.end_us)
    return busy


def read_trace(path: Path, marker: str) -> DeviceTrace:
    """Read a chrome trace.

    Args:
        path: of the JSON file that the profiler exported.
        marker: name of the range around each step.
    """
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e.get("name") == marker and e.get("cat") == "user_annotation"]
    first = min(e["ts"] for e in steps)
    last = max(e["ts"] + e["dur"] for e in steps)
    calls = [
        e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and first <= e["ts"] <= last
    ]
    launches = [
        (e["name"], e["args"]["correlation"])
        for e in sorted(calls, key=lambda e: e["ts"])
        if e["name"] in _LAUNCH_CALLS + _GRAPH_CALLS
    ]
    known = {e["args"].get("correlation") for e in calls}
    nodes = [
        _Node(e["name"], e["ts"], e["ts"] + e["dur"], e["args"].get("correlation", -1))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and e["args"].get("correlation") in known
    ]
    nodes.sort(key=lambda node: node.start_us)
    return DeviceTrace(
        num_steps=len(steps),
        runtime_calls=Counter(e["name"] for e in calls),
        nodes=nodes,
        launches=launches,
        pageable_copies=[n.name for n in nodes if "Pageable" in n.name],
        num_early_waits=sum(_early_waits(step, calls) for step in steps),
    )


def _early_waits(step: dict[str, Any], calls: list[dict[str, Any]]) -> int:
    """Return how many event waits of a step came before the last launch of it."""
    own = [c for c in calls if step["ts"] <= c["ts"] <= step["ts"] + step["dur"]]
    launches = [c["ts"] for c in own if c["name"] in _LAUNCH_CALLS + _GRAPH_CALLS]
    last = max(launches, default=-np.inf)
    return sum(c["name"] == "cudaEventSynchronize" and c["ts"] < last for c in own)
