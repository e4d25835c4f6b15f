"""What linear layer is launched, and how."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A layer as its launch is chosen.

    Args:
        rows: outputs; of the gate alone where `glu`.
        columns: inputs.
        glu: gate and up in one, with the activation.
        eight_bit: the weight is one of `runner.models.fp8`.
    """

    rows: int
    columns: int
    glu: bool = False
    eight_bit: bool = False

    @property
    def weight_rows(self) -> int:
        """Return the rows of the weight."""
        return self.rows * (2 if self.glu else 1)


@dataclass(frozen=True)
class LinearLaunch:
    """How a kernel of `runner.models.linear` is launched.

    Args:
        block_t: tokens of a program, a power of two from 16 on.
        block_n: rows of the weight of a program.
        block_k: columns a step.
        splits: programs that share the inner dimension.
        num_warps: of a program.
        num_stages: steps in flight.
        prefetch: bytes of each row of the weight that are asked for ahead, a multiple of 16.
        more_t: tokens behind the first `block_t` that the same program takes; 0 or a power of two.
        early: let the next kernel begin at once, not when the loop is over; for layers so small
            that programs of both fit every multiprocessor.
        tiled: whole tiles are moved by the tensor memory accelerator (`linear_tiled`); pays from
            some tens of tokens on. Without `prefetch`.
    """

    block_t: int
    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    more_t: int = 0
    early: bool = False
    tiled: bool = False
