"""The bench of whole steps: what it counts, and a dry run of every kind of case on a CPU."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from experiments import bench, bench_e2e, e2e_run, e2e_scale
from experiments.bench_e2e import E2EBenchConfig, read_record, run_e2e_bench
from experiments.e2e_cases import SHAPE_SETS, Case
from experiments.e2e_floors import (
    head_elements,
    kv_elements,
    model_elements,
    num_parameters,
)
from experiments.e2e_models import ModelStore, constant_text, random_model, text_of, why_not_here
from experiments.e2e_run import fill, keep_rows, make_load, running, time_forward
from experiments.e2e_scale import expected_bytes, fit_rows, list_points, state_bytes
from specdec.errors import ConfigError
from tests.current_device import record_devices

ROOT = Path(__file__).parent.parent
CPU, TINY, FULL = torch.device("cpu"), SHAPE_SETS["tiny"], SHAPE_SETS["full"]
DRY = {"device": "cpu", "dtype": "float32", "shapes": "tiny", "repeats": 1}
SMALL = dataclasses.replace(TINY, output_len=25)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(TINY, torch.float32, CPU, tmp_path)


@pytest.fixture(scope="module")
def dry_run() -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Every kind of case, and how many lines were measured at each save."""
    measured: list[int] = []

    def save(found: dict[str, Any]) -> None:
        measured.append(sum(line["status"] == "measured" for line in found["lines"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bench_e2e.SHAPE_SETS, "tiny", SMALL)
        config = E2EBenchConfig(**DRY, batches=[1])
        yield run_e2e_bench(config, save, {"device": "a CPU", "dtype": "float32"}), measured


def test_a_random_model_has_the_counted_weights_in_its_dtype_and_none_is_zero() -> None:
    for name in ("8b", "135m"):
        shape = TINY.models[name]
        model = random_model(shape, 1, torch.bfloat16, CPU).model
        parameters = dict(random_model(shape, 1, torch.float32, CPU).model.named_parameters())
        assert sum(p.numel() for p in parameters.values()) == num_parameters(shape)
        assert all(bool((p != 0).all()) for p in parameters.values())
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        # Frequencies of positions would be wrong in bf16.
        decoder: Any = model.get_decoder()
        assert decoder.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_head_has_the_counted_weights(store: ModelStore) -> None:
    case = Case("8b", "eagle3", 1)
    drafter = store.drafter("8b", "eagle3")
    with running(case, TINY, store.target("8b"), drafter) as engine:
        head: Any = engine.drafter
        found = sum(p.numel() for p in head.head.parameters())
        assert engine.drafter.capabilities.aux_layers == (1, 1, 1)  # of five layers
        assert head.head.lm_head.out_features == TINY.head_rows
    assert found == sum(head_elements(TINY.models["8b"], TINY.head_rows))


def test_a_dry_run_measures_every_kind_of_case(dry_run: Any) -> None:
    record, measured = dry_run
    assert not record["failed"], [line["reason"] for line in record["lines"]]
    assert record["complete"]
    assert all(rate > 0 for rate in record["ceilings"].values())
    wanted = {"none": 1.0, "eagle3": 3.0, "draft_model": 3.0, "ngram": 3.0}
    for line in record["lines"]:
        if line["model"] == "135m_real":
            assert (line["status"], line["reason"]) == (
                "not run",
                "tiny shapes have no real weights",
            )
            continue
        assert line["status"] == "measured"
        assert line["tokens_per_step"] == wanted[line["drafter"]]
        assert 0 < line["ms_min"] <= line["ms"] <= line["ms_max"]
        assert len(line["ms_repeats"]) == (1 if line["model"].startswith("8b") else 2)
        assert line["device_ms"] is None
        assert line["device_reason"] == "a CPU has no graphs"
        rate = line["tokens_per_step"] * line["batch"] * 1e3 / line["ms"]
        assert line["tokens_per_s"] == pytest.approx(rate)
        assert line["floor_ms"] == pytest.approx(
            sum(line["bytes"].values()) / record["ceilings"]["read_gb_per_s"] / 1e6
        )
        assert line["split"]["target_ms"] > 0
        assert line["split"]["step_ms"] >= line["split"]["target_ms"]
        # Prompts of 16 tokens and up to 28 behind them.
        assert 20 < line["context"] < 40
        assert line["peer_ms"] is line["aim_ms"] is None  # of other shapes and another machine
    assert measured[-1] == 9
    assert set(range(10)) <= set(measured)  # saved behind each


def test_a_dry_run_times_the_forward_alone(dry_run: Any) -> None:
    forwards = dry_run[0]["forwards"]
    assert [line["name"] for line in forwards] == ["8b forward 1x5", "8b forward 1x1"]
    num_bytes = 4 * model_elements(TINY.models["8b"])
    rate = dry_run[0]["ceilings"]["read_gb_per_s"]
    for line in forwards:
        assert line["floor_ms"] == pytest.approx(num_bytes / rate / 1e6)
        assert line["over_floor"] == pytest.approx(line["ms"] / line["floor_ms"])


def test_a_dry_run_shows_the_cost_of_scale_beside_a_law(dry_run: Any) -> None:
    rows = dry_run[0]["scale"]
    assert [row["status"] for row in rows] == ["measured"] * len(list_points(TINY))
    for row in rows:
        assert row["expected_ms"] >= row["law_ms"]
        assert row["bytes"] is None  # a CPU does not count them
        assert row["expected_bytes"] > 0
        assert row["fit"].endswith("+ law")


def test_requests_whose_neighbours_are_long_in_coming_live_until_they_are_timed(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two texts of 64 tokens in chunks of 4: the first decodes 16 tokens before the second does.
    monkeypatch.setattr(e2e_scale, "_chunk_tokens", lambda point: 4)
    monkeypatch.setattr(e2e_scale, "list_points", lambda shapes: list_points(shapes)[-1:])
    rows: list[dict[str, Any]] = []
    ceilings = {"read_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
    e2e_scale.run_scale(store, ["135m"], ceilings, rows, lambda seconds: None)
    (row,) = rows
    assert (row["axis"], row["context"], row["batch"]) == ("context", 64, 2)
    assert row["status"] == "measured", row.get("reason")


def test_a_forward_reads_the_cache_that_it_is_given(store: ModelStore) -> None:
    model = store.target("8b").model
    seen: dict[str, Any] = {}
    forward = model.forward

    def watched(ids: Any, positions: Any, metadata: Any) -> Any:
        seen.update(ids=ids, positions=positions, metadata=metadata)
        return forward(ids, positions, metadata)

    model.forward = watched  # type: ignore[method-assign]
    assert len(time_forward(model, 2, 5, context=40, bound=64)) == 5
    metadata = seen["metadata"]
    assert seen["positions"].tolist() == 2 * list(range(35, 40))
    assert metadata.seq_lens.tolist() == [40, 40]
    assert metadata.query_start_loc.tolist() == [0, 5, 10]
    blocks = metadata.block_table[:, :3]
    assert metadata.block_table.shape == (2, 4)
    expected = [int(blocks[r, p // 16]) * 16 + p % 16 for r in range(2) for p in range(35, 40)]
    assert metadata.slot_mapping.tolist() == expected
    assert len(set(blocks.flatten().tolist())) == blocks.numel()


def test_every_look_up_finds_drafts_and_the_model_is_set_back(store: ModelStore) -> None:
    target = store.target("135m")
    decoder: Any = target.model.model.get_decoder()
    before = decoder.norm.weight.clone()
    case = Case("135m", "ngram", 2)
    load = make_load(case, SMALL, target, 16)
    assert all(prompt[:8] == [0] * 8 for prompt in load.prompts)
    with text_of("ngram", target.model), running(case, SMALL, target, "ngram") as engine:
        fill(engine, load)
        for _ in range(3):
            for increment in engine.step():
                assert len(increment.new_token_ids) == 3
                assert increment.new_token_ids[-1] == 0  # the target's own
    assert torch.equal(decoder.norm.weight, before)
    with constant_text(target.model):
        assert not decoder.norm.weight.any()


@pytest.mark.parametrize("drafter", ["none", "eagle3", "draft_model", "ngram"])
def test_rows_set_back_run_the_same_steps_again(store: ModelStore, drafter: str) -> None:
    case, target = Case("8b", drafter, 2), store.target("8b")
    made = store.drafter("8b", drafter)
    load = make_load(case, SMALL, target, 16)
    with (
        text_of(drafter, target.model),
        running(case, SMALL, target, made, graph_scope="step") as engine,
    ):
        fill(engine, load)
        kept, state = keep_rows(engine), engine.runner.state
        for _ in range(3):
            engine.step()
        tokens, total_len = state.all_token_ids.tensor.clone(), state.total_len.tensor.clone()
        drafts = state.draft_tokens.clone()
        key = next(k for k in engine.runner.graphs.keys if k.part == "step" and k.plain)
        with torch.inference_mode():
            for tensor, copy in kept:
                tensor.copy_(copy)
            assert not torch.equal(state.total_len.tensor, total_len)
            for _ in range(3):
                engine.runner.graphs.launch(key)
        assert torch.equal(state.all_token_ids.tensor, tokens)
        assert torch.equal(state.total_len.tensor, total_len)
        assert torch.equal(state.draft_tokens, drafts)
        assert engine.runner.graphs.launches["step"] > 3


class _FakeEvent:
    """Stands in for a device event; two of them are 10 ms apart."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 10.0


def test_the_graph_is_launched_over_the_steps_that_were_timed(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, target = Case("135m", "ngram", 2), store.target("135m")
    load = make_load(case, SMALL, target, 16)
    with (
        text_of("ngram", target.model),
        running(case, SMALL, target, "ngram", graph_scope="step") as engine,
    ):
        fill(engine, load)
        kept, runner = keep_rows(engine), engine.runner
        for _ in range(5):
            engine.step()
        total_len = runner.state.total_len.tensor.clone()
        assert e2e_run.time_graph(engine, kept, 5) == []  # a CPU
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "Event", _FakeEvent)
            patch.setattr(runner, "device", torch.device("cuda"))
            launched: list[Any] = []
            launch = runner.graphs.launch
            patch.setattr(runner.graphs, "launch", lambda key: launched.append(key) or launch(key))
            assert e2e_run.time_graph(engine, kept, 5) == [2.0] * 3
        assert len(launched) == 15
        assert {(key.part, key.plain) for key in launched} == {("step", True)}
        assert torch.equal(runner.state.total_len.tensor, total_len)


def test_launches_are_counted_by_step(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    case, target = Case("135m", "none", 2), store.target("135m")
    load = make_load(case, SMALL, target, 16)
    with running(case, SMALL, target, "none", graph_scope="step") as engine:
        fill(engine, load)
        assert e2e_run.count_launches(engine) == {"step": 1.0}
        step = engine.step

        def with_kernels() -> Any:
            for _ in range(3):
                knobs.runtime.launch_enter_hook(None)
            with monkeypatch.context() as inner:
                inner.setattr(engine.runner, "device", CPU)
                return step()

        monkeypatch.setattr(engine.runner, "device", torch.device("cuda"))
        monkeypatch.setattr(engine, "step", with_kernels)
        assert e2e_run.count_launches(engine) == {"step": 1.0, "kernels outside": 3.0}
        monkeypatch.undo()
        assert not knobs.runtime.launch_enter_hook.calls


def test_memory_by_formula_is_what_the_tables_take(store: ModelStore) -> None:
    point = next(p for p in list_points(TINY) if p.drafter == "eagle3")
    target, drafter = store.target("135m"), store.drafter("135m", "eagle3")
    shape = TINY.models["135m"]
    with running(Case("135m", "eagle3", point.batch), TINY, target, drafter) as engine:
        runner, blocks = engine.runner, engine.runner.num_kv_blocks
        assert runner.draft_kv is not None
        kv = runner.kv.num_bytes + runner.draft_kv.num_bytes
        tables = sum(t.tensor.nbytes for t in runner.state.tables)
        tables += runner.state.draft_tokens.nbytes
    state = state_bytes(point.batch, TINY.max_model_len, shape.vocab_size, point.num_drafts)
    head = 4 * sum(head_elements(shape, TINY.head_rows))
    assert expected_bytes(point, "135m", TINY, blocks, 4) == kv + head + state
    counts = point.batch * (4 * shape.vocab_size + 3 * shape.vocab_size // 8)
    # Single numbers a row are not in the formula.
    assert 0 <= tables - (state - counts) <= 64 * point.batch
    assert kv_elements(shape) == 2 * 5 * 2 * 16


def test_a_fit_gives_back_a_law_that_holds() -> None:
    rows = [
        {"axis": axis, "status": "measured", "value": n, "law_ms": n**2, "ms": n**2 + a + b * n}
        for axis, a, b in (("K ngram", 0.5, 0.2), ("batch", 0.7, 0.01), ("context", 0.3, 0.0))
        for n in (1, 2, 4, 8)
    ]
    fit_rows(rows)
    assert [row["expected_ms"] for row in rows] == pytest.approx([row["ms"] for row in rows])
    assert rows[0]["fit"] == "0.500 ms + 0.200 ms * K + law"
    assert rows[4]["fit"] == "0.700 ms + 0.010 ms * batch + law"
    assert rows[8]["fit"] == "0.300 ms + law"


def test_an_error_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_e2e.measure

    def measure(engine: Any, load: Any, repeats: int, timed: Any) -> dict[str, Any]:
        if engine.num_speculative_tokens:
            raise RuntimeError("no such\nluck")
        return real(engine, load, repeats, timed)

    monkeypatch.setattr(bench_e2e, "measure", measure)
    monkeypatch.setitem(bench_e2e.SHAPE_SETS, "tiny", SMALL)
    config = E2EBenchConfig(
        **DRY, batches=[1], cases=["135m ngram", "135m none"], scale=False, forwards=False
    )
    record = run_e2e_bench(config, lambda _: None, {})
    by_name = {line["name"]: line for line in record["lines"]}
    failed = by_name["135m ngram batch 1"]
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no such luck")
    assert by_name["135m none batch 1"]["status"] == "measured"
    assert record["failed"]


def test_tokens_that_were_not_set_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = e2e_run.time_repeat
    monkeypatch.setattr(
        e2e_run, "time_repeat", lambda *given: real(*given) | {"tokens_per_step": 2.5}
    )
    monkeypatch.setitem(bench_e2e.SHAPE_SETS, "tiny", SMALL)
    config = E2EBenchConfig(
        **DRY, batches=[1], cases=["135m ngram"], scale=False, forwards=False, split=False
    )
    record = run_e2e_bench(config, lambda _: None, {})
    assert (
        "2.500 tokens were committed a request and step, 3.0 were set"
        in (record["lines"][0]["reason"])
    )


def test_all_of_a_run_has_its_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = record_devices(monkeypatch, bench_e2e)
    monkeypatch.setattr(bench_e2e.E2EBench, "run", lambda self: {"current": list(current)})
    record = run_e2e_bench(E2EBenchConfig(**DRY), lambda _: None, {})
    assert record["current"] == [torch.device("cpu")]


def test_what_the_time_does_not_allow_is_left_out_and_said() -> None:
    record = run_e2e_bench(E2EBenchConfig(**DRY, max_minutes=0.0), lambda _: None, {})
    lines = [*record["lines"], *record["forwards"], *record["scale"]]
    assert {line["status"] for line in lines} == {"not run"}
    assert {line["reason"] for line in lines} == {"it would not end within max_minutes=0"}
    assert len(record["forwards"]) == 5
    assert record["scale"]
    assert not record["failed"]


def test_real_weights_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    said = why_not_here(Case("135m_real", "eagle3", 1), tiny=False)
    assert said == "the weights of smollm2-135m-instruct are not on this machine"
    assert list(tmp_path.iterdir()) == []
    assert why_not_here(Case("135m", "eagle3", 1), tiny=False) is None


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"cases": ["8b medusa"]}, "'8b medusa'"),
        ({"shapes": "small"}, "full, tiny"),
        ({"scale_models": ["135m_real"]}, "8b, 135m"),
        ({"repeats": 0}, "repeats=0"),
        ({"batches": [0]}, r"batches=\[0\]"),
        ({"max_minutes": -1.0}, r"max_minutes=-1\.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        E2EBenchConfig(**options)


def test_full_shapes_without_a_gpu_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_e2e.py", "--out", str(tmp_path / "out.json")])
    assert bench_e2e.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: bench=e2e measures steps on a GPU")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


_ON_A_BARE_HOST = """
import sys
from importlib.machinery import PathFinder

LEFT_OUT = {"hydra", "omegaconf", "wandb", "pandas", "pyarrow", "rich", "matplotlib", "scipy"}

class BarePathFinder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in LEFT_OUT:
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[:] = [BarePathFinder if f is PathFinder else f for f in sys.meta_path]
from experiments.bench_e2e import main

raise SystemExit(main())
"""


def test_it_runs_without_hydra_and_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "records" / "e2e.json"
    options = ["--device", "cpu", "--dtype", "float32", "--shapes", "tiny", "--repeats", "1"]
    options += ["--cases", "135m none", "--batches", "1", "--no-scale", "--no-forwards"]
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_BARE_HOST, "--out", str(out), *options],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = read_record(out)
    assert record["provenance"]["dtype"] == "float32"
    assert record["provenance"]["duration_s"] > 0
    assert "--cases '135m none'" in record["provenance"]["command"]
    assert [line["status"] for line in record["lines"]] == ["measured"]
    assert [path.name for path in out.parent.iterdir()] == ["e2e.json"]
    assert "135m none batch 1" in done.stdout


def test_the_app_runs_it_and_tells_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setitem(bench_e2e.SHAPE_SETS, "tiny", SMALL)
    options = ["bench=e2e", "bench.device=cpu", "bench.dtype=float32", "bench.shapes=tiny"]
    options += ["bench.batches=[1]", "bench.cases=[135m none]", "bench.repeats=1"]
    options += ["bench.scale=false", "bench.forwards=false", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    assert bench.main() == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["bench"] == "e2e"
    assert record["provenance"]["device"]
    assert record["lines"][0]["ms"] > 0
    assert "x floor" in capsys.readouterr().out
    monkeypatch.setattr(bench_e2e, "measure", refuse)
    assert bench.main() == 1
    assert "some cases failed" in capsys.readouterr().err
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["lines"][0]["reason"] == "RuntimeError: no luck"
