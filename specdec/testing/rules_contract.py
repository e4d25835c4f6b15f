"""Rules about the calls of a step: what a drafter may read, write and draw from."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_DRAFT, noise_gumbel, noise_key, noise_uniform
from specdec.engine import Engine
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    HostRow,
    Noise,
)
from specdec.testing.play import Play, draw_arrivals, play, same_arrivals
from specdec.testing.rule import NotApplicable, require, require_drafts
from specdec.testing.subject import Subject
from specdec.testing.watch import (
    GuardedBuffers,
    random_states,
    refuse_host_reads,
    rows_of,
    run_padding,
    same,
    views_of,
    watch,
)


def check_bounds(subject: Subject) -> str | None:
    """Check that nothing outside the step's rows and columns is written."""
    require_drafts(subject)
    engine = subject.engine("random", **subject.with_confidence(0.0))
    guard = GuardedBuffers(engine)

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        before = {key: t.clone() for key, t in _buffers(engine).items()}
        yield ctx
        _check_writes(engine, name, ctx, before)
        spoilt = guard.overwritten()
        require(
            spoilt is None,
            f"{name}() wrote before or behind {spoilt}",
            "mask every store by the buffer's shape",
        )

    watch(engine, around)
    play(engine, draw_arrivals(subject, 2))
    before = {key: t.clone() for key, t in _buffers(engine).items()}
    run_padding(engine)
    changed = [key for key, t in _buffers(engine).items() if not same(before[key], t)]
    require(
        not changed,
        f"a step of padding alone wrote {', '.join(changed)}",
        "write through ctx.idx_mapping, and nothing where it is -1 (runner.rows.scatter_rows)",
    )
    return None


def _buffers(engine: Engine) -> dict[str, Tensor]:
    """Return what a drafter writes to, by name."""
    runner = engine.runner
    found = {"draft_tokens": runner.state.draft_tokens, "draft_kind": runner.state.draft_kind}
    if runner.draft_logits is not None:
        found["draft_logits"] = runner.draft_logits
    if runner.draft_confidence is not None:
        found["draft_confidence"] = runner.draft_confidence
    if runner.draft_kv is not None:
        cells = runner.draft_kv.num_blocks * engine.config.block_size
        for i, (keys, values) in enumerate(
            zip(runner.draft_kv.keys, runner.draft_kv.values, strict=True)
        ):
            found[f"draft keys {i}"], found[f"draft values {i}"] = keys[:cells], values[:cells]
    return found


def _check_writes(engine: Engine, name: str, ctx: Any, before: dict[str, Tensor]) -> None:
    """Compare the buffers with what they were before one call."""
    state, own = engine.runner.state, rows_of(ctx)
    for key, tensor in _buffers(engine).items():
        outside = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
        what = "rows that are not in the step"
        if key.startswith("draft keys") or key.startswith("draft values"):
            # A row's blocks are those of its owner, also where the owner waits in this step.
            table, size = state.block_table.tensor, engine.config.block_size
            held = [b for r in engine.scheduler.running if r.row in own for b in r.block_ids]
            blocks = torch.tensor(held, dtype=torch.int64, device=tensor.device)
            assert table.shape[1] * size >= engine.config.max_model_len
            outside.view(-1, size)[blocks] = False
            what = "blocks of other requests"
        else:
            outside[own] = False
        require(
            same(tensor[outside], before[key][outside]),
            f"{name}() wrote {key} of {what}",
            "write through ctx.idx_mapping, and KV through the row's block table alone",
        )


def check_read_only(subject: Subject) -> str | None:
    """Check that the state, the contexts and the target's KV are as they were after each call."""
    require_drafts(subject)
    engine = subject.engine("random", num_kv_blocks=40)

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        views = views_of(engine, ctx)
        before = {key: t.clone() for key, t in views.items()}
        yield ctx
        views = views_of(engine, ctx)
        changed = [key for key, t in before.items() if not same(t, views[key])]
        require(
            not changed,
            f"{name}() changed {', '.join(changed)}, which it may only read",
            "work on copies: an operation in place (add_, clamp_, copy_) on a view changes it",
        )

    watch(engine, around)
    play(engine, draw_arrivals(subject, 3))
    return None


def check_host_reads(subject: Subject) -> str | None:
    """Check that no call reads a value on the host, nor takes a shape from one."""
    require_drafts(subject)
    if not subject.capabilities.graph_safe:
        raise NotApplicable("declared graph_safe=False: it runs eager, outside of the graph")
    engine = subject.engine("random")

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        with refuse_host_reads():
            yield ctx

    watch(engine, around)
    play(engine, draw_arrivals(subject, 4, num_requests=5))
    return None


def check_host_drafts(subject: Subject) -> str | None:
    """Check that a drafter on the host keeps to what it is asked for, and changes no text."""
    require_drafts(subject)
    if not subject.capabilities.on_cpu:
        raise NotApplicable("declared on_cpu=False: it proposes on the device")
    engine = subject.engine("random", num_kv_blocks=18)
    drafter: Any = engine.drafter
    inner = drafter.propose_on_host

    def propose_on_host(rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        before = [list(row.request.token_ids) for row in rows]
        runs = inner(rows)
        changed = [list(row.request.token_ids) for row in rows] != before
        require(
            not changed,
            "propose_on_host() changed the token ids of a request",
            "read request.token_ids, and copy what is to be changed",
        )
        require(
            len(runs) == len(rows),
            f"propose_on_host() returned {len(runs)} runs for {len(rows)} rows",
            "return a run for each row, an empty one where there is no draft",
        )
        many = [row for row, run in zip(rows, runs, strict=True) if len(run) > row.num_drafts]
        require(
            not many,
            f"propose_on_host() returned more than the {many[0].num_drafts if many else 0} drafts "
            f"that a row can use",
            "return at most row.num_drafts drafts: it may be less than K",
        )
        return runs

    drafter.propose_on_host = propose_on_host
    play(engine, draw_arrivals(subject, 8))
    return None


def check_kinds(subject: Subject) -> str | None:
    """Check kinds, and that a law was written for each draft that claims to have one."""
    require_drafts(subject)
    engine, with_q = subject.engine("random", max_num_reqs=2), 0
    logits = engine.runner.draft_logits

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        nonlocal with_q
        if name != "propose":
            yield ctx
            return
        if logits is not None:  # what was not given to any token stays that way
            logits[torch.isfinite(logits)] = float("nan")
        yield ctx
        with_q += _check_kinds(engine, ctx)

    watch(engine, around)
    greedy = same_arrivals(subject, 61, 4, temperature=0.0, max_tokens=12)
    sampled = same_arrivals(subject, 67, 4, temperature=0.8, max_tokens=12)
    play(engine, [a for pair in zip(greedy, sampled, strict=True) for a in pair])
    if not subject.capabilities.offers_q:
        return None
    require(
        with_q > 0,
        "offers_q=True is declared, and no draft of a sampled request had kind 2",
        "set draft_kind to DRAFT_KIND_WITH_Q for the rows whose draft_logits were written",
    )
    return None


def _check_kinds(engine: Engine, ctx: Any) -> int:
    """Check the rows that a call proposed for; returns how many drafts had a law."""
    state, logits, with_q = engine.runner.state, engine.runner.draft_logits, 0
    sampled = ctx.samples.tolist()
    for place, row in enumerate(ctx.idx_mapping.tolist()):
        if row < 0 or not sampled[place]:
            continue
        kind, limit = int(state.draft_kind[row]), int(state.draft_limit[row])
        known = {DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT}
        known |= {DRAFT_KIND_WITH_Q} if logits is not None else set()
        require(
            kind in known,
            f"draft_kind is {kind}; {sorted(known)} go with offers_q={logits is not None}",
            "set kinds of specdec.protocols alone, or leave the kind, which is cleared to 0",
        )
        for i, draft in enumerate(state.draft_tokens[row, : min(limit, ctx.num_drafts)].tolist()):
            if draft < 0 or kind != DRAFT_KIND_WITH_Q:
                break
            assert logits is not None
            with_q += 1
            law = logits[row, i]
            require(
                not bool(law.isnan().any()),
                f"draft {i} has kind 2, but its draft_logits were not written in this step: a "
                f"stale kind, or a stale law",
                "write kind and draft_logits together, in every step, one-hot rows as kind 1",
            )
            require(
                float(law[draft]) > float("-inf"),
                f"draft {i} is token {draft}, which its draft_logits give no chance",
                "store the very logits that the draft was drawn from, divided by the temperature",
            )
    return with_q


def check_noise(subject: Subject) -> str | None:
    """Check that randomness comes through ctx.noise, and no other way."""
    require_drafts(subject)
    plain = _play_with_noise(subject, seed=71, salt=0)
    reseeded = _play_with_noise(subject, seed=72, salt=0)
    keys = plain.proposals.keys() & reseeded.proposals.keys()
    differ = [k for k in keys if plain.proposals[k].drafts != reseeded.proposals[k].drafts]
    require(
        not differ,
        f"{len(differ)} of {len(keys)} proposals changed with the request's seed or the global "
        f"random generators, while ctx.noise stayed the same",
        "draw through ctx.noise alone: another stream (that of the target, say) makes drafts "
        "depend on what judges them",
    )
    if not subject.capabilities.offers_q:
        return None
    salted = _play_with_noise(subject, seed=71, salt=1)
    keys = plain.proposals.keys() & salted.proposals.keys()
    require(
        any(plain.proposals[k].drafts != salted.proposals[k].drafts for k in keys),
        f"none of {len(keys)} sampled proposals changed with ctx.noise",
        "draw through ctx.noise (ctx.noise.draw takes logits): what is drawn by noise of one's own "
        "is not keyed by the request's seed",
    )
    return None


def _play_with_noise(subject: Subject, seed: int, salt: int) -> Play:
    """Play greedy texts while the drafter draws at temperature 0.8 with noise of the kit."""
    engine = subject.engine("greedy")
    device, rows = subject.device, engine.config.max_num_reqs or 0
    seeds = torch.arange(rows, device=device) + 1000 * salt
    noise, temperature = _noise(seeds), torch.full((rows,), 0.8, device=device)

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        before = random_states()
        if name == "observe":
            yield ctx
        else:
            yield dataclasses.replace(ctx, noise=noise, temperature=temperature)
        require(
            random_states() == before,
            f"{name}() drew from a global random generator",
            "draw through ctx.noise, so that drafts are keyed by the request's seed and position",
        )

    watch(engine, around)
    arrivals = same_arrivals(subject, 73, 5, temperature=0.0, max_tokens=20)
    for arrival in arrivals:
        arrival.params.seed = (arrival.params.seed or 0) + 1000 * seed
    with _reseeded(seed):
        return play(engine, arrivals, record=True)


@contextmanager
def _reseeded(seed: int) -> Iterator[None]:
    """Set the global random generators, and put them back afterwards."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=None if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])


def _noise(seeds: Tensor) -> Noise:
    """Return noise of the draft stream, keyed by these seeds of the rows."""
    temperature = torch.full((len(seeds),), 0.8, device=seeds.device)

    def gumbel(rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        a, b = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
        return noise_gumbel((a[:, None], b[:, None]), token_ids.int())

    def uniform(rows: Tensor, positions: Tensor) -> Tensor:
        key = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
        return noise_uniform(key, torch.full_like(key[0], -1))

    def draw(logits: Tensor, idx_mapping: Tensor, positions: Tensor) -> Tensor:
        return gumbel_sample(logits, idx_mapping, positions, temperature, seeds, STREAM_DRAFT)

    return Noise(gumbel, uniform, draw)
