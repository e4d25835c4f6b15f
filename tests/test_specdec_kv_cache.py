"""The block allocator against a plain set: nothing owned twice, nothing lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.kv_cache import BlockAllocator


class Blocks(RuleBasedStateMachine):
    """Owners grow and are freed in any order."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def create(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.owners: list[list[int]] = [[] for _ in range(4)]

    @rule(owner=st.integers(0, 3), num_tokens=st.integers(0, 70))
    def grow(self, owner: int, num_tokens: int) -> None:
        held, num_free = list(self.owners[owner]), self.allocator.num_free
        new = self.allocator.grow(self.owners[owner], num_tokens)
        # The smallest number of blocks that holds the tokens, counted one by one.
        needed = next(n for n in range(100) if n * self.allocator.block_size >= num_tokens)
        missing = max(0, needed - len(held))
        if missing > num_free:
            assert new is None
            assert (self.owners[owner], self.allocator.num_free) == (held, num_free)
        else:
            assert new is not None
            assert len(new) == missing
            # What was handed out before stays in its place: block tables are only appended to.
            assert self.owners[owner] == held + new

    @rule(owner=st.integers(0, 3))
    def free(self, owner: int) -> None:
        num_free, num_held = self.allocator.num_free, len(self.owners[owner])
        self.allocator.free(self.owners[owner])
        assert self.owners[owner] == []
        assert self.allocator.num_free == num_free + num_held

    @invariant()
    def blocks_are_conserved_and_owned_once(self) -> None:
        owned = [block for held in self.owners for block in held]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(self.allocator.num_blocks))
        assert len(owned) + self.allocator.num_free == self.allocator.num_blocks


Blocks.TestCase.settings = settings(max_examples=60, deadline=None, derandomize=True)
TestBlocks = Blocks.TestCase


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert BlockAllocator(8, 16).blocks_for(num_tokens) == num_blocks


def test_every_block_can_be_handed_out_again() -> None:
    allocator, held = BlockAllocator(5, 4), []
    for _ in range(3):
        assert sorted(allocator.grow(held, 20) or []) == [0, 1, 2, 3, 4]
        assert allocator.grow([], 1) is None
        allocator.free(held)
