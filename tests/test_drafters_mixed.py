"""Mixtures: which child each row takes its drafts from, what is learned of it, and the texts."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from drafters.base import DrafterBase, DrafterConfig
from drafters.mixed import MixedConfig, MixedDrafter
from runner.rows import scatter_rows
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.protocols import (
    DRAFT_KIND_WITH_Q,
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    StateView,
    TargetView,
    VerifyContext,
)
from specdec.registry import register_drafter
from tests.draft_cases import PADDING, VERIFY, DraftCase, DraftSizes
from tests.models import random_prompts, scripted_model, tiny_model, tiny_target
from tests.schedules import draw_schedule, run_schedule
from tests.test_graph_scopes import SCOPES, SIZES, autoregressive

K = 3
COUNTING = [(i + 1) % 100 for i in range(100)]
HOST = "draft eager: the drafter runs on the host"


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(tiny_model("llama"))


@dataclass
class ToyConfig(DrafterConfig):
    """Proposes last token + step, ..; in rows whose last token is odd, where so asked."""

    name: str = "test_toy"
    step: int = 1
    odd_only: bool = False
    kind: int = 0
    first_hole: int = 9
    wants: dict[str, Any] = field(default_factory=dict)


@register_drafter("test_toy", ToyConfig)
class Toy(DrafterBase):
    """Proposes from the last token alone, and notes what it is shown."""

    config: ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.capabilities = DrafterCapabilities(splits_first_pass=True)

    def load(self, target: TargetView) -> None:
        self.capabilities = DrafterCapabilities(splits_first_pass=True, **self.config.wants)

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        super().bind(state, buffers)
        self.seen: list[tuple[list[list[int]], list[int]]] = []

    def propose(self, ctx: DraftContext) -> None:
        rows = ctx.idx_mapping.long().clamp(min=0)
        columns = torch.arange(ctx.num_drafts)
        last = ctx.state.last_sampled_tokens[rows]
        drafts = last + self.config.step * (1 + columns)
        drafts = torch.where((columns >= self.config.first_hole), -1, drafts % 97)
        if self.config.odd_only:
            drafts = torch.where(last % 2 == 1, drafts, -1)
        scatter_rows(self.buffers.draft_tokens[:, : ctx.num_drafts], ctx.idx_mapping, drafts)
        if self.config.kind:
            kind = torch.full((len(rows),), self.config.kind, dtype=torch.int8)
            scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kind)

    def observe(self, ctx: VerifyContext) -> None:
        rows = ctx.idx_mapping.long().clamp(min=0)
        self.seen.append((self.buffers.draft_tokens[rows].tolist(), ctx.is_verify.tolist()))


def toy(**options: Any) -> dict[str, Any]:
    return {"name": "test_toy", **options}


def mixed(*drafters: Any, **options: Any) -> dict[str, Any]:
    return {"name": "mixed", "drafters": list(drafters), **options}


class Bound:
    """A mixture bound to a step made by hand.

    Args:
        config: of the mixture.
        kinds: of the step's places.
    """

    def __init__(self, config: dict[str, Any], kinds: tuple[int, ...] = (VERIFY,) * 6) -> None:
        self.case = DraftCase(DraftSizes((*kinds, PADDING), num_drafts=K), torch.device("cpu"))
        values = {key: value for key, value in config.items() if key != "name"}
        self.drafter = MixedDrafter(MixedConfig(**values))
        cpu = torch.device("cpu")
        self.drafter.load(TargetView(None, 97, 1, torch.float32, cpu, K, 120))
        self.buffers = self.case.buffers()
        self.drafter.bind(self.case.state, self.buffers)
        self.rows = [place.row for place in self.case.places if place.row >= 0]
        for row in self.rows:
            self.drafter.add_request(row)

    def propose(self) -> list[list[int]]:
        self.drafter.first_pass(self.case.ctx)
        self.drafter.propose(self.case.ctx)
        return self.buffers.draft_tokens[self.rows].tolist()

    def observe(self, accepted: list[int]) -> None:
        ctx = self.case.ctx
        num_sampled = torch.tensor([*[n + 1 for n in accepted], 0], dtype=torch.int32)
        self.drafter.observe(
            VerifyContext(ctx.idx_mapping, ctx.is_verify, num_sampled, ctx.num_rejected)
        )

    def last(self) -> list[int]:
        return self.case.state.last_sampled_tokens[self.rows, 0].tolist()

    def chosen(self) -> list[int]:
        return self.drafter.chosen[self.rows].tolist()


def test_the_first_that_proposes_is_taken_row_by_row() -> None:
    bound = Bound(mixed(toy(step=2, odd_only=True, kind=DRAFT_KIND_WITH_Q), toy(step=5)))
    drafts, last = bound.propose(), bound.last()
    assert {token % 2 for token in last} == {0, 1}
    for token, run, child in zip(last, drafts, bound.chosen(), strict=True):
        step = 2 if token % 2 else 5
        assert run == [token + step * (1 + i) for i in range(K)]
        assert child == (0 if token % 2 else 1)
    kinds = bound.buffers.draft_kind[bound.rows].tolist()
    assert kinds == [DRAFT_KIND_WITH_Q if token % 2 else 0 for token in last]


def test_no_child_with_a_draft_leaves_no_draft_and_no_old_one() -> None:
    bound = Bound(mixed(toy(odd_only=True), toy(odd_only=True)))
    table = bound.case.state.last_sampled_tokens
    table[bound.rows] = 1
    assert min(min(run) for run in bound.propose()) >= 0
    table[bound.rows] = 2
    assert bound.propose() == [[-1] * K] * 6
    assert bound.chosen() == [-1] * 6


def test_a_short_run_of_a_preferred_child_is_not_filled_up_by_another() -> None:
    bound = Bound(mixed(toy(step=2, first_hole=1), toy(step=5)))
    assert bound.propose() == [[token + 2, -1, -1] for token in bound.last()]


def test_children_see_their_own_drafts_judged_and_no_others() -> None:
    bound = Bound(mixed(toy(step=2, odd_only=True), toy(step=5)))
    drafts, last = bound.propose(), bound.last()
    bound.buffers.draft_tokens[bound.rows, 1:] = -1  # cut behind the first, as a row's end does
    bound.observe([1] * 6)
    for index in (0, 1):
        child: Any = bound.drafter.children[index]
        (tokens, is_verify) = child.seen[-1]
        own = [token % 2 == 1 - index for token in last]
        assert is_verify == [*map(int, own), 0]
        for shown, run, is_own in zip(tokens[:6], drafts, own, strict=True):
            assert shown == ([run[0], -1, -1] if is_own else [-1] * K)
    counts = bound.drafter.num_chosen[bound.rows].tolist()
    assert counts == [[1, 0] if token % 2 else [0, 1] for token in last]
    bound.drafter.add_request(bound.rows[0])
    assert bound.drafter.num_chosen[bound.rows[:2]].tolist() == [[0, 0], counts[1]]


def test_best_settles_on_the_child_that_is_accepted_and_notices_a_change() -> None:
    config = mixed(toy(step=2), toy(step=5), policy="best", decay=0.5, explore_every=8)
    bound = Bound(config)
    good = [0, 1, 0, 1, 0, 1]  # of each row
    taken = []
    for step in range(64):
        if step == 32:
            good = [1 - child for child in good]
        bound.propose()
        chosen = bound.chosen()
        taken.append([a == b for a, b in zip(chosen, good, strict=True)])
        bound.observe([K if right else 0 for right in taken[-1]])
    for row in range(6):
        before = [right[row] for right in taken[8:32]]
        after = [right[row] for right in taken[56:]]
        # Of 8 steps one is an exploration, every other one of the worse child.
        assert before.count(False) in (1, 2)
        assert after.count(False) <= 1
        assert before.count(True) >= 22


@pytest.mark.parametrize("explore_every", [0, 4])
def test_exploration_finds_that_a_child_became_better_and_nothing_else_does(
    explore_every: int,
) -> None:
    config = mixed(toy(step=2), toy(step=5), policy="best", decay=0.5, explore_every=explore_every)
    bound = Bound(config)
    taken = []
    for step in range(60):
        bound.propose()
        taken.append(bound.chosen())
        later = K if step >= 20 else 0
        bound.observe([1 if child == 0 else later for child in taken[-1]])
    assert set(taken[19]) == {0}
    last = [child for children in taken[-8:] for child in children]
    assert set(last) == ({0} if explore_every == 0 else {0, 1})
    if explore_every:
        assert last.count(1) > last.count(0)


def test_whose_turn_it_is_does_not_depend_on_neighbours() -> None:
    narrow = tiny_target(tiny_model("llama", vocab_size=17))
    skipping = {"name": "layer_skip", "num_layers": 2}
    config = mixed("ngram", skipping, policy="best", explore_every=2)
    texts, neighbour = [], SamplingParams(temperature=0, max_tokens=20)
    for alone in (True, False):
        # A neighbour takes a place in the first step, and its prompt cuts the other one in two.
        for seed in range(6):
            engine = Engine(
                narrow, config, "rejection", K, max_model_len=64, max_num_batched_tokens=40
            )
            if not alone:
                engine.add_request("neighbour", [1] * 20, neighbour)
            (prompt,) = random_prompts((30,), seed=seed, vocab_size=17)
            engine.add_request("it", prompt, SamplingParams(seed=seed, max_tokens=24))
            while "it" in engine.unfinished_ids:
                for increment in engine.step():
                    if increment.request_id == "it" and increment.output is not None:
                        texts.append(increment.output.token_ids)
    assert texts[:6] == texts[6:]


@pytest.mark.parametrize(("seed", "scope"), [*enumerate(SCOPES)])
@pytest.mark.parametrize("policy", ["first", "best"])
def test_text_is_that_of_plain_decoding(target: Any, seed: int, scope: str, policy: str) -> None:
    arrivals = draw_schedule(seed)
    expected = autoregressive(target, arrivals)
    model = {"name": "draft_model", "model": "target"}
    drafters = [toy(step=2, odd_only=True), model]
    config = mixed(*drafters, policy=policy, explore_every=3)
    options: dict[str, Any] = {**SIZES, **SCOPES[scope], "max_steps_in_flight": 2}
    engine = Engine(target, config, "sampled_match", K, **options)
    result = run_schedule(engine, arrivals)
    for name, output in result.outputs.items():
        assert output.token_ids == expected[name][: len(output.token_ids)]
    assert sum(output.stats.num_accepted for output in result.outputs.values()) > 0


@pytest.mark.parametrize(("seed", "scope"), [*enumerate(SCOPES)])
def test_text_is_that_of_plain_decoding_beside_a_child_on_the_host(
    target: Any, seed: int, scope: str
) -> None:
    arrivals = draw_schedule(seed)
    expected = autoregressive(target, arrivals)
    config = mixed("suffix", {"name": "draft_model", "model": "target"})
    engine = Engine(target, config, "sampled_match", K, **SIZES, **SCOPES[scope])
    result = run_schedule(engine, arrivals)
    for name, output in result.outputs.items():
        assert output.token_ids == expected[name][: len(output.token_ids)]
    launches = engine.runner.graphs.launches
    assert launches[HOST] > 0
    assert (launches["step"] > 0) == (SCOPES[scope]["graph_scope"] == "step")


@pytest.mark.parametrize("scope", ["none", "step"])
def test_the_host_wins_where_it_proposes_and_the_device_fills_the_rest(scope: str) -> None:
    chain = tiny_target(scripted_model(COUNTING))
    # Right once a text was seen before; the toy on the device always is.
    config = mixed("suffix", toy(step=1))
    engine = Engine(
        chain, config, "greedy", K, max_model_len=128, graph_scope=scope, graph_num_reqs=[2]
    )
    drafter: Any = engine.drafter
    counts = []
    for _ in range(2):
        engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=41))
        row, output = None, None
        while engine.has_requests:
            for request in engine.scheduler.running:
                row = request.row
            for increment in engine.step():
                output = increment.output or output
        assert output is not None
        assert output.token_ids == list(range(6, 47))
        assert output.stats.num_accepted == output.stats.num_drafted > 25
        counts.append(drafter.num_chosen[row].tolist())
    assert counts[0][0] == 0 < counts[0][1]
    assert counts[1][0] > counts[1][1]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"drafters": []}, ("drafters=[]", "two or more")),
        ({"drafters": ["ngram"]}, ("drafters=['ngram']", "two or more")),
        ({"drafters": ["ngram", "ngrm"]}, ("drafters[1]", "'ngrm'", "did you mean 'ngram'")),
        (
            {"drafters": [{"name": "ngram", "maxn": 2}, "oracle"]},
            ("drafters[0]", "'maxn'", "'max_n'"),
        ),
        (
            {"drafters": ["ngram", {"name": "suffix", "max_depth": 0}]},
            ("drafters[1]", "max_depth=0"),
        ),
        ({"drafters": ["ngram", "suffix"]}, ("drafters[1]='suffix'", "in front")),
        ({"drafters": ["suffix", "suffix"]}, ("drafters[1]='suffix'", "alone of its kind")),
        ({"drafters": ["suffix", "ngram"], "policy": "best"}, ("'suffix'", "policy='first'")),
        ({"drafters": ["none", "ngram"]}, ("drafters[0]='none'", "propose themselves")),
        (
            {"drafters": [mixed("ngram", "oracle"), "ngram"]},
            ("drafters[0]='mixed'", "propose themselves"),
        ),
        ({"drafters": ["ngram", "oracle"], "policy": "last"}, ("policy='last'", "'best'")),
        ({"drafters": ["ngram", "oracle"], "decay": 1.0}, ("decay=1.0", "[0, 1)")),
        ({"drafters": "ngram"}, ("drafters='ngram'", "list")),
    ],
)
def test_wrong_mixtures_are_refused_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    monkeypatch.setattr("specdec.engine.load_target", lambda *a: pytest.fail("the target loads"))
    with pytest.raises(ConfigError) as caught:
        Engine("smollm2-135m-instruct", {"name": "mixed", **options})
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_there_is_once_is_not_given_twice(target: Any) -> None:
    model = {"name": "draft_model", "model": "target"}
    with pytest.raises(ConfigError, match="draft_model, draft_model asks for a KV cache"):
        Engine(target, mixed(model, model), "rejection", K, max_model_len=64)
    sampling = toy(wants={"offers_q": True})
    with pytest.raises(ConfigError, match="asks for a table of its own laws"):
        Engine(target, mixed(sampling, sampling), "rejection", K, max_model_len=64)


def test_capabilities_are_the_union_of_the_childrens() -> None:
    first = {"hidden_states": "last", "max_context": 40, "offers_confidence": True}
    second = {"aux_layers": (1, 2), "graph_safe": False, "max_context": 30, "offers_q": True}
    config = MixedConfig(drafters=[toy(wants=first), toy(wants=second)])
    drafter = MixedDrafter(config)
    drafter.load(TargetView(None, 97, 1, torch.float32, torch.device("cpu"), K, 120))
    wants = drafter.capabilities
    assert (wants.hidden_states, wants.aux_layers, wants.max_context) == ("last", (1, 2), 30)
    assert (wants.graph_safe, wants.offers_q, wants.offers_confidence) == (False, True, False)
    assert wants.splits_first_pass
    assert not wants.on_cpu
    assert wants.kv is None
