"""The installer of a bundle: join the parts, check them, put everything in its place.

`experiments.bundle` copies this file into a bundle's install.sh. It runs on a host where nothing of
the project is yet, so it needs the standard library alone, and the network never. Python is 3.11.4
or newer, which install.sh checks: `tarfile` takes a filter since then.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECEIPT = "installed.json"
_CHUNK_BYTES = 1 << 20
_KINDS = ("source", "wheel", "weights")


class InstallError(Exception):
    """What went wrong, in one sentence."""


def main(arguments: list[str]) -> int:
    """Install a bundle and print the shell command that sets the environment for it.

    Args:
        arguments: the bundle's folder; then, where it is given, the folder to install into.

    Returns:
        0, or 1 after telling on stderr what is wrong; nothing is printed to stdout then.
    """
    bundle = Path(arguments[0]).absolute()
    target = Path(arguments[1]).absolute() if len(arguments) > 1 else bundle / "installed"
    try:
        manifest = _read(bundle / MANIFEST)
        if not _is_sound(manifest):
            raise InstallError(f"{bundle / MANIFEST} is missing or damaged; copy it again")
        if not _is_installed(target, manifest):
            _install(bundle, target, manifest)
    except (InstallError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    paths = ":".join(shlex.quote(str(target / name)) for name in ("source", "site"))
    print(
        f'export PYTHONPATH={paths}"${{PYTHONPATH:+:$PYTHONPATH}}" '
        f"SPECDEC_CACHE={shlex.quote(str(target / 'cache'))}"
    )
    return 0


def _is_sound(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest has what the installer reads of it, each of its type."""
    needed = {"name": str, "bytes": int, "sha256": str}
    for key, more in (("parts", {}), ("files", {"kind": str})):
        entries = manifest.get(key)
        if not isinstance(entries, list):
            return False
        for entry in entries:
            if not isinstance(entry, dict):
                return False
            for name, kind in (needed | more).items():
                if not isinstance(entry.get(name), kind):
                    return False
            # A name is a file's in the folder at hand, and nothing above it.
            if entry["bytes"] < 0 or Path(entry["name"]).name != entry["name"]:
                return False
            if more and entry["kind"] not in _KINDS:
                return False
    return True


def _install(bundle: Path, target: Path, manifest: dict[str, Any]) -> None:
    store, joined = target / "parts", target / "joined"
    store.mkdir(parents=True, exist_ok=True)
    _gather(bundle, store, manifest["parts"])
    (target / RECEIPT).unlink(missing_ok=True)  # from here on a stopped run leaves a half
    shutil.rmtree(joined, ignore_errors=True)
    joined.mkdir()
    _join(store, joined, manifest)
    for file in manifest["files"]:
        if file["kind"] == "source":
            _unpack(joined / file["name"], target / "source")
        elif file["kind"] == "weights":
            (target / "cache").mkdir(exist_ok=True)
            os.replace(joined / file["name"], target / "cache" / file["name"])
    wheels = [joined / f["name"] for f in manifest["files"] if f["kind"] == "wheel"]
    if wheels:
        _install_wheels(wheels, target / "site")
    (target / RECEIPT).write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(joined)
    shutil.rmtree(store)
    _say(f"installed into {target}")


def _is_installed(target: Path, manifest: dict[str, Any]) -> bool:
    """Return whether this very bundle was installed and its weights are still sound."""
    if _read(target / RECEIPT) != manifest:
        return False
    folders = {"source": target / "source", "wheel": target / "site"}
    for file in manifest["files"]:
        if file["kind"] != "weights":
            if not folders[file["kind"]].is_dir():
                return False
        elif _sha256(target / "cache" / file["name"]) != file["sha256"]:
            return False
    _say(f"already installed in {target}")
    return True


def _gather(bundle: Path, store: Path, parts: list[dict[str, Any]]) -> None:
    """Keep the parts that have arrived; they may come a few at a time, in any order.

    Raises:
        InstallError: some are missing or damaged.
    """
    problems = []
    for part in parts:
        name, kept, given = part["name"], store / part["name"], bundle / part["name"]
        if _sha256(kept) == part["sha256"]:
            continue
        if not given.is_file():
            problems.append(f"{name} is missing")
        elif _sha256(given) != part["sha256"]:
            problems.append(f"{name} is damaged ({given.stat().st_size} of {part['bytes']} bytes)")
        else:
            shutil.copyfile(given, store / "arriving")
            os.replace(store / "arriving", kept)
    if problems:
        num_sound = len(parts) - len(problems)
        raise InstallError(
            f"{num_sound} of {len(parts)} parts are here and kept; {', '.join(problems)}: copy "
            f"these beside {MANIFEST} and run install.sh again"
        )


def _join(store: Path, joined: Path, manifest: dict[str, Any]) -> None:
    """Cut the stream of all parts into the bundle's files.

    Raises:
        InstallError: a file is not what was packed.
    """
    chunks, rest = _chunks(store, manifest["parts"]), b""
    for file in manifest["files"]:
        left = file["bytes"]
        with (joined / file["name"]).open("wb") as out:
            while left and (rest := rest or next(chunks, b"")):
                head, rest = rest[:left], rest[left:]
                out.write(head)
                left -= len(head)
        if _sha256(joined / file["name"]) != file["sha256"]:
            raise InstallError(f"{file['name']} is not what was packed; make the bundle again")


def _chunks(store: Path, parts: list[dict[str, Any]]) -> Iterator[bytes]:
    for part in parts:
        with (store / part["name"]).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the source and put it in place of an older one.

    Raises:
        InstallError: the archive cannot be read.
    """
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(fresh, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InstallError(
            f"{archive.name} cannot be unpacked ({error}); make the bundle again"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)


def _install_wheels(wheels: list[Path], site: Path) -> None:
    """Add wheels to the folder beside those of an earlier bundle; say what they need further.

    Raises:
        InstallError: pip refuses them.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", str(site)]
    done = subprocess.run(
        [*command, *map(str, wheels)],
        stdin=subprocess.DEVNULL,  # the shell gives this very program on stdin
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InstallError(f"pip could not install the wheels ({said})")
    lacking = sorted(_lacking(site))
    if lacking:
        _say(f"the wheels also need {', '.join(lacking)}, which this python lacks")


def _lacking(site: Path) -> set[str]:
    """Return what the wheels require and is neither among them nor on the host."""
    try:
        from packaging.requirements import Requirement  # pytest and transformers bring it
    except ModuleNotFoundError:
        return {"packaging"}
    path, lacking = [str(site), *sys.path], set()
    for distribution in metadata.distributions(path=[str(site)]):
        for text in distribution.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                # The first one on the path is the one that is imported.
                found = next(iter(metadata.distributions(name=wanted.name, path=path)), None)
                if found is None or not wanted.specifier.contains(found.version, prereleases=True):
                    lacking.add(f"{wanted.name}{wanted.specifier}")
    return lacking


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one where there is none."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _sha256(file: Path) -> str:
    """Return the hash of a file, "" where there is none."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
