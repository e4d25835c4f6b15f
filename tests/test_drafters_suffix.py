"""Suffix decoding: the tree against a plain count of all occurrences, and the drafter's memory."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters import suffix_tree
from drafters.suffix import SuffixConfig, SuffixDrafter
from drafters.suffix_tree import DraftRule, SuffixTree
from specdec.errors import ConfigError
from specdec.protocols import HostRequest, HostRow
from tests.hypotheses import QUICK

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), max_size=4)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=24)
RULES = st.builds(DraftRule, st.sampled_from([0.4, 1.0, 3.0]), st.sampled_from([0.0, 0.3, 0.8]))


def count_next(
    texts: list[Sequence[int]], pattern: list[int], text: Sequence[int] | None
) -> dict[int, tuple[int, int]]:
    """Count in plain lists what follows a pattern, and when it did last; no end follows itself."""
    found: dict[int, tuple[int, int]] = {}
    when = 0
    for known in [*texts, *([] if text is None else [text])]:
        for start in range(len(known)):
            when += 1
            end = start + len(pattern)
            if end < len(known) and list(known[start:end]) == pattern:
                token = known[end]
                found[token] = found.get(token, (0, 0))[0] + 1, when
    return found


def plain_draft(
    texts: list[Sequence[int]],
    text: list[int],
    own: bool,
    num_drafts: int,
    max_depth: int,
    rule: DraftRule,
) -> tuple[list[int], float] | None:
    """Draft as the definition says it, by counting anew at every token."""
    best: tuple[list[int], float] | None = None
    for length in range(min(len(text), max_depth - 1), 0, -1):
        draft: list[int] = []
        score, probability = 0.0, 1.0
        most = min(num_drafts, int(rule.max_spec_factor * length), max_depth - length)
        while len(draft) < most:
            pattern = text[len(text) - length :] + draft
            options = count_next(texts, pattern, text if own else None)
            if not options:
                break
            token = max(options, key=options.__getitem__)
            probability *= options[token][0] / sum(n for n, _ in options.values())
            if probability < rule.min_token_prob:
                break
            draft.append(token)
            score += probability
        if draft and (best is None or score > best[1]):
            best = draft, score
    return best


def nodes_of(tree: SuffixTree) -> list[Any]:
    stack, found = [tree._root], []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found[1:]


def content(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """Return every run of tokens that ends at a node, and its count."""
    runs: dict[tuple[int, ...], int] = {}

    def walk(node: Any, before: tuple[int, ...]) -> None:
        for child in node.children.values():
            edge = tuple(child.text[child.start : child.start + child.length])
            assert len(edge) == child.length
            runs[before + edge] = child.count
            walk(child, before + edge)

    walk(tree._root, ())
    return runs


@QUICK
@given(TEXTS, TEXT, st.integers(2, 9), st.integers(1, 6), RULES)
def test_drafts_from_past_texts_are_those_of_a_plain_count(
    texts: list[list[int]], text: list[int], max_depth: int, num_drafts: int, rule: DraftRule
) -> None:
    tree = SuffixTree(max_depth)
    for past in texts:
        tree.add(past, 0, len(past))
    draft = tree.draft(text, len(text), num_drafts, rule)
    expected = plain_draft(list(texts), text, False, num_drafts, max_depth, rule)
    assert (None if draft is None else (draft.token_ids, draft.score)) == expected


@QUICK
@given(TEXT, st.lists(st.integers(1, 5)), st.integers(2, 9), st.integers(1, 6), RULES)
def test_drafts_from_a_growing_text_are_those_of_a_plain_count(
    text: list[int], runs: list[int], max_depth: int, num_drafts: int, rule: DraftRule
) -> None:
    tree, grown, num_added = SuffixTree(max_depth), text[:1], 0
    for run in [*runs, len(text)]:
        grown += text[len(grown) : len(grown) + run]
        num_complete = max(len(grown) - max_depth + 1, 0)
        tree.add(grown, num_added, num_complete)
        num_added = num_complete
        draft = tree.draft(grown, num_added, num_drafts, rule)
        expected = plain_draft([], grown, True, num_drafts, max_depth, rule)
        assert (None if draft is None else (draft.token_ids, draft.score)) == expected


@QUICK
@given(TEXTS, st.integers(0, 4), st.integers(1, 9))
def test_removed_texts_leave_the_tree_of_those_that_stay(
    texts: list[list[int]], num_removed: int, max_depth: int
) -> None:
    tree, rest = SuffixTree(max_depth), SuffixTree(max_depth)
    for text in texts:
        tree.add(text, 0, len(text))
    for text in texts[:num_removed]:
        tree.remove(text)
    for text in texts[num_removed:]:
        rest.add(text, 0, len(text))
    assert content(tree) == content(rest)
    assert tree.num_nodes == rest.num_nodes == len(nodes_of(tree))
    # No edge names a text that was removed: it could not be freed.
    gone = {id(text) for text in texts[:num_removed]}
    assert not gone & {id(node.text) for node in nodes_of(tree)}


def test_a_text_takes_at_most_two_nodes_and_one_walk_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, common = [0], suffix_tree._common

    def counting(*args: Any) -> int:
        compared[0] += 1
        return common(*args)

    monkeypatch.setattr(suffix_tree, "_common", counting)
    rng = random.Random(0)
    block = [rng.randrange(50) for _ in range(500)]
    for text in ([7] * 2000, block * 4, [rng.randrange(4) for _ in range(2000)]):
        tree = SuffixTree(16)
        compared[0] = 0
        tree.add(text, 0, len(text))
        assert tree.num_nodes <= 2 * len(text)
        assert compared[0] <= 16 * len(text)


def requests(*texts: list[int], prompt_len: int = 1) -> list[HostRequest]:
    return [HostRequest(str(i), 0, prompt_len, text) for i, text in enumerate(texts)]


def propose(drafter: SuffixDrafter, request: HostRequest, num_drafts: int = 4) -> list[int]:
    return drafter.propose_on_host([HostRow(request, 0, num_drafts)])[0]


def test_longer_matches_earn_longer_drafts() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=1.0, use_global=False))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for length, drafts in ((1, [4]), (2, [4, 5]), (3, [4, 5, 6])):
        (request,) = requests([*text, 0, *text[3 - length : 3]])
        assert propose(drafter, request) == drafts
    (request,) = requests([*text, 0, 2, 3])
    assert propose(SuffixDrafter(SuffixConfig(max_spec_factor=2.0)), request) == [4, 5, 6, 7]
    assert propose(SuffixDrafter(SuffixConfig(max_spec_factor=0.4)), request) == []


def test_a_draft_ends_where_the_past_went_different_ways() -> None:
    text = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7, 0, 1, 2, 3]
    (request,) = requests(text)
    sure = SuffixDrafter(SuffixConfig(min_token_prob=0.6, max_spec_factor=2))
    assert propose(sure, request) == [4]
    bold = SuffixDrafter(SuffixConfig(min_token_prob=0.1, max_spec_factor=2))
    assert propose(bold, request) == [4, 7, 0, 1]  # of equals the most recent


def test_a_loop_is_seen_at_once() -> None:
    (request,) = requests([5, *[8, 9] * 4])
    assert propose(SuffixDrafter(SuffixConfig()), request) == [8, 9, 8, 9]


def test_outputs_of_requests_that_ended_are_searched_and_their_prompts_are_not() -> None:
    old, new = requests([20, 21, 22, 1, 2, 3, 4], [9, 1, 2], prompt_len=3)
    (asks_prompt,) = requests([20, 21])
    drafter = SuffixDrafter(SuffixConfig())
    assert propose(drafter, new) == []
    drafter.end_request(old)
    assert propose(drafter, new) == [3, 4]
    assert propose(drafter, asks_prompt) == []
    alone = SuffixDrafter(SuffixConfig(use_global=False))
    alone.end_request(old)
    assert propose(alone, new) == []


def test_past_outputs_are_forgotten_oldest_first() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_global_tokens=10, max_spec_factor=4))
    texts = [[0, 10 * i, *range(10 * i + 1, 10 * i + 5)] for i in range(1, 5)]
    sizes = []
    for request in requests(*texts, prompt_len=1):
        drafter.end_request(request)
        sizes.append(drafter.state_bytes())
    found = [propose(drafter, request) for request in requests(*[text[:2] for text in texts])]
    assert found == [[], [], [31, 32, 33, 34], [41, 42, 43, 44]]
    assert sizes[1] == sizes[2] == sizes[3]
    (long,) = requests([0, *range(100, 150)])
    drafter.end_request(long)
    (request,) = requests([0, 140])
    assert propose(drafter, request) == [141, 142, 143, 144]
    (request,) = requests([0, 120])
    assert propose(drafter, request) == []


def test_a_request_that_ended_leaves_no_tree_of_its_own() -> None:
    drafter = SuffixDrafter(SuffixConfig(use_global=False, max_depth=4))
    (request,) = requests(list(range(40)))
    propose(drafter, request)
    assert drafter.state_bytes() > 0
    drafter.end_request(request)
    assert drafter.state_bytes() == 0
    assert not drafter._own


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_depth", 1),
        ("max_spec_factor", 0.0),
        ("max_spec_factor", float("nan")),
        ("min_token_prob", 1.5),
        ("min_token_prob", -0.1),
        ("max_global_tokens", 0),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"suffix: {key}={value} .* give "):
        SuffixConfig(**{key: value})
