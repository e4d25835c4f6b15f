"""What code a job of a sweep ran with, and whether that is the code of this command.

A job's marker holds the commit, whether the tree had changes that are not committed, and a hash of
the source of each plug-in that is not the project's own. Where a plug-in's source differs the job
runs again; of another commit a warning tells.
"""

import contextlib
import functools
import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from drafters.mixed import MixedConfig, children_of
from experiments.provenance import collect_provenance
from experiments.schemas import Plugin, RunConfig
from specdec.registry import build_config

logger = logging.getLogger(__name__)

# Packages that the commit stands for.
_OURS = ("specdec", "runner", "drafters", "sampler", "experiments")
_HASH_CHARS = 16
_COMMIT_CHARS = 10


@dataclass(frozen=True)
class TreeState:
    """The project's code.

    Args:
        commit: None where it is no checkout.
        dirty: whether the tree has changes that are not committed; None where that is not known.
    """

    commit: str | None
    dirty: bool | None

    @property
    def is_committed(self) -> bool:
        """Return whether the commit tells all of the code."""
        return self.commit is not None and self.dirty is False

    def __str__(self) -> str:
        """Name it, as far as it is known."""
        if self.commit is None or self.dirty is None:
            return "unknown code"
        changes = " with uncommitted changes" if self.dirty else ""
        return f"commit {self.commit[:_COMMIT_CHARS]}{changes}"


@functools.cache
def tree_of_process() -> TreeState:
    """Return the project's code when this process first asked.

    Once, for what it has imported stays what it was, even where the tree changes meanwhile.
    """
    found = collect_provenance("", 0, torch.device("cpu"), torch.float32)
    return TreeState(found["commit"], found["dirty"])


def hash_plugins(config: RunConfig) -> dict[str, str]:
    """Return a hash of the source of each plug-in that a job takes from outside the project.

    Args:
        config: from `load_config`.

    Returns:
        By the name of the module, or of the package that it is part of: all of that counts.
    """
    hashes: dict[str, str] = {}
    for cls in _chosen_classes(config):
        name = cls.__module__.partition(".")[0]
        module = sys.modules.get(name)
        if name not in _OURS and module is not None:
            hashes[name] = _hash_source(module)
    return hashes


def _chosen_classes(config: RunConfig) -> list[type]:
    """Return the classes of all plug-ins that a job names, those inside a mixture included."""
    chosen: list[Plugin] = [config.verifier]
    for arm in (config, *config.compare):
        chosen += [arm.drafter] if arm.draft_length is None else [arm.drafter, arm.draft_length]
    classes = [plugin.entry.cls for plugin in chosen]
    for plugin in chosen:
        if isinstance(plugin.config, MixedConfig):
            classes += [entry.cls for entry, _ in children_of(plugin.config)]
    for spec in config.engine.logits_processors:
        classes.append(build_config("logits_processor", spec)[0].cls)
    return classes


@functools.cache
def _hash_source(module: ModuleType) -> str:
    """Return a hash of a module's file, of a package of all its Python files.

    Once a module: it stays what was imported, even where its file is edited meanwhile.
    """
    if hasattr(module, "__path__"):
        found = [(root, path) for root in module.__path__ for path in Path(root).rglob("*.py")]
        files = {str(path.relative_to(root)): path for root, path in found}
    else:  # a module that was typed in, as in a notebook, has no file
        files = {"": Path(module.__file__)} if module.__file__ else {}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode())
        with contextlib.suppress(OSError):  # removed meanwhile, or in an archive
            digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return digest.hexdigest()[:_HASH_CHARS]


def code_entry(plugins: Mapping[str, str]) -> dict[str, Any]:
    """Return what a job's marker holds of its code.

    Args:
        plugins: from `hash_plugins`.
    """
    tree = tree_of_process()
    return {"commit": tree.commit, "dirty": tree.dirty, "plugins": dict(plugins)}


def changed_plugins(done: Mapping[str, Any], plugins: Mapping[str, str]) -> list[str]:
    """Return the plug-ins whose source is another one than a finished job ran with.

    A marker that does not tell, of an older release, counts as one of the same source.

    Args:
        done: the job's marker.
        plugins: from `hash_plugins`, of this process.
    """
    known = done.get("plugins")
    if not isinstance(known, Mapping):
        return []
    return sorted(name for name in {*known, *plugins} if known.get(name) != plugins.get(name))


def warn_of_other_code(markers: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Warn where finished jobs may have run with other code of the project than this process has.

    Args:
        markers: of the jobs that are kept.
        folder: of the sweep.
    """
    now = tree_of_process()
    origins = [_origin(done) for done in markers]
    # Uncommitted changes may be others by now.
    doubted = [origin for origin in origins if origin != now or not origin.is_committed]
    if not doubted:
        return
    counts = Counter(map(str, doubted)).most_common()
    counted = ", ".join(f"{count} of {origin}" for origin, count in counts)
    logger.warning(
        "%d of %d jobs that are there already may have run with other code than this (%s): %s; "
        "they are kept; to run them again give another hydra.sweep.dir, or remove their done.json "
        "in %s",
        *(len(doubted), len(markers), now, counted, folder),
    )


def _origin(done: Mapping[str, Any]) -> TreeState:
    """Return the code of a finished job, unknown where an older release did not tell."""
    return TreeState(done.get("commit"), done.get("dirty"))
