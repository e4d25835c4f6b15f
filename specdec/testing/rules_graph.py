"""Captured calls against their eager twins."""

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.testing.play import Play, Proposal, check_texts, draw_arrivals, play
from specdec.testing.rule import NotApplicable, RuleBroken, require, require_drafts
from specdec.testing.subject import Subject

_FIX = (
    "keep to fixed addresses (tensors made in bind()), and decide nothing in Python by what a "
    "step holds: a graph replays what its capture launched"
)
_TOLERANCE = 1e-3  # of a probability on a CPU, whose eager steps have other shapes


def check_graph_replay(subject: Subject) -> str | None:
    """Check drafts, kinds, laws and KV of replayed graphs on changed inputs."""
    require_drafts(subject)
    if not subject.capabilities.graph_safe:
        raise NotApplicable("declared graph_safe=False: it runs eager, outside of the graph")
    on_gpu = subject.device.type == "cuda"
    for seed, steps_in_flight in ((5, 1), (6, 2)):
        arrivals = draw_arrivals(subject, seed)
        plays, kv = {}, {}
        for scope in ("none", "step"):
            try:
                engine = subject.engine(graph_scope=scope, max_steps_in_flight=steps_in_flight)
            except UnsupportedError as error:
                raise RuleBroken(str(error), _FIX) from error
            plays[scope] = play(engine, arrivals, record=True)
            kv[scope] = _draft_kv(engine.runner.kv_caches[1:])
            if scope == "step":
                launches = engine.runner.graphs.launches
                require(launches["step"] > 0, "no step was one graph", _FIX)
        check_texts(subject, plays["step"], arrivals, _FIX)
        _compare(plays["none"], plays["step"], exact=on_gpu)
        if on_gpu:
            for eager, replayed in zip(kv["none"], kv["step"], strict=True):
                require(torch.equal(eager, replayed), "draft KV of a replayed graph differs", _FIX)
    return None if on_gpu else "captured calls on captured shapes; a GPU replays real graphs"


def _draft_kv(caches: list) -> list[Tensor]:
    """Return what lies in the drafter's KV, behind the blocks nothing."""
    return [
        tensor[: kv.num_blocks * kv.block_size].cpu()
        for kv in caches
        for tensor in (*kv.keys, *kv.values)
    ]


def _compare(eager: Play, replayed: Play, exact: bool) -> None:
    """Compare what both proposed for the same texts."""
    keys = eager.proposals.keys() & replayed.proposals.keys()
    assert len(keys) > 0.5 * len(eager.proposals), "the plays have hardly a text in common"
    differ = []
    for key in sorted(keys):
        a, b = eager.proposals[key], replayed.proposals[key]
        if (a.drafts, a.kind) != (b.drafts, b.kind) or not _same_law(a, b, exact):
            differ.append((key[1], a, b))
    if len(differ) > (0 if exact else max(1, 0.02 * len(keys))):
        length, a, b = differ[0]
        raise RuleBroken(
            f"{len(differ)} of {len(keys)} proposals of replayed steps differ from those of the "
            f"eager twin, the first at length {length}: {list(b.drafts)} of kind {b.kind} instead "
            f"of {list(a.drafts)} of kind {a.kind}",
            _FIX,
        )


def _same_law(a: Proposal, b: Proposal, exact: bool) -> bool:
    if a.logits is None or b.logits is None:
        return a.logits is b.logits
    if exact:
        return torch.equal(a.logits, b.logits)
    return float((a.logits.softmax(-1) - b.logits.softmax(-1)).abs().max()) <= _TOLERANCE
