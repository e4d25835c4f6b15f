"""How often every run of tokens occurred in some texts, up to a bounded length.

A path-compressed tree over the *windows* of the texts: at each place the next `max_depth` tokens,
or what there is of them before the text ends. Each window is added whole, in O(max_depth) steps and
at most two new nodes, so a text of n tokens costs O(n * max_depth) and at most 2 n nodes. Windows
are removed again at the same cost, in the order in which they came.

The windows of a text that still grows are added as they become complete; its last max_depth - 1
tokens are searched as they are, so that even a loop of one token is seen at once.

Source: Oliaro et al. 2024, SuffixDecoding (the tree, and how a draft is scored).
"""

from collections.abc import Sequence
from dataclasses import dataclass


class _Node:
    """A node and the edge that leads to it: `length` tokens of `text`, from `start` on."""

    __slots__ = ("children", "count", "length", "stamp", "start", "text")

    def __init__(self, text: Sequence[int], start: int, length: int, stamp: int) -> None:
        self.text, self.start, self.length = text, start, length
        self.stamp = stamp  # of the last window that came by
        self.count = 1  # windows that come by, or end here
        self.children: dict[int, _Node] = {}


# A place in the tree: a node, and how many tokens of its edge were taken (at least one).
_Locus = tuple[_Node, int]


@dataclass(frozen=True)
class DraftRule:
    """Which continuations are worth a draft.

    Args:
        max_spec_factor: drafts at most, for each token that matched.
        min_token_prob: a draft ends before its probability, the product along it, falls under this.
    """

    max_spec_factor: float
    min_token_prob: float


@dataclass(frozen=True)
class Draft:
    """A continuation that was found."""

    token_ids: list[int]
    score: float  # tokens of it that are expected to be right, were the past like the future


class SuffixTree:
    """The windows of some texts.

    Args:
        max_depth: longest run of tokens, what matched and what follows together.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_nodes = 0
        self._root = _Node((), 0, 0, 0)
        self._clock = 0  # windows added so far

    def add(self, text: Sequence[int], first: int, last: int) -> None:
        """Add the windows that begin at places first .. last - 1 of a text.

        Args:
            text: kept, not copied: it may grow, but none of its tokens may change.
            first: place of the first window.
            last: place behind the last one.
        """
        for start in range(first, last):
            self._clock += 1
            self._insert(text, start, min(start + self.max_depth, len(text)))

    def _insert(self, text: Sequence[int], start: int, stop: int) -> None:
        node = self._root
        while start < stop:
            child = node.children.get(text[start])
            if child is None:
                node.children[text[start]] = _Node(text, start, stop - start, self._clock)
                self.num_nodes += 1
                return
            length = _common(child, text, start, stop)
            if length < child.length:
                child = self._split(node, child, length)
            child.count += 1
            # The edge is named by the newest text, which is the last to be removed.
            child.text, child.start, child.stamp = text, start, self._clock
            node, start = child, start + length

    def _split(self, parent: _Node, child: _Node, length: int) -> _Node:
        """Cut an edge in two behind `length` tokens; returns the new node there."""
        upper = _Node(child.text, child.start, length, child.stamp)
        upper.count = child.count
        parent.children[child.text[child.start]] = upper
        child.start += length
        child.length -= length
        upper.children[child.text[child.start]] = child
        self.num_nodes += 1
        return upper

    def remove(self, text: Sequence[int]) -> None:
        """Remove all windows of a text: the one that was added first of those that are left."""
        for start in range(len(text)):
            self._delete(text, start, min(start + self.max_depth, len(text)))

    def _delete(self, text: Sequence[int], start: int, stop: int) -> None:
        path = [self._root]
        while start < stop:
            child = path[-1].children[text[start]]
            child.count -= 1
            if child.count == 0:  # and with it all that is below
                del path[-1].children[text[start]]
                self.num_nodes -= _size(child)
                break
            path.append(child)
            start += child.length
        for node in reversed(path[1:]):
            self._merge(node)

    def _merge(self, node: _Node) -> None:
        """Undo a split that has become needless: every window that comes by goes on alike."""
        if len(node.children) == 1:
            (child,) = node.children.values()
            if child.count == node.count:
                node.text, node.start = child.text, child.start - node.length
                node.length += child.length
                node.stamp, node.children = child.stamp, child.children
                self.num_nodes -= 1

    def draft(
        self, text: Sequence[int], num_added: int, num_drafts: int, rule: DraftRule
    ) -> Draft | None:
        """Find the continuation of a text's last tokens with the best score.

        For each length of what matches, the likeliest token is followed from node to node: counts
        are probabilities. Of equal counts the more recent one is taken. At most max_depth matches
        are found and followed, each in O(max_depth) steps.

        Args:
            text: whole; not empty.
            num_added: its windows that the tree has: all that are complete. Those behind them are
                searched in the text itself. For a tree of other texts alone, the text's length.
            num_drafts: longest draft.
            rule: what is worth it.

        Returns:
            None where nothing matches, or no continuation is likely enough.
        """
        best: Draft | None = None
        matches = self._matches(text, num_added)
        for length in range(len(matches), 0, -1):
            most = min(num_drafts, int(rule.max_spec_factor * length))
            if best is not None and best.score >= most:
                break  # no shorter match can do better
            locus, ends = matches[length - 1]
            walk = _Walk(text, locus, ends, self._clock)
            found = walk.follow(min(most, self.max_depth - length), rule.min_token_prob)
            if found.token_ids and (best is None or found.score > best.score):
                best = found
        return best

    def _matches(
        self, text: Sequence[int], num_added: int
    ) -> list[tuple[_Locus | None, list[int]]]:
        """Find the last 1, 2, .. tokens of a text, up to the longest run that occurs.

        Returns:
            For each length the place in the tree, and the ends of the occurrences that begin at or
            behind `num_added` in the text itself.
        """
        matches: list[tuple[_Locus | None, list[int]]] = []
        num_tokens, in_tree = len(text), True
        # A window that is not complete begins here at the earliest.
        ends = [e for e in range(num_added, num_tokens - 1) if text[e] == text[-1]]
        for length in range(1, min(num_tokens, self.max_depth - 1) + 1):
            token = text[num_tokens - length]
            ends = [
                e for e in ends if e - length + 1 >= num_added and text[e - length + 1] == token
            ]
            locus = self._find(text, num_tokens - length) if in_tree else None
            in_tree = locus is not None
            if locus is None and not ends:
                break
            matches.append((locus, ends))
        return matches

    def _find(self, text: Sequence[int], start: int) -> _Locus | None:
        """Return the place of a text's tokens from `start` to its end, None where they are new."""
        node, taken, stop = self._root, 0, len(text)
        while start < stop:
            child = node.children.get(text[start])
            if child is None:
                return None
            taken = _common(child, text, start, stop)
            start += taken
            if taken < child.length and start < stop:
                return None
            node = child
        return node, taken


class _Walk:
    """A walk from a match along the likeliest tokens.

    Args:
        text: whose occurrences are followed besides the tree's.
        locus: in the tree, where it has the match.
        ends: of the occurrences in the text.
        clock: of the tree: whatever lies in the text alone is more recent.
    """

    def __init__(
        self, text: Sequence[int], locus: _Locus | None, ends: list[int], clock: int
    ) -> None:
        self._text, self._locus, self._ends, self._clock = text, locus, ends, clock

    def follow(self, num_drafts: int, min_token_prob: float) -> Draft:
        """Return the draft, which may be empty."""
        token_ids: list[int] = []
        score, probability = 0.0, 1.0
        while len(token_ids) < num_drafts:
            options = self._options()
            if not options:
                break
            token = max(options, key=options.__getitem__)
            probability *= options[token][0] / sum(count for count, _ in options.values())
            if probability < min_token_prob:
                break
            token_ids.append(token)
            score += probability
            self._take(token)
        return Draft(token_ids, score)

    def _options(self) -> dict[int, tuple[int, int]]:
        """Return the tokens that follow: how often, and when last."""
        options: dict[int, tuple[int, int]] = {}
        if self._locus is not None:
            node, taken = self._locus
            if taken < node.length:
                options[node.text[node.start + taken]] = node.count, node.stamp
            else:
                options = {t: (child.count, child.stamp) for t, child in node.children.items()}
        for end in self._ends:
            if end + 1 < len(self._text):
                token = self._text[end + 1]
                count = options[token][0] if token in options else 0
                options[token] = count + 1, self._clock + end + 1
        return options

    def _take(self, token: int) -> None:
        if self._locus is not None:
            node, taken = self._locus
            if taken < node.length:
                goes_on = node.text[node.start + taken] == token
                self._locus = (node, taken + 1) if goes_on else None
            else:
                child = node.children.get(token)
                self._locus = None if child is None else (child, 1)
        last = len(self._text)
        self._ends = [e + 1 for e in self._ends if e + 1 < last and self._text[e + 1] == token]


def _common(node: _Node, text: Sequence[int], start: int, stop: int) -> int:
    """Return how many tokens of a node's edge a run of another text begins with."""
    length = min(node.length, stop - start)
    edge = node.text[node.start : node.start + length]
    run = text[start : start + length]
    if edge == run:
        return length
    return next((i for i, (a, b) in enumerate(zip(edge, run, strict=True)) if a != b), length)


def _size(node: _Node) -> int:
    """Return the nodes of a subtree."""
    return 1 + sum(_size(child) for child in node.children.values())
