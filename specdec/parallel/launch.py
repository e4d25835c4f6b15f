"""Starts the ranks of a job on this machine, and ends all of them when one fails.

The ranks are processes of torch.multiprocessing with the environment that torchrun gives, so what
runs in them runs under torchrun as well. A rank that dies or raises takes the others with it within
seconds: they get a moment to write down what they have, then SIGTERM, then SIGKILL. So does one
that ends before it has joined those that wait for it, and an interrupt of the launcher.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import start_processes

from specdec.errors import ConfigError, SpecdecError
from specdec.parallel.groups import (
    RankError,
    call_before_joining,
    destroy_groups,
    is_broken_connection,
)

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_POLL_S = 1.0  # between two looks whether a rank is missed
_GRACE_S = 5.0  # for the other ranks to end by themselves, once one failed
_TERM_S = 3.0  # between SIGTERM and SIGKILL


class RankFailedError(RankError):
    """A rank ended before its work was done.

    Args:
        message: one sentence.
        rank: which.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def launch(fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = ()) -> None:
    """Run `fn(*args)` on ranks of this machine and wait for all.

    Args:
        fn: a module's own function; finds its rank in the environment (RANK, WORLD_SIZE).
        num_ranks: how many.
        args: what a new process can be given.

    Raises:
        ConfigError: fewer than one.
        RankFailedError: a rank died or raised, or ended before it joined the others, which wait for
            it; all others are ended by then.
        KeyboardInterrupt: the ranks were interrupted, too, and all are ended by then.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks={num_ranks} is not allowed; give an integer >= 1")
    # As torchrun's agent does: the store that ranks meet at outlives each of them.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="specdec-ranks-") as folder:
        entry = (fn, tuple(args), num_ranks, store.port, folder)
        context = start_processes(
            _run_rank, args=entry, nprocs=num_ranks, join=False, start_method="spawn"
        )
        assert context is not None
        processes: list[Any] = list(context.processes)
        try:
            # Asked once a turn: to wait for an empty list would never end.
            while (running := _running(processes)) and not _failed(processes, Path(folder)):
                connection.wait([process.sentinel for process in running], _POLL_S)
        except KeyboardInterrupt:
            _interrupt(processes)
            raise
        finally:
            try:
                _wait(processes, _GRACE_S)
            finally:  # a second interrupt waits no longer
                ended = {rank: p.exitcode for rank, p in enumerate(processes)}  # by themselves
                _end(processes)
        if any(ended[rank] for rank in ended) or None in ended.values():
            raise _failure(ended, Path(folder))


def _run_rank(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], *job: Any) -> None:
    """Be a rank: set up what torchrun would, run, and leave a note of what went wrong."""
    num_ranks, port, folder = job
    # torch has the system interrupt a rank whose launcher died. A job that a shell started in the
    # background ignores interrupts, and would go on for ever.
    signal.signal(signal.SIGINT, _be_interrupted)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    local |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": _HOST, "MASTER_PORT": port}
    local |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in local.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host's name resolves to
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # several ranks share the cores
    call_before_joining((Path(folder) / _joining(rank)).touch)
    try:
        fn(*args)
        destroy_groups()
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave_note(folder, rank, "ended", f"ended with exit code {end.code}")
        raise
    except BaseException as error:
        kind = "lost" if is_broken_connection(error) else "raised"
        reason = str(error)
        if isinstance(error, KeyboardInterrupt):
            reason = "it was interrupted"
        elif not isinstance(error, SpecdecError):
            reason = f"{type(error).__name__}: {error}"
            logger.error("rank %d failed", rank, exc_info=True)
        _leave_note(folder, rank, kind, f"failed: {reason}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the groups are in pieces: nothing is to wait for them on the way out


def _be_interrupted(number: int, frame: Any) -> None:
    """Interrupt this rank once: a shell and the launcher may both ask for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_note(folder: str, rank: int, kind: str, what: str) -> None:
    note = {"kind": kind, "what": what}
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(note), encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)


def _joining(rank: int) -> str:
    """Return the name of the file that tells that a rank joins the others, or has joined them."""
    return f"{rank}.joining"


def _running(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [p for p in processes if p.exitcode is None]


def _failed(processes: Sequence[BaseProcess], folder: Path) -> bool:
    """Return whether a rank died or raised, or ended while others wait for it to join them."""
    codes = [p.exitcode for p in processes]  # first: a rank may join and end between two looks
    joins = [(folder / _joining(rank)).exists() for rank in range(len(processes))]
    is_absent = [code == 0 and not j for code, j in zip(codes, joins, strict=True)]
    return any(codes) or (any(is_absent) and any(joins))


def _wait(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait until all have ended, so long at most."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _interrupt(processes: Sequence[BaseProcess]) -> None:
    """Interrupt what still runs, so that it writes down what it has."""
    for process in _running(processes):
        assert process.pid is not None, "it runs"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)


def _end(processes: Sequence[BaseProcess]) -> None:
    """End what still runs."""
    for process in _running(processes):
        process.terminate()
    _wait(processes, _TERM_S)
    for process in _running(processes):
        process.kill()
    _wait(processes, _TERM_S)


def _failure(ended: dict[int, int | None], folder: Path) -> RankFailedError:
    """Say which rank failed first and why.

    Args:
        ended: the exit code of each rank, None where it had to be ended.
        folder: holds the ranks' notes.
    """
    # A signal or an error of its own is a cause; to have lost another rank is a consequence, of one
    # that ended as if all were done where nothing else is known.
    found: list[tuple[int, int, str]] = []
    for rank, code in ended.items():
        path = folder / f"{rank}.json"
        if code is None:
            found.append((6, rank, "did not end"))
        elif code < 0:
            found.append((0, rank, f"was ended by {_signal_name(-code)}"))
        elif code and path.is_file():
            note = json.loads(path.read_text(encoding="utf-8"))
            found.append(({"raised": 1, "ended": 2, "lost": 5}[note["kind"]], rank, note["what"]))
        elif code:
            found.append((3, rank, f"ended with exit code {code}"))
        else:
            found.append((4, rank, "ended with exit code 0 while other ranks waited for it"))
    _, rank, what = min(found)
    return RankFailedError(
        f"rank {rank} of {len(ended)} {what}; so all ranks were ended, and what was finished "
        "before stays",
        rank,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
