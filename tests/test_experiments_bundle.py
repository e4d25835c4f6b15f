"""A bundle arrives whole or says what is missing; it is installed once, on a host with nothing."""

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from experiments import bundle, provenance
from experiments.bundle import CORE, Payload, fetch_wheels, pack_source, write_bundle
from specdec.errors import SpecdecError

WEIGHTS = random.Random(0).randbytes(2500)
PART_BYTES = 1000
ROOT = Path(__file__).parent.parent


def make_source(folder: Path) -> Payload:
    path = folder / "source.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("pkg/module.py")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"x = 1"))
    return Payload(path, "source")


def make_wheel(folder: Path) -> Payload:
    path = folder / "carried-1.0-py3-none-any.whl"
    info = "carried-1.0.dist-info"
    requirements = ("Nowhere_to.be-found >=2", "absent; extra == 'all'", "PyTest >1", "numpy <1")
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("carried.py", "y = 2\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n{needs}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Payload(path, "wheel")


@pytest.fixture
def payloads(tmp_path: Path) -> list[Payload]:
    weights = tmp_path / "tiny.gguf"
    weights.write_bytes(WEIGHTS)
    return [make_source(tmp_path), Payload(weights, "weights")]


@pytest.fixture
def packed(tmp_path: Path, payloads: list[Payload]) -> Path:
    write_bundle(payloads, tmp_path / "bundle", PART_BYTES)
    return tmp_path / "bundle"


def install(
    packed: Path, *arguments: object, python: object = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run the installer with another current folder and no variable but the interpreter's name."""
    return subprocess.run(
        ["/bin/sh", str(packed / "install.sh"), *map(str, arguments)],
        cwd="/",
        env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def content(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, but those that pip adds to what it installs."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if "dist-info" not in name}


def change_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_parts_are_small_and_joined_make_the_files(packed: Path, payloads: list[Payload]) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    parts = [(packed / part["name"]).read_bytes() for part in manifest["parts"]]
    assert [len(part) for part in parts[:-1]] == [PART_BYTES] * (len(parts) - 1)
    assert 0 < len(parts[-1]) <= PART_BYTES
    assert b"".join(parts) == b"".join(p.path.read_bytes() for p in payloads)


def test_a_smaller_bundle_leaves_no_part_of_the_one_before(
    packed: Path, payloads: list[Payload]
) -> None:
    manifest = write_bundle(payloads[:1], packed, PART_BYTES)
    assert sorted(p.name for p in packed.glob("part.*")) == [p["name"] for p in manifest["parts"]]


def test_everything_is_put_in_place_once(tmp_path: Path, payloads: list[Payload]) -> None:
    packed, host = tmp_path / "bundle", tmp_path / "a host's folder"
    write_bundle([*payloads, make_wheel(tmp_path)], packed, PART_BYTES)
    done = install(packed, host)
    assert done.returncode == 0, done.stderr
    assert "the wheels also need Nowhere_to.be-found>=2, numpy<1, which this" in done.stderr
    installed = content(host)
    assert installed.pop("installed.json")
    assert installed.pop("source/pkg/module.py") == b"x = 1"
    assert installed.pop("site/carried.py") == b"y = 2\n"
    assert installed.pop("cache/tiny.gguf") == WEIGHTS
    assert all(name.startswith("site/__pycache__/") for name in installed)
    # The printed line sets the environment; what was there before stays behind it.
    shown = 'echo "$PYTHONPATH|$SPECDEC_CACHE"'
    for before, after in (("", ""), ("PYTHONPATH=/old; ", ":/old")):
        echoed = subprocess.check_output(
            ["/bin/sh", "-c", f"{before}{done.stdout}\n{shown}"], env={}, text=True
        )
        assert echoed == f"{host}/source:{host}/site{after}|{host}/cache\n"
    # Parts are needed no more, and an edit of the source is kept.
    for part in packed.glob("part.*"):
        part.unlink()
    (host / "source/pkg/module.py").write_bytes(b"x = 3")
    again = install(packed, host)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "already installed" in again.stderr
    assert content(host)["source/pkg/module.py"] == b"x = 3"


def test_parts_may_come_a_few_at_a_time(packed: Path, tmp_path: Path) -> None:
    away, host = tmp_path / "away", tmp_path / "host"
    names = sorted(p.name for p in packed.glob("part.*"))
    assert len(names) == 3
    away.mkdir()
    for name in names[1:]:
        shutil.move(packed / name, away / name)
    done = install(packed, host)
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 of 3 parts are here and kept; part.001 is missing, part.002 is missing" in done.stderr
    assert not (host / "source").exists()
    (packed / names[0]).unlink()  # the next copy brings the others alone
    shutil.move(away / names[2], packed / names[2])
    assert "2 of 3 parts are here and kept; part.001 is missing:" in install(packed, host).stderr
    shutil.move(away / names[1], packed / names[1])
    assert install(packed, host).returncode == 0
    assert content(host)["cache/tiny.gguf"] == WEIGHTS
    assert not (host / "parts").exists()


@pytest.mark.parametrize("truncated", [False, True])
def test_a_damaged_part_is_named(packed: Path, tmp_path: Path, truncated: bool) -> None:
    part, host = packed / "part.001", tmp_path / "host"
    sound = part.read_bytes()
    if truncated:
        part.write_bytes(sound[:-7])
    else:
        change_byte(part)
    done = install(packed, host)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"part.001 is damaged ({len(part.read_bytes())} of 1000 bytes):" in done.stderr
    assert "part.000" not in done.stderr
    assert "Traceback" not in done.stderr
    part.write_bytes(sound)
    assert install(packed, host).returncode == 0


def test_a_damaged_manifest_is_told(packed: Path, tmp_path: Path) -> None:
    text = (packed / "manifest.json").read_text()
    (packed / "manifest.json").write_text(text[: len(text) // 2])
    done = install(packed, tmp_path / "host")
    assert done.returncode == 1
    assert re.match(r"error: \S+manifest\.json is missing or damaged; copy it again$", done.stderr)


@pytest.mark.parametrize(
    ("key", "entries"),
    [
        ("parts", None),
        ("files", {"name": "x"}),
        ("files", ["x"]),
        ("files", [{"name": "x", "bytes": 1, "sha256": ""}]),
        ("files", [{"name": "x", "bytes": 1, "sha256": "", "kind": "music"}]),
        ("parts", [{"name": "../x", "bytes": 1, "sha256": ""}]),
        ("parts", [{"name": "x", "bytes": "1", "sha256": ""}]),
    ],
)
def test_a_manifest_that_lacks_something_is_told(
    packed: Path, tmp_path: Path, key: str, entries: object
) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    (packed / "manifest.json").write_text(json.dumps(manifest | {key: entries}))
    done = install(packed, tmp_path / "host")
    assert done.returncode == 1
    assert re.match(r"error: \S+manifest\.json is missing or damaged; copy it again$", done.stderr)


def test_a_source_that_is_no_archive_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source.tar.gz"
    source.write_bytes(b"no archive")
    write_bundle([Payload(source, "source")], tmp_path / "bundle", PART_BYTES)
    done = install(tmp_path / "bundle")
    assert done.returncode == 1
    assert done.stderr.startswith("error: source.tar.gz cannot be unpacked (")
    assert done.stderr.count("\n") == 1


def test_an_old_python_is_told(packed: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    # Runs the installer's own test of the version with an older one.
    old.write_text(
        f'#!/bin/sh\ncode=$(echo "$2" | sed "s/sys.version_info/(3, 11, 3)/")\n'
        f'exec {sys.executable} -c "$code"\n'
    )
    old.chmod(0o755)
    for python in (old, tmp_path / "none"):
        done = install(packed, python=python)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"error: {python} is no Python 3.11.4 or newer; give another one as PYTHON\n"
        )


def test_damaged_weights_are_put_back(packed: Path) -> None:
    assert install(packed).returncode == 0
    change_byte(packed / "installed/cache/tiny.gguf")
    assert install(packed).returncode == 0
    assert content(packed / "installed")["cache/tiny.gguf"] == WEIGHTS


def test_a_later_bundle_replaces_the_source_and_keeps_the_weights(
    packed: Path, payloads: list[Payload]
) -> None:
    assert install(packed).returncode == 0
    (packed / "installed/source/stale.py").write_text("")
    write_bundle(payloads[:1], packed, PART_BYTES, commit="another")
    assert install(packed).returncode == 0
    installed = content(packed / "installed")
    assert installed.pop("installed.json")
    assert installed == {"source/pkg/module.py": b"x = 1", "cache/tiny.gguf": WEIGHTS}


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_source_is_what_is_tracked_as_it_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkout"
    (root / "pkg").mkdir(parents=True)
    for name in ("pkg/kept.py", "pkg/changed.py", "pkg/deleted.py", "a name\nof two lines"):
        (root / name).write_text("old")
    (root / "pkg/kept.py").chmod(0o755)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    clean = pack_source(root, tmp_path / "clean.tar.gz")
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    assert capsys.readouterr().err == ""
    (root / "pkg/changed.py").write_text("new")
    (root / "pkg/deleted.py").unlink()
    (root / "scratch.txt").write_text("untracked")
    assert pack_source(root, tmp_path / "source.tar.gz") == f"{clean}-dirty"
    assert capsys.readouterr().err.startswith("1 untracked files are left out, scratch.txt")
    with tarfile.open(tmp_path / "source.tar.gz") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
        assert {(member.uid, member.uname) for member in tar} == {(0, "")}
    kept = {"pkg/kept.py": b"old", "pkg/changed.py": b"new", "a name\nof two lines": b"old"}
    assert content(tmp_path / "unpacked") == kept
    assert (tmp_path / "unpacked/pkg/kept.py").stat().st_mode & 0o111


def test_source_outside_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"could not be listed .*; run this in a git checkout"):
        pack_source(tmp_path, tmp_path / "source.tar.gz")


def test_a_copy_inside_another_checkout_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "other" / "copy"
    copy.mkdir(parents=True)
    git(tmp_path / "other", "init", "-q")
    with pytest.raises(SpecdecError, match=r"copy lies in \S+other, a git checkout of something"):
        pack_source(copy, tmp_path / "source.tar.gz")


def test_a_copy_inside_another_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy").mkdir()
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")

    def found(root: Path) -> tuple[str | None, bool | None]:
        monkeypatch.setattr(provenance, "_ROOT", root)
        record = provenance.collect_provenance("", 0, torch.device("cpu"), torch.float32)
        return record["commit"], record["dirty"]

    assert found(tmp_path / "copy") == (None, None)
    assert found(tmp_path)[1] is False


def test_a_name_that_is_not_utf8_is_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    name = os.fsdecode(b"caf\xe9")
    (root / name).write_text("x")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / os.fsdecode(b"new\xe9")).write_text("")
    pack_source(root, tmp_path / "source.tar.gz")
    assert capsys.readouterr().err.startswith("1 untracked files are left out, new\\xe9 the first")
    with tarfile.open(tmp_path / "source.tar.gz") as tar:
        assert tar.getnames() == [name]


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_size_of_parts_that_is_none_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle.main(["--part-mb", size]) == 1
    assert capsys.readouterr().err.startswith("error: --part-mb ")


class Pip:
    """Stands for `subprocess.run` of pip: puts a wheel into the folder that it is given."""

    def __init__(self, wheel: str = "built-1.0-py3-none-any.whl", error: str = "") -> None:
        self.commands: list[list[str]] = []
        self.wheel, self.error = wheel, error

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command[3:])
        option = "-d" if "-d" in command else "-w"
        name = self.wheel if option == "-w" else "got-1.0-py3-none-any.whl"
        (Path(command[command.index(option) + 1]) / name).touch()
        said = f"WARNING: retrying\nERROR: {self.error}\n" if self.error else ""
        return subprocess.CompletedProcess(command, int(bool(said)), stdout="", stderr=said)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(bundle.subprocess, "run", pip)
    return pip


def test_wheels_are_those_of_the_host(pip: Pip, tmp_path: Path) -> None:
    wheels = fetch_wheels(
        ["GGUF", "other==2.0"], tmp_path, "3.12", ["one_tag", "another_tag"], ["source_only"]
    )
    assert [w.name for w in wheels] == ["built-1.0-py3-none-any.whl", "got-1.0-py3-none-any.whl"]
    download, build = pip.commands
    assert download[:2] == ["download", "--no-deps"]
    assert "--only-binary=:all:" in download
    # A package of the project comes in a version that the project takes.
    assert download[-2:] == [bundle.project_requirements()["gguf"], "other==2.0"]
    options = " ".join(download)
    assert "--implementation cp --python-version 3.12" in options
    assert "--platform one_tag --platform another_tag" in options
    assert build[:2] == ["wheel", "--no-deps"]
    assert build[-1] == "source_only"


def test_a_wheel_built_for_this_machine_is_refused_for_another(pip: Pip, tmp_path: Path) -> None:
    pip.wheel = "built-1.0-cp311-cp311-linux_x86_64.whl"
    with pytest.raises(SpecdecError, match=f"{pip.wheel} was built for this machine"):
        fetch_wheels([], tmp_path, "3.12", build=["source_only"])
    (tmp_path / pip.wheel).unlink()
    assert [w.name for w in fetch_wheels([], tmp_path, build=["source_only"])] == [pip.wheel]


def test_a_failing_pip_is_one_sentence(
    pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.error = "No matching distribution found for gguf"
    monkeypatch.setattr(bundle, "pack_source", lambda *_: None)
    assert bundle.main(["--out", str(tmp_path / "out"), "--no-weights"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: pip download failed (ERROR: {pip.error}); give other")
    assert error.count("\n") == 1


def test_command_line_writes_what_it_is_asked_for(
    tmp_path: Path, payloads: list[Payload], monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(root: Path, archive: Path) -> str:
        shutil.copyfile(payloads[0].path, archive)
        return "a commit"

    def wheels(packages: list[str], folder: Path, *_: object) -> list[Path]:
        assert list(packages) == ["one", "two"]
        return [make_wheel(folder).path]

    monkeypatch.setattr(bundle, "pack_source", source)
    monkeypatch.setattr(bundle, "fetch_wheels", wheels)
    monkeypatch.setattr(bundle, "ensure_gguf", lambda: payloads[1].path)
    out = tmp_path / "out"
    common = ["--out", str(out), "--part-mb", "0.001", "--packages", "one", "two"]
    for options, kinds in (
        ([], ["source", "wheel", "weights"]),
        (["--no-wheels"], ["source", "weights"]),
        (["--no-weights"], ["source", "wheel"]),
    ):
        assert bundle.main([*common, *options]) == 0
        manifest = json.loads((out / "manifest.json").read_text())
        assert [file["kind"] for file in manifest["files"]] == kinds
        assert max(part["bytes"] for part in manifest["parts"]) <= 1000
        assert manifest["commit"] == "a commit"


def test_check_lists_what_is_lacking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(CORE) <= bundle.project_requirements().keys()
    assert bundle.main(["--check"]) == 0
    assert capsys.readouterr().out.count(": nothing\n") == 2
    here = bundle.metadata.version

    def version(name: str) -> str:
        if name in ("gguf", "hydra-core"):
            raise bundle.metadata.PackageNotFoundError(name)
        return here(name)

    monkeypatch.setattr(bundle.metadata, "version", version)
    assert bundle.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["gguf", "hydra-core"]
