"""Suffix decoding: propose what most often followed the last tokens, here and in past outputs.

Two trees are searched, that of the row's own text and one of the outputs of requests that ended.
Every length of match is tried; the continuation whose expected number of right tokens is largest
wins. A longer match earns a longer draft, and an unlikely continuation a shorter one. It runs on
the host, on token lists: each step waits for it.

Source: Oliaro et al. 2024, SuffixDecoding.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafters.base import DrafterBase, DrafterConfig
from drafters.suffix_tree import DraftRule, SuffixTree
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, HostRequest, HostRow
from specdec.registry import register_drafter

# About what CPython takes for a node with its dictionary.
_NODE_BYTES = 400


@dataclass
class SuffixConfig(DrafterConfig):
    """Parameters of suffix decoding.

    Args:
        max_depth: longest run of tokens that is looked at, match and draft together; at least 2.
        max_spec_factor: drafts at most for each token that matched; above 0.
        min_token_prob: a draft ends before its probability falls under this, in [0, 1].
        use_global: also search the outputs of requests that ended, in the same engine.
        max_global_tokens: of these outputs; the least recent ones are forgotten.
    """

    name: str = "suffix"
    max_depth: int = 64
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    use_global: bool = True
    max_global_tokens: int = 100_000

    def __post_init__(self) -> None:
        """Check every range."""
        for key, allowed, is_right in (
            ("max_depth", "an integer >= 2", self.max_depth >= 2),
            ("max_spec_factor", "a number > 0", 0 < self.max_spec_factor < float("inf")),
            ("min_token_prob", "a number in [0, 1]", 0 <= self.min_token_prob <= 1),
            ("max_global_tokens", "an integer >= 1", self.max_global_tokens >= 1),
        ):
            if not is_right:
                value = getattr(self, key)
                raise ConfigError(f"drafter suffix: {key}={value} is not allowed; give {allowed}")


class _OwnTree:
    """The tree of one text that grows."""

    def __init__(self, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.num_added = 0

    def grow(self, text: Sequence[int]) -> None:
        """Add the windows that became complete."""
        num_complete = max(len(text) - self.tree.max_depth + 1, 0)
        self.tree.add(text, self.num_added, num_complete)
        self.num_added = num_complete


@register_drafter("suffix", SuffixConfig)
class SuffixDrafter(DrafterBase):
    """Keeps a tree for each unfinished request, and one of past outputs."""

    capabilities = DrafterCapabilities(
        on_cpu=True, variable_length=True, reads_token_table=False, uses_history=True
    )
    config: SuffixConfig

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__(config)
        # Without the outputs of other requests, drafts follow from the row's own text.
        self.capabilities = replace(self.capabilities, uses_history=config.use_global)
        self._rule = DraftRule(config.max_spec_factor, config.min_token_prob)
        self._own: dict[HostRequest, _OwnTree] = {}
        self._past = SuffixTree(config.max_depth)
        self._outputs: deque[list[int]] = deque()  # what the tree of past outputs holds
        self._num_past_tokens = 0

    def propose(self, ctx: DraftContext) -> None:
        """Leave the rows as they are: drafts come from the host."""

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        """Search both trees for each row; its own text wins where they are equally good."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: HostRow) -> list[int]:
        text = row.request.token_ids
        own = self._own.setdefault(row.request, _OwnTree(self.config.max_depth))
        own.grow(text)
        found = [
            own.tree.draft(text, own.num_added, row.num_drafts, self._rule),
            self._past.draft(text, len(text), row.num_drafts, self._rule),
        ]
        best = max((d for d in found if d), key=lambda draft: draft.score, default=None)
        return best.token_ids if best else []

    def end_request(self, request: HostRequest) -> None:
        """Move a text's output into the tree of past outputs, and forget the rest."""
        self._own.pop(request, None)
        limit = self.config.max_global_tokens
        output = list(request.token_ids[request.prompt_len :])[-limit:]
        if not self.config.use_global or not output:
            return
        while self._num_past_tokens + len(output) > limit:
            oldest = self._outputs.popleft()
            self._past.remove(oldest)
            self._num_past_tokens -= len(oldest)
        self._outputs.append(output)
        self._past.add(output, 0, len(output))
        self._num_past_tokens += len(output)

    def state_bytes(self) -> int:
        """Return about what the trees take of host memory."""
        trees = [self._past, *(own.tree for own in self._own.values())]
        return _NODE_BYTES * sum(tree.num_nodes for tree in trees)
