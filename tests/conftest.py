"""Poisoned fresh memory, the device of the kernel tests, seeds and log handlers, for every test."""

import functools
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.poison import fill_poison

# Fresh memory of these packages is poisoned: a cell that is read before it is written then shows.
POISONED_PACKAGES = frozenset({"runner", "sampler", "drafters"})

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"

# The device context of torch keeps a list of its constructors from its first use on. That list must
# hold the real ones, so it is made before anything is patched.
with torch.device("cpu"):
    torch.empty(0)


def _selects(config: pytest.Config, marker: str) -> bool:
    """Return whether `-m` asks for tests with this marker."""
    expression = str(config.getoption("markexpr"))
    return marker in expression and f"not {marker}" not in expression


def _selects_only(config: pytest.Config, marker: str) -> bool:
    """Return whether no test without this marker can be selected by `-m`."""
    words = str(config.getoption("markexpr")).split()
    return words[:1] == [marker] and "or" not in words


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules without a GPU test alone under `-m gpu`.

    To look into a module, pytest imports it, and most need packages that a GPU host may lack.
    """
    if collection_path.suffix != ".py" or not _selects_only(config, "gpu"):
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def _poisoning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a constructor; only calls made by a module of the poisoned packages are changed."""

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        tensor = original(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] in POISONED_PACKAGES:
            fill_poison(tensor)
        return tensor

    return construct


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison what `torch.empty`, `empty_like` and `new_empty` return to our packages."""
    monkeypatch.setattr(torch, "empty", _poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same global generators, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # for what still reads the global one; our code does not
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_log_handlers_left() -> Iterator[None]:
    """Take from the root logger what a command that ran within a test attached to it.

    Its lines would else show up in what every later test of the process reads from stderr.
    """
    yield
    root = logging.getLogger()
    for handler in list(root.handlers):
        if not type(handler).__module__.startswith("_pytest."):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run quick tests on one thread: a second one on shared cores costs seconds of waiting."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _needs_gpu(node: pytest.Item | pytest.Collector) -> bool:
    """Return whether a test or module wants a GPU unless Triton's interpreter stands in for it."""
    if _INTERPRETING:
        return False
    return any(node.get_closest_marker(name) is not None for name in ("gpu", "interpreter"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail, rather than skip, what was selected by `-m` and cannot be run here."""
    if _needs_gpu(item) and not torch.cuda.is_available():
        pytest.fail(
            "needs a CUDA device, or for kernel tests Triton's interpreter: "
            "TRITON_INTERPRET=1 pytest -m interpreter",
            pytrace=False,
        )


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return "cuda" under `-m gpu`, "cpu" under the interpreter and in plain runs.

    A kernel test never gets the CPU without the interpreter: the launcher would take the torch twin
    and the test would compare the twin with itself.
    """
    runs_gpu = _selects(request.config, "gpu") and not _INTERPRETING
    wants_gpu = _needs_gpu(request.node) or runs_gpu
    return torch.device("cuda" if wants_gpu else "cpu")
