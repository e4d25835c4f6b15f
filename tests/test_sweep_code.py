"""What code a sweep's finished jobs ran with: which run again, and what is told of the rest."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

import experiments.sweep as app
import experiments.sweep_jobs as jobs
from experiments import overview, sweep_code
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.run import RunResult
from experiments.schemas import RunConfig
from experiments.sweep_code import TreeState, hash_plugins
from specdec import registry

pytestmark = pytest.mark.filterwarnings(f"ignore:{jobs.SAME_NAME}:UserWarning")

PLUGIN = """
import dataclasses

from drafters.base import DrafterBase
from specdec.registry import register_drafter


@dataclasses.dataclass
class LagConfig:
    lag: int = 1


@register_drafter("swept", LagConfig)
class LagDrafter(DrafterBase):
    pass
"""
CLEAN, OTHER = TreeState("a" * 40, False), TreeState("b" * 40, False)


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    """Store the schemas once: that takes a while."""
    app.register_sweep()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the schema of sweeps, and forget afterwards what a test registers."""
    ConfigStore.instance().store(name="run_schema", node=jobs.SweepConfig)
    known = {kind: dict(entries) for kind, entries in registry._registered.items()}
    monkeypatch.setattr(registry, "_registered", known)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Have jobs end without a model; return their configurations as they run."""
    configs: list[RunConfig] = []

    def execute(
        config: RunConfig, path: Path, command: str, resolved: Mapping[str, Any]
    ) -> RunResult:
        configs.append(config)
        assert not (path / "stale.txt").exists()
        (path / "provenance.json").write_text(json.dumps({"versions": {}}))
        return RunResult(path, path / "report.html", [], None)

    monkeypatch.setattr(jobs, "execute", execute)
    monkeypatch.setattr(overview, "build_overview", lambda folder: folder / "overview.html")
    return configs


@pytest.fixture
def sweep(
    tmp_path: Path,
    executed: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs two jobs; it returns how many ran and what was told."""

    def run(tree: TreeState, *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sweep_code, "tree_of_process", lambda: tree)
        executed.clear()
        given = ["debug=default", "tracker=none", "num_speculative_tokens=2,3", *overrides]
        folder = f"hydra.sweep.dir={tmp_path}/sweep"
        monkeypatch.setattr(sys, "argv", ["sweep.py", "-m", folder, *given])
        app.main()
        return len(executed), " ".join(capsys.readouterr().err.split())

    return run


def compose_job(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return compose("sweep", overrides=list(overrides))


def markers(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("*/done.json"))


def test_a_job_whose_plugin_was_edited_runs_again_in_place_of_the_old(
    sweep: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "swept_lag.py"
    source.write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["drafter=plugin", "drafter.name=swept_lag:LagDrafter"]

    def in_a_new_process() -> tuple[int, str]:
        sys.modules.pop("swept_lag", None)
        return sweep(CLEAN, *given)

    assert in_a_new_process()[0] == 2
    first = json.loads(markers(tmp_path)[0].read_text())
    assert first["plugins"].keys() == {"swept_lag"}
    assert in_a_new_process()[0] == 0
    source.write_text(PLUGIN + "# another\n")
    for path in markers(tmp_path):
        (path.parent / "stale.txt").write_text("of the old run")
    # What this process imported is what it would run.
    assert sweep(CLEAN, *given)[0] == 0
    num_run, told = in_a_new_process()
    assert num_run == 2
    assert "0 of 2 jobs are there already" in told
    assert told.count("2 finished jobs ran with other source of swept_lag") == 1
    assert json.loads(markers(tmp_path)[0].read_text())["plugins"] != first["plugins"]
    num_run, told = in_a_new_process()
    assert num_run == 0
    assert "other" not in told


def test_an_outdated_job_that_fails_is_not_told_as_done(
    sweep: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(CLEAN)
    for path in markers(tmp_path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"plugins": {"gone": "0"}}))

    def fail(*_: Any) -> RunResult:
        raise jobs.ConfigError("mine")

    monkeypatch.setattr(jobs, "execute", fail)
    _, told = sweep(CLEAN)
    assert "2 finished jobs ran with other source of gone" in told
    assert told.count("failed: mine") == 2
    assert not markers(tmp_path)


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (OTHER, CLEAN, "2 of commit bbbbbbbbbb:"),
        (OTHER, TreeState(None, None), "2 of commit bbbbbbbbbb:"),
        (TreeState("a" * 40, True), CLEAN, "2 of commit aaaaaaaaaa with uncommitted changes:"),
        (TreeState("a" * 40, True), TreeState("a" * 40, True), "2 of commit aaaaaaaaaa with"),
        (CLEAN, TreeState("a" * 40, True), "2 of commit aaaaaaaaaa:"),
        (TreeState(None, None), TreeState(None, None), "2 of unknown code:"),
        (CLEAN, CLEAN, None),
    ],
)
def test_jobs_of_another_commit_or_a_dirty_tree_are_kept_and_told(
    then: TreeState, now: TreeState, named: str | None, sweep: Callable[..., tuple[int, str]]
) -> None:
    num_run, told = sweep(then)
    assert num_run == 2
    assert "WARNING" not in told
    num_run, told = sweep(now)
    assert num_run == 0
    assert ("WARNING" in told) == (named is not None)
    if named is not None:
        assert "2 of 2 jobs that are there already" in told
        assert named.removesuffix(":") in told
        assert "hydra.sweep.dir" in told
        assert "done.json" in told


def test_a_marker_of_an_older_release_is_kept_and_told_beside_the_rest(
    sweep: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    sweep(OTHER)
    old = markers(tmp_path)[0]
    marker = json.loads(old.read_text())
    del marker["dirty"], marker["plugins"]
    old.write_text(json.dumps(marker))
    num_run, told = sweep(CLEAN)
    assert num_run == 0
    assert told.count("WARNING") == 1
    assert "2 of 2 jobs" in told
    assert "1 of unknown code" in told
    assert "1 of commit bbbbbbbbbb" in told


def test_the_source_of_every_plugin_outside_the_project_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swept_one.py").write_text(PLUGIN)
    package = tmp_path / "swept_two"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text(PLUGIN.replace('"swept"', '"swept2"'))
    monkeypatch.syspath_prepend(tmp_path)

    def hashes() -> dict[str, str]:
        for name in [n for n in sys.modules if n.startswith("swept_")]:
            del sys.modules[name]
        mixed = "[{name: ngram}, {name: 'swept_two.part:LagDrafter'}]"
        given = ["compare=[{drafter: 'swept_one:LagDrafter'}]", f"drafter.drafters={mixed}"]
        return hash_plugins(jobs.load_job(compose_job("drafter=mixed", *given)))

    before = hashes()
    assert before.keys() == {"swept_one", "swept_two"}
    assert hashes() == before
    (package / "helper.py").write_text("")
    after = hashes()
    assert after["swept_one"] == before["swept_one"]
    assert after["swept_two"] != before["swept_two"]
    assert hash_plugins(jobs.load_job(compose_job("drafter=ngram"))) == {}


def test_this_projects_code_is_what_provenance_says() -> None:
    found = sweep_code.tree_of_process()
    assert sweep_code.tree_of_process() is found
    assert (found.commit is None) == (found.dirty is None)
