"""Block allocator of the paged KV cache: pure bookkeeping on the CPU."""


class BlockAllocator:
    """Hands out block ids; a request holds a list of them that only grows until it is freed.

    Args:
        num_blocks: blocks in all.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Return the number of blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> list[int] | None:
        """Extend a request's list to hold `num_tokens` tokens.

        Returns:
            The new ids (also appended to `block_ids`), or None where there are too few; nothing is
            taken then.
        """
        missing = max(0, self.blocks_for(num_tokens) - len(block_ids))
        kept = len(self._free) - missing
        if kept < 0:
            return None
        new = self._free[kept:]
        new.reverse()
        del self._free[kept:]
        block_ids.extend(new)
        return new

    def free(self, block_ids: list[int]) -> None:
        """Take back every block of a request and empty its list."""
        self._free.extend(reversed(block_ids))
        block_ids.clear()
