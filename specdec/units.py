"""Sums of a trace by unit: by prompt, by group, and by what two arms both ran.

`specdec.metrics` says what the units are, and makes every metric of these sums.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from specdec.intervals import Array


class ArmTraces(NamedTuple):
    """What an arm is compared by."""

    requests: pd.DataFrame  # its rows of the request trace
    timings: pd.DataFrame  # its rows, with `num_prompts`
    baseline: pd.DataFrame  # rows of the timings of its run's autoregressive arm


def verify_rows(requests: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of verification steps."""
    return requests.loc[requests["is_verify"].astype(bool)]


def prompts_of(requests: pd.DataFrame) -> pd.Series:
    """Return each row's prompt: the request id, without the turn that a conversation's ends in."""
    names = list(requests["request_id"])
    if "turn" in requests:
        # Beside the rows of a trace without turns they are decimals, or missing.
        suffixes = {turn: f"/{int(turn)}" for turn in requests["turn"].dropna().unique()}
        pairs = zip(names, requests["turn"], strict=True)
        names = [str(name).removesuffix(suffixes.get(turn, "")) for name, turn in pairs]
    return pd.Series(names, index=requests.index, dtype=object)


def undrafted(requests: pd.DataFrame) -> npt.NDArray[Any]:
    """Return how many positions of each verify row held no valid draft."""
    return np.asarray(requests["num_positions"] - 1 - requests["num_drafted"])


def counted(requests: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Return the rows with their `prompt`, and 0 in the columns where a row is no verify row.

    So a prompt without any verify row is a unit that adds nothing. `num_rows` is 1 in each row,
    `num_undrafted` counts as `undrafted` does.
    """
    frame = requests.assign(
        num_rows=1, num_undrafted=undrafted(requests), prompt=prompts_of(requests)
    )
    frame.loc[~requests["is_verify"].astype(bool), columns] = 0
    return frame


def sums_by(frame: pd.DataFrame, unit: str, columns: list[str]) -> Array:
    """Return [num_units, num_columns] float64: sums per unit, in the units' sorted order."""
    return np.asarray(frame.groupby(unit)[columns].sum(), dtype=np.float64)


def paired_lengths(one: ArmTraces, other: ArmTraces) -> Array:
    """Return [num_prompts, 4] float64: committed tokens and verify rows of `one` and of `other`.

    Of the prompts that both have.
    """
    columns = ["num_committed", "num_rows"]
    frames = [counted(arm.requests, columns) for arm in (one, other)]
    shared = sorted(set(frames[0]["prompt"]) & set(frames[1]["prompt"]))
    both = [sums_by(f.loc[f["prompt"].isin(shared)], "prompt", columns) for f in frames]
    return np.hstack(both)


def paired_speeds(one: ArmTraces, other: ArmTraces) -> Array:
    """Return [num_blocks, 8] float64: tokens and seconds of `one`, its baseline, `other`, its own.

    A block is the smallest set of whole groups with which both ran the same prompts.
    """
    columns = ["num_tokens", "wall_s"]
    sums: list[Array] = []
    for arm, blocks in zip((one, other), _blocks(one, other), strict=True):
        for timings in (arm.timings, arm.baseline):
            placed = timings.assign(block=[blocks.get(group, -1) for group in timings["group"]])
            sums.append(sums_by(placed.loc[placed["block"] >= 0], "block", columns))
    return np.hstack(sums)


def paired_steps(
    one: ArmTraces, other: ArmTraces, steps: tuple[pd.DataFrame, pd.DataFrame]
) -> Array:
    """Return [num_blocks, 4] float64: ms and number of steps of `one`, then of `other`.

    Blocks are those of `paired_speeds`.

    Args:
        one, other: two arms.
        steps: of each the rows of its step trace that count.
    """
    columns = ["step_ms", "num_steps"]
    sums: list[Array] = []
    for arm, own, blocks in zip((one, other), steps, _blocks(one, other), strict=True):
        groups = _groups_of_prompts(arm)
        pairs = zip(arm.requests["step"], prompts_of(arm.requests), strict=True)
        placed = {step: blocks.get(groups.get(prompt, -1), -1) for step, prompt in pairs}
        counting = own.assign(num_steps=1, block=[placed.get(step, -1) for step in own["step"]])
        # A block without any such step is a unit that adds nothing.
        blank = pd.DataFrame({"block": list(set(blocks.values())), "step_ms": 0.0, "num_steps": 0})
        whole = pd.concat([blank, counting.loc[counting["block"] >= 0, list(blank)]])
        sums.append(sums_by(whole, "block", columns))
    return np.hstack(sums)


def _blocks(one: ArmTraces, other: ArmTraces) -> list[dict[int, int]]:
    """Return group -> block of the two arms; a group that is in no block is left out.

    Groups are the nodes of a graph in which a prompt joins the group that ran it in one arm to the
    one of the other arm. A block is a connected component, unless a prompt of it has no partner.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    groups = _groups_of_prompts(one), _groups_of_prompts(other)
    nodes: dict[tuple[int, int], int] = {}
    for side, of_prompt in enumerate(groups):
        for group in of_prompt.values():
            nodes.setdefault((side, group), len(nodes))
    edges = [(nodes[0, groups[0][p]], nodes[1, groups[1][p]]) for p in groups[0] if p in groups[1]]
    ends = np.asarray(edges, dtype=np.int64).reshape(-1, 2).T
    shape = (len(nodes), len(nodes))
    graph = coo_array((np.ones(len(edges)), (ends[0], ends[1])), shape=shape)
    block = connected_components(graph, directed=False)[1]
    broken = {
        block[nodes[side, group]]
        for side, of_prompt in enumerate(groups)
        for prompt, group in of_prompt.items()
        if prompt not in groups[1 - side]
    }
    found: list[dict[int, int]] = [{}, {}]
    for (side, group), node in nodes.items():
        if block[node] not in broken:
            found[side][group] = int(block[node])
    return found


def _groups_of_prompts(arm: ArmTraces) -> dict[str, int]:
    """Return prompt -> group, of the groups that the arm and its baseline ran.

    The trace tells no groups, but they ran one after the other, each with its number of prompts.
    Where the numbers do not add up there is no telling: then no prompt has a group.
    """
    prompts = list(prompts_of(arm.requests).unique())
    timings = arm.timings.sort_values("group")
    groups = np.repeat(np.asarray(timings["group"]), np.asarray(timings["num_prompts"])).tolist()
    if len(groups) != len(prompts):
        return {}
    known = set(arm.baseline["group"])
    return {p: group for p, group in zip(prompts, groups, strict=True) if group in known}
