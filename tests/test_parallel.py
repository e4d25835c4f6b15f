"""Parallelism without other ranks: sizes, the router, messages, and what one rank leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.run import _check_alone
from experiments.run_folder import UnwrittenFolder
from runner.input_batch import StepPlan
from specdec import LLM, Engine, SamplingParams
from specdec.config import EngineConfig
from specdec.errors import CapacityError, ConfigError
from specdec.log import progress
from specdec.parallel import groups
from specdec.parallel.groups import ParallelConfig, ParallelGroups, init_groups
from specdec.parallel.launch import RankFailedError, _failure, launch
from specdec.parallel.messages import encode, pack, unpack
from specdec.parallel.placement import check_host, device_of_rank
from specdec.parallel.rank_check import KINDS, RankCheck, describe
from specdec.parallel.replicas import DataParallelEngine
from specdec.parallel.router import Router
from specdec.types import Increment
from tests.models import byte_tokenizer, random_prompts, tiny_model, tiny_target

ROOT = Path(__file__).resolve().parent.parent
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_reqs": 4}


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what a launcher around the tests may have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# --- sizes and ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    "name", ["data_parallel_size", "tensor_parallel_size", "exchange_every", "check_ranks_every"]
)
def test_sizes_below_one_are_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}={size} is not allowed; give an integer >= 1"):
        EngineConfig(**{name: size}).check(4)
    if name.endswith("parallel_size"):
        with pytest.raises(ConfigError, match=f"{name}={size} is not allowed"):
            ParallelConfig(**{name: size})


def test_layers_are_shared_by_as_many_ranks_as_there_are() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs 2 ranks, and this process"):
        LLM(tiny_target(tiny_model()), tensor_parallel_size=2, **OPTIONS)


def test_an_engine_of_its_own_is_one_replica() -> None:
    with pytest.raises(ConfigError, match="an Engine is one replica; use LLM"):
        Engine(tiny_target(tiny_model()), data_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize(("world_size", "sizes"), [(None, (2, 1)), (2, (2, 2)), (4, (1, 2))])
def test_another_number_of_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: int | None, sizes: tuple[int, int]
) -> None:
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
    needed = sizes[0] * sizes[1]
    with pytest.raises(ConfigError) as raised:
        init_groups(ParallelConfig(*sizes))
    text = str(raised.value)
    assert f"data_parallel_size={sizes[0]} x tensor_parallel_size={sizes[1]}" in text
    assert f"needs {needed} ranks, and this process is one of {world_size or 1};" in text
    assert f"`torchrun --nproc-per-node {needed} ...`" in text


def test_ranks_may_be_set_up_with_another_timeout_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ParallelGroups(ParallelConfig(2, timeout_s=60.0))
    monkeypatch.setattr(groups, "_groups", first)
    assert init_groups(ParallelConfig(2)) is first
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="set up as 2 x 1"):
        init_groups(ParallelConfig(1, 2))


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="rank 1 of this machine has no GPU of its own"):
        init_groups(ParallelConfig(2), "cuda")


def test_no_rank_is_no_job() -> None:
    with pytest.raises(ConfigError, match="num_ranks=0 is not allowed; give an integer >= 1"):
        launch(print, 0)


def test_an_app_of_one_rank_is_not_started_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    _check_alone()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 ranks.*give engine\.data_parallel_size=2 or"):
        _check_alone()


def test_a_rank_knows_its_replica_and_its_place_in_it() -> None:
    places = [ParallelConfig(2, 3).place_of(rank) for rank in range(6)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_one_rank_initialises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # the script may be parallel in a way of its own
    monkeypatch.setattr(dist, "init_process_group", None)
    place = init_groups(ParallelConfig())
    assert (place.control, place.tp, place.dp) == (None, None, None)
    assert (place.rank, place.dp_rank, place.tp_rank) == (0, 0, 0)
    assert isinstance(LLM(tiny_target(tiny_model()), **OPTIONS).engine, Engine)
    assert not dist.is_initialized()


def test_the_package_imports_no_process_groups() -> None:
    code = "import sys, specdec.types, specdec.config; assert 'torch' not in sys.modules"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", "")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=False)
    assert done.returncode == 0


def test_each_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = ParallelGroups(ParallelConfig(4), rank=3, local_rank=1)
    assert device_of_rank(EngineConfig(device="auto"), place) == "cuda:1"
    assert device_of_rank(EngineConfig(device="cuda"), place) == "cuda:1"
    assert device_of_rank(EngineConfig(device="cpu"), place) == "cpu"
    with pytest.raises(ConfigError, match="names one GPU for 4 ranks"):
        device_of_rank(EngineConfig(device="cuda:0"), place)
    with pytest.raises(ConfigError, match="needs 4 GPUs, and this machine has 2"):
        check_host(EngineConfig(data_parallel_size=4))


# --- the router -----------------------------------------------------------------------------------


def test_requests_go_to_the_fewest_tokens_and_the_lowest_rank() -> None:
    router = Router(3)
    assert [router.assign(str(i), 10, 10) for i in range(4)] == [0, 1, 2, 0]
    assert router.loads == [40, 20, 20]
    router.advance(Increment("1", [5, 6], None, 0))  # pyright: ignore[reportArgumentType]
    assert router.loads == [40, 8, 20]  # the prompt is behind it
    assert router.assign("long", 1, 100, num_samples=2) == 1
    router.advance(
        Increment("2", [5], None, 0, finish_reason="stop")  # pyright: ignore[reportArgumentType]
    )
    assert router.loads == [40, 210, 0]
    router.remove("long")
    assert router.loads == [40, 8, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loads_are_the_tokens_outstanding(data: st.DataObject) -> None:
    router, again = Router(2), Router(2)
    left: dict[tuple[str, int], tuple[int, int]] = {}
    home: dict[str, int] = {}
    for i in range(data.draw(st.integers(1, 30))):
        if not left or data.draw(st.booleans()):
            prompt, new, n = (data.draw(st.integers(1, top)) for top in (20, 20, 3))
            home[str(i)] = router.assign(str(i), prompt, new, n)
            assert again.assign(str(i), prompt, new, n) == home[str(i)]
            left |= {(str(i), index): (prompt, new) for index in range(n)}
        else:
            name, index = data.draw(st.sampled_from(sorted(left)))
            prompt, new = left[name, index]
            count = data.draw(st.integers(1, new))
            ended = count == new or data.draw(st.booleans())
            source: Any = None
            step = Increment(name, [0] * count, source, 0, index, "stop" if ended else None)
            router.advance(step)
            again.advance(step)
            left[name, index] = 0, new - count
            if ended:
                del left[name, index]
                if not any(key[0] == name for key in left):
                    router.remove(name)
                    again.remove(name)
        outstanding = [0, 0]
        for (name, _), tokens in left.items():
            outstanding[home[name]] += sum(tokens)
        assert router.loads == again.loads == outstanding


# --- messages -------------------------------------------------------------------------------------


def test_increments_of_another_replica_read_like_its_own() -> None:
    tokenizer = byte_tokenizer()
    target = tiny_target(tiny_model(vocab_size=len(tokenizer)), tokenizer)
    here, there = (Engine(target, "ngram", "sampled_match", 3, **OPTIONS) for _ in range(2))
    params = [
        SamplingParams(max_tokens=20, n=2, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=20, stop=["e", "a", "1"]),
        SamplingParams(temperature=0, max_tokens=7),
    ]
    groups_here, groups_there = {}, {}
    for i, own in enumerate(params):
        groups_here[str(i)] = here.admit(str(i), "a lamp", own)
        groups_there[str(i)] = there.admit(str(i), "a lamp", own)
        here.enqueue(groups_here[str(i)])
    while here.has_requests:
        increments = here.step()
        values = json.loads(encode(pack(increments, groups_here)))
        for own, other in zip(increments, unpack(values, groups_there), strict=True):
            for name in ("request_id", "sample_index", "new_token_ids", "finish_reason"):
                assert getattr(own, name) == getattr(other, name)
            assert own.new_text == other.new_text
            assert own.logprobs == other.logprobs
            assert own.output == other.output
    assert not there.has_requests


# --- replicas of one rank -------------------------------------------------------------------------


def make_engine(**options: Any) -> DataParallelEngine:
    """Return replicas that are one."""
    return DataParallelEngine(
        tiny_target(tiny_model()), "ngram", "greedy", 3, **{**OPTIONS, **options}
    )


@pytest.mark.parametrize("exchange_every", [1, 3])
def test_one_replica_does_what_an_engine_does(exchange_every: int) -> None:
    engine = make_engine(exchange_every=exchange_every)
    prompts = random_prompts((4, 9, 2))
    params = SamplingParams(temperature=0, max_tokens=11)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    with pytest.raises(ConfigError, match="request id '0' is already running"):
        engine.add_request("0", prompts[0], params)
    found = {}
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                found[increment.request_id] = increment.output.token_ids
    llm = LLM(tiny_target(tiny_model()), "ngram", "greedy", 3, **OPTIONS)
    assert [found[str(i)] for i in range(3)] == [
        output.token_ids for output in llm.generate(prompts, params)
    ]
    assert engine.loads == [0]


def test_every_step_is_one_execute_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(exchange_every=4)
    plans: list[StepPlan] = []
    execute = engine.runner.execute_model

    def count(plan: StepPlan, timed: bool = False) -> Any:
        plans.append(plan)
        return execute(plan, timed)

    monkeypatch.setattr(engine.runner, "execute_model", count)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    num_steps = 0
    while engine.has_requests:
        engine.step()
        num_steps += 1
    assert num_steps == 4  # the request ended with the first of them
    empty = [bool((plan.rows_np < 0).all()) for plan in plans]
    assert empty == [False, True, True, True]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_empty_steps_alternate_with_work(steps_in_flight: int) -> None:
    llm = LLM(
        tiny_target(tiny_model()),
        "ngram",
        "greedy",
        3,
        max_steps_in_flight=steps_in_flight,
        **OPTIONS,
    )
    params = SamplingParams(temperature=0, max_tokens=9)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    for num_empty in (1, 2, 5):
        for _ in range(num_empty):
            llm.engine.run_empty_step()  # pyright: ignore[reportAttributeAccessIssue]
        assert not llm.engine.has_requests
        assert llm.generate([[5, 6, 7]], params)[0].token_ids == expected


def test_a_request_that_ends_early_is_known_until_the_exchange() -> None:
    engine = make_engine(exchange_every=3)
    params = SamplingParams(temperature=0, max_tokens=40)
    engine.add_request("a", [1, 2, 3], params)
    engine.step()
    engine.abort("a")
    assert engine.unfinished_ids == {"a"}
    for refused in (lambda: engine.abort("a"), lambda: engine.discard("b")):
        with pytest.raises(ConfigError, match="no unfinished request has the id"):
            refused()
    outputs = [i.output for _ in range(2) for i in engine.step() if i.output is not None]
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert not engine.has_requests
    engine.add_request("a", [1, 2, 3], params)
    engine.step()
    engine.discard("a")
    assert not engine.has_requests
    assert engine.loads == [0]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_nothing_comes_of_a_request_that_was_aborted_and_discarded(steps_before: int) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=5)
    engine.add_request("a", [1, 2, 3], params)
    for _ in range(steps_before):
        engine.step()
    engine.abort("a")
    engine.discard("a")
    assert not engine.has_requests
    engine.add_request("a", [4, 5], params)  # the id is free again
    found = []
    while engine.has_requests:
        found += [i for i in engine.step() if i.output is not None]
    assert [(i.finish_reason, len(i.output.token_ids)) for i in found] == [("length", 5)]
    assert engine.loads == [0]


def test_a_request_that_a_replica_cannot_hold_is_refused() -> None:
    engine = make_engine(num_kv_blocks=3, block_size=4)
    with pytest.raises(CapacityError, match="may grow to 43 tokens"):
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=40))
    assert not engine.has_requests


def test_a_step_that_failed_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(engine.runner, "execute_model", fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(Exception, match="a step failed: ZeroDivisionError: planted"):
        engine.step()
    engine.discard("a")
    assert not engine.has_requests


def test_a_rank_alone_agrees_with_itself() -> None:
    check = RankCheck(None, 1)
    check.add("tokens", np.arange(4))
    check.compare(1)
    assert engine_shares(make_engine())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({(2, 1, 5): 9}, "rank 6 and the rest of 4 ranks disagree in tokens at step 8"),
        ({(1, 2, 3): 9, (3, 2, 4): 9}, "rank 5 and the rest of 4 ranks disagree in kernel choices"),
        ({(1, 0, 4): 9, (3, 0, 4): 8}, "ranks 4, 5, 6, 7 disagree in drafts at step 7"),
        ({(0, 1, 0): 1}, "rank 4 and the rest of 4 ranks disagree in the number of the step"),
    ],
)
def test_the_odd_rank_is_named(changes: dict[tuple[int, int, int], int], text: str) -> None:
    table = np.zeros((4, 3, 1 + len(KINDS)), dtype=np.int64)
    table[:, :, 0] = [7, 8, 9]
    for where, value in changes.items():
        table[where] = value
    assert describe([4, 5, 6, 7], table).startswith(text)


def engine_shares(engine: DataParallelEngine) -> bool:
    """Return whether a lone rank gets its own value."""
    return engine.share({"a": 1.5}) == {"a": 1.5}


def test_a_rank_beside_the_first_writes_nothing(tmp_path: Path) -> None:
    folder = UnwrittenFolder(tmp_path / "run")
    folder.write_text("config.yaml", "a: 1")
    folder.write_json("arms.json", [])
    folder.flush([])
    assert not folder.flush_if_due([])
    assert not folder.path.exists()


def test_one_progress_bar_serves_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with progress("work", total=1) as bar:
            bar.advance()
        shown.append("work" in capfd.readouterr().err)
    assert shown == [False, True]


# --- why a job ended ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "notes", "rank", "text"),
    [
        ([1, -9], {0: ("lost", "failed: lost")}, 1, "rank 1 of 2 was ended by SIGKILL"),
        ([1, 1], {0: ("lost", "failed: lost"), 1: ("raised", "failed: no")}, 1, "failed: no"),
        ([None, 1], {1: ("raised", "failed: no")}, 1, "rank 1 of 2 failed: no"),
        ([0, 3], {}, 1, "rank 1 of 2 ended with exit code 3"),
        ([1, 1], {0: ("lost", "failed: a"), 1: ("lost", "failed: b")}, 0, "failed: a"),
        ([-11, -9], {}, 0, "rank 0 of 2 was ended by SIGSEGV"),
        ([None, 0], {}, 1, "rank 1 of 2 ended with exit code 0 while other ranks waited for it"),
        ([1, 0], {0: ("lost", "failed: lost")}, 1, "rank 1 of 2 ended with exit code 0 while"),
    ],
)
def test_the_cause_is_told_rather_than_what_came_of_it(
    tmp_path: Path, codes: list[int | None], notes: dict[int, Any], rank: int, text: str
) -> None:
    for index, (kind, what) in notes.items():
        (tmp_path / f"{index}.json").write_text(json.dumps({"kind": kind, "what": what}))
    error = _failure(dict(enumerate(codes)), tmp_path)
    assert isinstance(error, RankFailedError)
    assert error.rank == rank
    assert text in str(error)
