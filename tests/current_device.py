"""Which device a module made the current one, for machines without a second GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def record_devices(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[torch.device]:
    """Let a module's `on_device` keep what is current in a list, outermost first."""
    current: list[torch.device] = []

    @contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(module, "on_device", recorded)
    return current
