"""Pack what a GPU host without network needs: `python -m experiments.bundle`.

The source (tracked files as they are now), wheels and the embedded target's weights are joined to
one stream and cut into parts small enough for any way of copying. `install.sh` beside them puts
everything in place on the host. Nothing here needs Hydra or a model library.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments import bundle_install
from runner.weights import ensure_gguf
from specdec.errors import ConfigError, SpecdecError
from specdec.log import setup_logging

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = Path("outputs/bundle")
DEFAULT_PACKAGES = ("gguf", "filelock")
# What the library and `pytest -m gpu` need; the other packages are for the apps.
CORE = ("torch", "triton", "transformers", "safetensors", "numpy", "filelock", "gguf", "pytest")
INSTALLER = "install.sh"

_MB = 1_000_000
_CHUNK_BYTES = 1 << 20
_SCRIPT = """\
#!/bin/sh
# usage: sh install.sh [FOLDER]
# Joins, checks and installs the bundle beside it into FOLDER (installed/ when none is given).
# Sets the environment: eval "$(sh install.sh)". PYTHON names another interpreter than python3.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null; then
    echo "error: $python is no Python 3.11.4 or newer; give another one as PYTHON" >&2
    exit 1
fi
exec "$python" - "$here" "$@" <<'END_OF_INSTALLER'
%s
END_OF_INSTALLER
"""


@dataclass(frozen=True)
class Payload:
    """A file to pack.

    Args:
        path: where it is.
        kind: "source" (a tar archive), "wheel" or "weights".
    """

    path: Path
    kind: str


def write_bundle(
    payloads: Sequence[Payload], out: Path, part_bytes: int, commit: str | None = None
) -> dict[str, Any]:
    """Cut files into parts and write the manifest and the installer beside them.

    Args:
        payloads: files of different names.
        out: the bundle's folder; the parts of an earlier bundle go away.
        part_bytes: size of a part at most.
        commit: of the source, for the manifest.

    Returns:
        The manifest.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / bundle_install.MANIFEST).unlink(missing_ok=True)
    for stale in out.glob("part.*"):
        stale.unlink()
    files, parts = [], []
    for data in _parts(_chunks(payloads, files), part_bytes):
        name = f"part.{len(parts):03d}"
        (out / name).write_bytes(data)
        parts.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {"commit": commit, "parts": parts, "files": files}
    program = Path(bundle_install.__file__).read_text(encoding="utf-8")
    (out / INSTALLER).write_text(_SCRIPT % program, encoding="utf-8")
    text = json.dumps(manifest, indent=2) + "\n"
    (out / bundle_install.MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def _chunks(payloads: Sequence[Payload], files: list[dict[str, Any]]) -> Iterator[bytes]:
    """Read the files one after the other; add what each of them was to `files`."""
    for payload in payloads:
        digest, size = hashlib.sha256(), 0
        with payload.path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                yield chunk
        entry = {"name": payload.path.name, "kind": payload.kind}
        files.append(entry | {"bytes": size, "sha256": digest.hexdigest()})


def _parts(chunks: Iterable[bytes], part_bytes: int) -> Iterator[bytes]:
    """Regroup a stream into pieces of `part_bytes`, the last one shorter."""
    part = bytearray()
    for chunk in chunks:
        part += chunk
        while len(part) >= part_bytes:
            yield bytes(part[:part_bytes])
            del part[:part_bytes]
    if part:
        yield bytes(part)


def pack_source(root: Path, archive: Path) -> str:
    """Archive a checkout's tracked files as they are now, changes that are not committed included.

    Returns:
        The commit they are based on; "-dirty" follows where they differ from it.

    Raises:
        SpecdecError: the folder is no git checkout.
    """
    top = Path(_git(root, "rev-parse", "--show-toplevel").removesuffix("\n"))
    if top.resolve() != root.resolve():
        raise SpecdecError(
            f"{root} lies in {top}, a git checkout of something else; run this in a checkout of "
            "the project"
        )
    names = _names(_git(root, "ls-files", "-z"))
    with tarfile.open(archive, "w:gz") as tar:
        for name in sorted(names):
            if (root / name).is_symlink() or (root / name).is_file():  # else deleted, or a module
                tar.add(root / name, name, recursive=False, filter=_anonymous)
    untracked = _names(_git(root, "ls-files", "-z", "--others", "--exclude-standard"))
    if untracked:
        first = os.fsencode(untracked[0]).decode("utf-8", "backslashreplace")
        _say(f"{len(untracked)} untracked files are left out, {first} the first of them")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return _git(root, "rev-parse", "HEAD").strip() + ("-dirty" if changed else "")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _names(listed: str) -> list[str]:
    return [name for name in listed.split("\0") if name]


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; a name that is not UTF-8 comes as the file system's calls take it."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return os.fsdecode(subprocess.run(command, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = (getattr(error, "stderr", None) or b"").decode("utf-8", "backslashreplace")
        said = (stderr.strip() or str(error)).splitlines()[-1]
        raise SpecdecError(
            f"the source could not be listed ({said}); run this in a git checkout"
        ) from error


def fetch_wheels(
    packages: Sequence[str],
    folder: Path,
    python_version: str | None = None,
    platforms: Sequence[str] = (),
    build: Sequence[str] = (),
) -> list[Path]:
    """Get the wheels of packages, not of what they depend on.

    Args:
        packages: names or pip requirements; a bare name takes the range of pyproject.toml.
        folder: where they go; empty.
        python_version: of the host, "3.12" say; None takes this interpreter's.
        platforms: wheel tags that the host takes, "manylinux_2_28_x86_64" say; none takes this
            machine's.
        build: packages that are published as source alone: their build scripts run here.

    Raises:
        SpecdecError: there is no wheel for the host, or pip cannot reach its index.
    """
    ranges = project_requirements()
    where: list[str] = []
    if python_version:
        where += ["--implementation", "cp", "--python-version", python_version]
    for platform in platforms:
        where += ["--platform", platform]
    if packages:
        wanted = [ranges.get(_normalised(name), name) for name in packages]
        _pip("download", "--only-binary=:all:", *where, "-d", str(folder), *wanted)
    if build:
        wanted = [ranges.get(_normalised(name), name) for name in build]
        before = set(folder.glob("*.whl"))
        _pip("wheel", "-w", str(folder), *wanted)
        for wheel in sorted(set(folder.glob("*.whl")) - before):
            if where and not wheel.stem.endswith("-none-any"):
                raise SpecdecError(f"{wheel.name} was built for this machine, not for the host")
    return sorted(folder.glob("*.whl"))


def _pip(command: str, *arguments: str) -> None:
    full = [sys.executable, "-m", "pip", command, "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*full, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SpecdecError(
            f"pip {command} failed ({said}); give other --packages, --build for what has no wheel, "
            "or --no-wheels"
        )


def project_requirements() -> dict[str, str]:
    """Return the project's requirements by normalised name, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requirements = tomllib.loads(text)["project"]["dependencies"]
    bare = [requirement.partition(";")[0].strip() for requirement in requirements]
    return {_normalised(re.split(r"[<>=!~\[ ]", r, maxsplit=1)[0]): r for r in bare}


def lacking_packages() -> tuple[list[str], list[str]]:
    """Return the project's packages that this python lacks: needed by the core, by the apps."""
    lacking = []
    for name in project_requirements():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
    return [n for n in lacking if n in CORE], [n for n in lacking if n not in CORE]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _check() -> None:
    core, apps = lacking_packages()
    print(f"needed by the library and pytest -m gpu: {' '.join(core) or 'nothing'}")
    print(f"needed by the apps of experiments/: {' '.join(apps) or 'nothing'}")


def _bundle(arguments: argparse.Namespace) -> None:
    if not math.isfinite(arguments.part_mb) or int(arguments.part_mb * _MB) < 1:
        raise ConfigError(f"--part-mb {arguments.part_mb} is not allowed; give more than 0")
    part_bytes = int(arguments.part_mb * _MB)
    setup_logging()  # the weights are a download of 90 MB
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = scratch / "source.tar.gz"
        commit = pack_source(ROOT, source)
        payloads = [Payload(source, "source")]
        if not arguments.no_wheels:
            wheels = scratch / "wheels"
            wheels.mkdir()
            for wheel in fetch_wheels(
                arguments.packages,
                wheels,
                arguments.python_version,
                arguments.platform,
                arguments.build,
            ):
                payloads.append(Payload(wheel, "wheel"))
        if not arguments.no_weights:
            payloads.append(Payload(ensure_gguf(), "weights"))
        manifest = write_bundle(payloads, arguments.out, part_bytes, commit)
    for file in manifest["files"]:
        _say(f"{file['bytes'] / _MB:8.2f} MB  {file['name']}")
    print(f"{arguments.out}: {len(manifest['parts'])} parts; on the host, run sh {INSTALLER} there")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bundle",
        description="Pack what a GPU host without network needs; see docs/gpu_hosts.md.",
    )
    add = parser.add_argument
    add("--check", action="store_true", help="only print which packages this python lacks")
    add("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)")
    add("--part-mb", type=float, default=11, help="megabytes a part at most (default: 11)")
    add("--no-weights", action="store_true", help="leave the embedded target out")
    add("--no-wheels", action="store_true", help="leave the wheels out")
    add("--packages", nargs="*", default=DEFAULT_PACKAGES, help="wheels (default: gguf filelock)")
    add("--build", nargs="+", default=(), help="packages to build here: they publish no wheel")
    add("--python-version", help="of the host, for example 3.12 (default: this python's)")
    add(
        "--platform",
        action="append",
        default=[],
        help="wheel tag that the host takes, for example manylinux_2_28_x86_64; may be repeated",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a bundle, or say what this host lacks.

    Args:
        arguments: of the command line; None takes the process' own.

    Returns:
        0, or 1 after one sentence on stderr.
    """
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.check:
            _check()
        else:
            _bundle(parsed)
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
