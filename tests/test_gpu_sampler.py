"""Draws and judgements over the vocabulary of a large model, which the interpreter is too slow for.

Run on a GPU machine with `pytest -m gpu`.
"""

import dataclasses

import pytest
import torch

from sampler.noise import STREAM_TARGET
from tests.test_sampler_kernels import Lines, compare_draws
from tests.test_sampler_verify_kernels import (
    VERIFICATIONS,
    compare_judgements,
    verify_inputs,
)
from tests.test_verify_kernels import compare_prefixes

pytestmark = pytest.mark.gpu

V = 128256
DEVICE = torch.device("cuda")
LINES = Lines(V, 9, 2, [0.0, 0.6, 1.0, 1.5], 4, STREAM_TARGET, 0)
VERIFICATION = {**VERIFICATIONS[-1], "vocab_size": V, "num_real": 4, "num_columns": 3}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_over_a_large_vocabulary_are_the_twins(seed: int) -> None:
    compare_draws(DEVICE, dataclasses.replace(LINES, seed=seed))


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_judgements_over_a_large_vocabulary_are_the_twins(spread: float) -> None:
    case = {**VERIFICATION, "spread": spread}
    compare_judgements(case, DEVICE)
    compare_prefixes(verify_inputs(case, DEVICE))
