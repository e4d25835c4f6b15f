"""Sweeps in this process: which jobs there are, which of them run, and what is told of the rest."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

import experiments.sweep as app
import experiments.sweep_jobs as jobs
from experiments import overview
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.run import RunResult
from experiments.schemas import RunConfig, load_config, register_schemas
from experiments.sweep_jobs import job_key, load_job, resolved_job
from experiments.sweep_launch import LAUNCHERS
from specdec.config import EngineConfig
from specdec.errors import CapacityError, ConfigError
from tests.sweep_cases import METRICS, save_chat_model

pytestmark = pytest.mark.filterwarnings(f"ignore:{jobs.SAME_NAME}:UserWarning")

ROOT = Path(__file__).resolve().parent.parent
AXES = ["drafter=none,ngram", "num_speculative_tokens=2,3", "debug=default"]
SECRET = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a developer's own account and options would change."""
    for name in [n for n in os.environ if n.startswith("WANDB_") or n == "HYDRA_FULL_ERROR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Have jobs leave a summary without a model; return their configurations as they run."""
    configs: list[RunConfig] = []

    def execute(
        config: RunConfig, path: Path, command: str, resolved: Mapping[str, Any]
    ) -> RunResult:
        configs.append(config)
        assert not (path / "half.parquet").exists()
        provenance = {"commit": None, "versions": {}, "command": command}
        (path / "provenance.json").write_text(json.dumps(provenance))
        lines = ["arm," + ",".join(METRICS), "none,1.0,,10.0,1.0", "x,1.5,0.5,15.0,1.5"]
        (path / "summary.csv").write_text("\n".join(lines))
        return RunResult(path, path / "report.html", [], None)

    def build_overview(folder: Path) -> Path:
        return folder / "overview.html"

    monkeypatch.setattr(jobs, "execute", execute)
    monkeypatch.setattr(overview, "build_overview", build_overview)
    return configs


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the app, without a tracker, in the folder `sweep`."""

    def run(*overrides: str) -> int:
        given = [f"hydra.sweep.dir={tmp_path}/sweep", "tracker=none", *overrides]
        monkeypatch.setattr(sys, "argv", ["sweep.py", "-m", *given])
        return app.main()

    return run


@pytest.fixture(autouse=True)
def registered() -> None:
    """Store the schema of sweeps, in whose place other tests store that of runs."""
    ConfigStore.instance().store(name="run_schema", node=jobs.SweepConfig)


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    """Store the schemas once: that takes a while."""
    app.register_sweep()


def compose_job(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return compose("sweep", overrides=list(overrides))


def key_of(*overrides: str) -> str:
    return job_key(resolved_job(compose_job(*overrides)))


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").write_text("in the way")
    assert sweep("drafter=ngram") == 1
    message = capsys.readouterr().err
    assert "error: " in message
    assert "hydra.sweep.dir to another folder" in message


def test_the_folder_is_named_by_what_determines_the_result() -> None:
    key = key_of()
    same = [
        ("tracker=csv",), ("tracker.project=x",), ("sweep.group=x", "sweep.workers=3"),
        ("hydra.sweep.dir=elsewhere",), ("hydra/launcher=basic",), ("drafter.max_n=3",),
    ]  # fmt: skip
    other = [
        ("drafter.max_n=4",), ("seed=1",), ("num_speculative_tokens=3",), ("batch_size=2",),
        ("engine.max_model_len=512",), ("sampling.temperature=1",), ("prompts.limit=1",),
        ("verifier=sampled_match",), ("target.dtype=float32",),
        ("draft_length=by_batch_size",),
    ]  # fmt: skip
    assert {key_of(*overrides) for overrides in same} == {key}
    found = {key_of(*overrides) for overrides in other}
    assert len(found) == len(other)
    assert key not in found


def test_every_combination_is_run_once_in_a_folder_of_its_own(
    sweep: Callable[..., int],
    executed: list[RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep(*AXES) == 0
    said = capsys.readouterr()
    assert "0 of 4 jobs are there already" in " ".join(said.err.split())
    assert "4 of 4 jobs are done" in said.out
    settings = {(c.drafter.entry.name, c.num_speculative_tokens) for c in executed}
    assert len(settings) == len(executed) == 4
    folders = [path.parent for path in (tmp_path / "sweep").glob("*/done.json")]
    assert len(folders) == 4
    for folder in folders:
        done = json.loads((folder / "done.json").read_text())
        assert done["config_hash"] == folder.name
        assert {"finished", "seconds", "commit", "versions"} <= set(done)
        # The folder of Hydra's own files and the log of the job are in it.
        assert (folder / ".hydra" / "overrides.yaml").is_file()
        assert f"job {folder.name} took" in (folder / "run.log").read_text()
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert record["jobs"].keys() == {folder.name for folder in folders}


def test_the_same_command_again_runs_only_what_is_missing(
    sweep: Callable[..., int],
    executed: list[RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep(*AXES) == 0
    executed.clear()
    # One job was cut: it has all but the marker, which is written last. One marker is damaged, and
    # one names a trace that is gone.
    cut, damaged, robbed = sorted((tmp_path / "sweep").glob("*/done.json"))[:3]
    cut.unlink()
    (cut.parent / "half.parquet").write_bytes(b"half")
    (cut.parent / "wandb" / "offline-run-1").mkdir(parents=True)
    damaged.write_text("{")
    marker = json.loads(robbed.read_text())
    robbed.write_text(json.dumps(marker | {"traces": ["requests.parquet"]}))
    assert sweep(*AXES, "sweep.workers=3") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 4 jobs are there already" in told
    assert f"job {robbed.parent.name} has lost requests.parquet and runs again" in told
    assert len(executed) == 3
    assert not (cut.parent / "wandb").exists()
    executed.clear()
    assert sweep("drafter=none", "num_speculative_tokens=2", "debug=default", "seed=0,1") == 0
    assert [config.seed for config in executed] == [1]


def test_equal_jobs_run_once_and_are_told(
    sweep: Callable[..., int], executed: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("drafter.max_n=3,4,3", "debug=default") == 0
    assert len(executed) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("two jobs are equal and run once") == 1


def test_a_failing_job_stops_no_other_and_is_told_at_the_end(
    sweep: Callable[..., int],
    executed: list[RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = jobs.execute

    def fail_some(config: RunConfig, *given: Any) -> RunResult:
        if config.num_speculative_tokens == 2:
            raise CapacityError("the KV cache needs 9 GiB, 1 GiB is free")
        if config.num_speculative_tokens == 3:
            raise IndexError("a bug of ours")
        return original(config, *given)

    monkeypatch.setattr(jobs, "execute", fail_some)
    # Greedy verification refuses temperature 1 before any model is loaded.
    axes = ["num_speculative_tokens=2,3,4", "debug=default"]
    both = [*axes, "verifier=greedy", "sampling.temperature=0,1"]
    assert sweep(*both) == 1
    said = capsys.readouterr()
    failed = [line for line in said.err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 5
    assert sum("9 GiB" in line for line in failed) == 1
    assert sum("IndexError: a bug of ours" in line for line in failed) == 1
    assert sum("takes sampling.temperature=0 only" in line for line in failed) == 3
    assert "1 of 6 jobs are done" in said.out
    assert [config.num_speculative_tokens for config in executed] == [4]
    logs = [path.read_text() for path in (tmp_path / "sweep").glob("*/run.log")]
    assert sum("Traceback" in text for text in logs) == 1  # of the bug, where it belongs
    # Failures are tried again, and only they.
    executed.clear()
    monkeypatch.setattr(jobs, "execute", original)
    assert sweep(*axes, "verifier=greedy") == 0
    assert [config.num_speculative_tokens for config in executed] == [2, 3]
    assert not list((tmp_path / "sweep").glob("*/failed.json"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["drafter=ngram,none"], ["a sweep needs -m", "python -m experiments.run"]),
        (["-m", "--fast"], ["does not know --fast"]),
        (["-m", "drafter=ngrm,none"], ["drafter=ngrm", "'ngram'"]),
        (["-m", "batchsize=1,2"], ["batchsize", "'batch_size'"]),
        (["-m", "sweep.worker=1"], ["sweep.worker", "'workers'"]),
        (["-m", "sweep.workers=0"], ["sweep.workers=0", ">= 1"]),
        (["-m", "hydra/launcher=rya"], ["hydra/launcher=rya", "'ray'"]),
        (["-m", "drafter.max_n=[1"], ["drafter.max_n=[1"]),
        (["-m", "batch_size=interval(1,3)"], ["does not support sweep type"]),
        (["-m", "hydra.launcher.speed=1"], ["hydra.launcher.speed"]),
    ],
    ids=" ".join,
)
def test_a_mistake_is_told_and_nothing_runs(
    arguments: list[str],
    parts: list[str],
    executed: list[RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments, f"hydra.sweep.dir={tmp_path}/sweep"])
    assert app.main() == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for part in parts:
        assert part in said
    assert executed == []


def test_a_launcher_that_is_not_installed_is_named_with_its_package(
    sweep: Callable[..., int],
    executed: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = Plugins.instance().class_name_to_class
    left = {name: cls for name, cls in known.items() if "ray" not in name}
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", left)
    assert sweep(*AXES, "hydra/launcher=ray") == 1
    said = capsys.readouterr().err
    assert "error: hydra/launcher=ray needs the package hydra-ray-launcher" in said
    assert executed == []


def test_a_launcher_that_breaks_fails_only_the_job_that_breaks_it(
    sweep: Callable[..., int],
    executed: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = Plugins.instantiate_launcher
    sizes: list[int] = []

    class Breaking:
        """Hands jobs to the launcher of this process, until one of them kills the worker."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def launch(self, overrides: list[list[str]], initial_job_idx: int) -> None:
            sizes.append(len(overrides))
            for given in overrides:
                if "num_speculative_tokens=3" in given:
                    raise OSError("a worker died")
                self.inner.launch([given], initial_job_idx)

    def instantiate(self: Plugins, **given: Any) -> Any:
        given["config"].hydra.launcher = {
            "_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
        }
        return Breaking(original(self, **given))

    monkeypatch.setattr(Plugins, "instantiate_launcher", instantiate)
    assert sweep("num_speculative_tokens=2,3,4", "debug=default", "hydra/launcher=joblib") == 1
    assert sorted(config.num_speculative_tokens for config in executed) == [2, 4]
    assert sizes == [3, 1, 1]
    failed = [x for x in capsys.readouterr().err.splitlines() if x.startswith("failed: ")]
    assert len(failed) == 1
    assert "num_speculative_tokens=3" in failed[0]
    assert "OSError: a worker died" in failed[0]


def test_every_launcher_composes() -> None:
    options = sorted(path.stem for path in (CONF_DIR / "hydra" / "launcher").glob("*.yaml"))
    assert {name.removesuffix("_cluster") for name in options} == set(LAUNCHERS)
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        for name in options:
            given = [f"hydra/launcher={name}", "sweep.workers=3", "sweep.gpus=0.5"]
            config = compose("sweep", overrides=given, return_hydra_config=True)
            if name == "ray":
                assert config.hydra.launcher.ray.init.num_cpus == 3
                assert config.hydra.launcher.ray.remote.num_gpus == 0.5
            if name == "joblib":
                assert config.hydra.launcher.n_jobs == 3


def test_jobs_at_once_take_gpus_in_turn(tmp_path: Path) -> None:
    def place(device: str, num_gpus: int, num_workers: int = 3) -> Any:
        return jobs._gpu_of_its_own(EngineConfig(device=device), tmp_path, num_gpus, num_workers)

    with place("auto", 2) as first, place("cuda", 2) as second:
        assert (first.device, second.device) == ("cuda:0", "cuda:1")
        with place("auto", 2) as third:  # shares
            assert third.device == "cuda:0"
        with place("cpu", 2) as named, place("cuda:1", 2) as other, place("auto", 1) as alone:
            assert (named.device, other.device, alone.device) == ("cpu", "cuda:1", "auto")
    with place("auto", 2) as again:
        assert again.device == "cuda:0"


def test_an_error_inside_a_place_is_the_jobs_own(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="mine"),
        jobs._gpu_of_its_own(EngineConfig(device="auto"), tmp_path, 2, 2),
    ):
        raise ConfigError("mine")


def test_each_job_and_the_sweep_finish_a_tracked_run_in_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_chat_model(tmp_path / "model")
    original, opened, codes = wandb.init, [], []

    def init(**options: Any) -> Any:
        opened.append(options)
        run = original(**options)
        finish = run.finish
        run.finish = lambda exit_code: (codes.append(exit_code), finish(exit_code=exit_code))
        return run

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    folder = tmp_path / "night"
    given = ["num_speculative_tokens=2", "debug=default", f"target.name={model}"]
    # The second needs more positions than there are: it fails with its run under way.
    given += ["target.dtype=float32", "engine.max_model_len=1024,4", f"hydra.sweep.dir={folder}"]
    monkeypatch.setattr(sys, "argv", ["sweep.py", "-m", *given, "engine.max_num_batched_tokens=64"])
    assert app.main() == 1
    assert "none of the 2 questions fits" in capsys.readouterr().err
    assert [options["group"] for options in opened] == ["night"] * 3
    # A debugging sweep stays on the machine, whatever key there is.
    assert {options["mode"] for options in opened} == {"offline"}
    assert [options["job_type"] for options in opened] == [None, None, "overview"]
    assert codes == [0, 1, 0]
    assert opened[0]["config"]["tracker"]["group"] == "night"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".wandb"]) == 3
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    command = json.loads(next(folder.glob("*/provenance.json")).read_text())["command"]
    assert command.startswith("python -m experiments.run num_speculative_tokens=")


def test_the_group_can_be_named_and_online_stays_online() -> None:
    config = load_job(compose_job("sweep.group=mine", "tracker.group=other"))
    tracker: Any = config.tracker
    assert jobs.group_of(tracker, config.sweep.group, Path("x/folder")) == "mine"
    assert jobs.group_of(tracker, None, Path("x/folder")) == "other"
    assert jobs.wandb_of(tracker, "mine", is_debug=False).mode == "auto"
    online: Any = load_job(compose_job("tracker.mode=online")).tracker
    assert jobs.wandb_of(online, "mine", is_debug=True).mode == "online"


def test_the_agents_example_gives_commands_that_compose() -> None:
    text = (ROOT / "examples" / "wandb_sweep.yaml").read_text(encoding="utf-8")
    example = yaml.safe_load(text)
    command = example["command"]
    assert command[:4] == ["${env}", "${interpreter}", "-m", "${program}"]
    assert command[-1] == "${args_no_hyphens}"
    assert example["program"] == "experiments.run"
    fixed, axes = command[4:-1], example["parameters"]
    longest = max(len(axis["values"]) for axis in axes.values())
    register_schemas()
    for number in range(longest):
        # As the agent writes them: name=value.
        chosen = [f"{k}={v['values'][number % len(v['values'])]}" for k, v in axes.items()]
        with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
            config = load_config(compose("run", overrides=[*fixed, *chosen]))
        assert config.drafter.entry.name in axes["drafter"]["values"]
        tracker: Any = config.tracker
        assert tracker.resolved_mode() == "online"
