"""Which implementation a launcher takes: the Triton kernel or its torch twin.

CPU tensors take the twin. Under Triton's interpreter (TRITON_INTERPRET=1, read when a kernel is
decorated) CPU tensors run the kernel itself, which is how kernels are held to their twins on a
machine without a GPU.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_triton(tensor: Tensor) -> bool:
    """Return whether a launcher given this tensor must run its kernel."""
    return tensor.is_cuda or _INTERPRETING


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device.index or 0) if device.type == "cuda" else nullcontext()
