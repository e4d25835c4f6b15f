"""What every chain verifier shares: count the accepted prefix and lay out the run."""

import torch
from torch import Tensor

from specdec.protocols import VerifyInputs, VerifyOutputs


def count_accepted(inputs: VerifyInputs, accepted: Tensor) -> Tensor:
    """Return how many leading lines of each place were accepted, [R] int64.

    Args:
        inputs: the step.
        accepted: [L] bool, whether the line accepts its draft (False where there is none).
    """
    grid = accepted[inputs.line_grid] & inputs.line_valid
    return grid.int().cumprod(1).sum(1)


def stop_lines(inputs: VerifyInputs, num_accepted: Tensor) -> Tensor:
    """Return the line that draws the token after the accepted drafts, [R] int64."""
    return inputs.line_grid.gather(1, num_accepted[:, None]).squeeze(1)


def assemble(inputs: VerifyInputs, num_accepted: Tensor, next_tokens: Tensor) -> VerifyOutputs:
    """Lay out accepted drafts followed by the token drawn after them.

    Args:
        inputs: the step.
        num_accepted: [R] int64.
        next_tokens: [R] int64.
    """
    drafts = inputs.draft_tokens[inputs.line_grid]
    j = torch.arange(drafts.shape[1], device=drafts.device)
    count = num_accepted[:, None]
    run = torch.where(j < count, drafts, torch.where(j == count, next_tokens[:, None], -1))
    return VerifyOutputs(run, (num_accepted + 1).int())


def verify_argmax(inputs: VerifyInputs) -> VerifyOutputs:
    """Keep drafts while they equal the target's argmax, then emit the argmax."""
    best = inputs.logits.argmax(1)
    num_accepted = count_accepted(inputs, best == inputs.draft_tokens)
    return assemble(inputs, num_accepted, best[stop_lines(inputs, num_accepted)])
