"""The stage `data`: the target writes the texts that its drafters are trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.training.stage import StageRun


@dataclass
class DataConfig:
    """Options of the stage `data`."""

    target: str = "smollm2-135m-instruct"
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0


def run_data(config: DataConfig, run: StageRun) -> Mapping[str, Any]:
    """Write a dataset."""
    raise NotImplementedError
