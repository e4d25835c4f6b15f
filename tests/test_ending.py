"""Where a text ends: the earliest event wins, and nothing behind it shows anywhere."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec import LLM, RequestOutput, SamplingParams
from specdec.ending import Detokenizer, Trimmed, trim
from specdec.types import Increment
from tests.models import byte_tokenizer, scripted_model, tiny_target

PIECES = ["Once", " the", " lamp", " was", " lit", " and", " ships", " came", " ho", "me"]
TOKENIZER = byte_tokenizer(PIECES)
EOS: int = TOKENIZER.eos_token_id
PROMPT = "#"
_WORDS = list(range(256, 256 + len(PIECES)))
# Words, then characters of two, three and four bytes, one token a byte; no token comes twice.
STORY = [*_WORDS[:5], *"\u00e9\u706f\U0001f642".encode(), *_WORDS[5:], EOS]
TEXT = "Once the lamp was lit\u00e9\u706f\U0001f642 and ships came home"
NUM_DRAFTS = 4
STOP_STRINGS = [
    "lamp",
    "p w",
    "e l",
    "Once",
    "home",
    "t\u00e9\u706f",
    "\U0001f642",
    "o",
    "Once the lamp",
]


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of whole tokens, without special ones."""
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=True)


@functools.cache
def story_target() -> Any:
    """Return a target whose greedy text after "#" is the story, over and over."""
    successor = list(range(len(TOKENIZER)))
    for token, following in zip([ord(PROMPT), *STORY], [*STORY, STORY[0]], strict=True):
        successor[token] = following
    return tiny_target(scripted_model(successor), TOKENIZER)


def write(
    params: Sequence[SamplingParams], max_model_len: int = 64, **options: Any
) -> tuple[list[RequestOutput], list[list[Increment]]]:
    """Write the story once for each of `params`, all drafts accepted, and keep the increments.

    The oracle knows the text past its end, so that ends fall inside accepted runs.
    """
    known = [ord(PROMPT), *STORY, *STORY, *STORY]
    options.setdefault("num_speculative_tokens", NUM_DRAFTS)
    drafter = {"name": "oracle", "texts": [known]}
    llm = LLM(story_target(), drafter, "greedy", max_model_len=max_model_len, **options)
    increments: dict[str, list[Increment]] = {}
    outputs = llm.generate(
        [PROMPT] * len(params),
        params,
        on_increment=lambda i: increments.setdefault(i.request_id, []).append(i),
    )
    return outputs, [increments[output.request_id] for output in outputs]


def greedy(**fields: Any) -> SamplingParams:
    """Return greedy parameters with room for the whole story twice."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 2 * len(STORY), **fields})


def assert_streamed(output: RequestOutput, increments: list[Increment]) -> None:
    """Check that the increments are the output, cut into pieces, and that one ends it."""
    assert [t for i in increments for t in i.new_token_ids] == output.token_ids
    assert "".join(i.new_text for i in increments) == output.text
    assert [i.output for i in increments] == [None] * (len(increments) - 1) + [output]
    assert increments[-1].finish_reason == output.finish_reason


# --- through the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 4, 5, 6])
def test_eos_inside_an_accepted_run_ends_the_text(num_drafts: int) -> None:
    (output,), (increments,) = write([greedy()], num_speculative_tokens=num_drafts)
    assert output.token_ids == STORY
    assert output.text == TEXT
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert_streamed(output, increments)


def test_eos_is_passed_over_where_it_is_ignored() -> None:
    (output,), (increments,) = write([greedy(ignore_eos=True)])
    assert output.token_ids == STORY * 2
    assert output.text == TEXT * 2
    assert output.finish_reason == "length"
    assert_streamed(output, increments)


def test_stop_token_ends_the_text_wherever_in_a_run_it_falls() -> None:
    params = [greedy(stop_token_ids=[token]) for token in STORY[:-1]]
    for i, (output, increments) in enumerate(zip(*write(params), strict=True)):
        assert output.token_ids == STORY[: i + 1]
        assert output.text == decode(STORY[:i])
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", STORY[i])
        assert_streamed(output, increments)


def test_stop_string_cuts_the_text_and_keeps_the_token_that_completes_it() -> None:
    params = [greedy(stop=string) for string in STOP_STRINGS]
    for string, output, increments in zip(STOP_STRINGS, *write(params), strict=True):
        completes = next(n for n in range(len(STORY)) if string in decode(STORY[:n]))
        assert output.token_ids == STORY[:completes]
        assert output.text == TEXT[: TEXT.index(string)]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", string)
        assert_streamed(output, increments)


def test_max_tokens_ends_the_text_wherever_in_a_run_it_falls() -> None:
    params = [greedy(max_tokens=n) for n in range(1, len(STORY))]
    for n, (output, increments) in enumerate(zip(*write(params), strict=True), start=1):
        assert output.token_ids == STORY[:n]
        assert output.text == decode(STORY[:n])
        assert output.finish_reason == "length"
        assert_streamed(output, increments)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_max_model_len_ends_the_text_wherever_in_a_run_it_falls(steps_in_flight: int) -> None:
    for length in range(2, 14):
        (output,), (increments,) = write(
            [greedy()], max_model_len=length, max_steps_in_flight=steps_in_flight
        )
        assert output.token_ids == STORY[: length - 1]
        assert output.finish_reason == "length"
        assert_streamed(output, increments)


def test_earliest_of_many_ends_wins() -> None:
    cases = [
        (greedy(stop="lamp", stop_token_ids=[STORY[1]]), 2, STORY[1]),
        (greedy(stop="the", stop_token_ids=[STORY[2]]), 2, "the"),
        (greedy(stop=["lamp", "the"], max_tokens=3), 2, "the"),
        (greedy(stop=["lamp"], max_tokens=2), 2, None),
        (greedy(stop=["lamp"], stop_token_ids=[EOS], max_tokens=3), 3, "lamp"),
        (greedy(stop_token_ids=[EOS], max_tokens=len(STORY)), len(STORY), None),
        (greedy(stop_token_ids=[EOS], ignore_eos=True), len(STORY), EOS),
        # Both complete in one token: the one that begins first cuts.
        (greedy(stop=["amp", "lamp", " la"]), 3, " la"),
    ]
    outputs, _ = write([params for params, _, _ in cases])
    for output, (_, num_tokens, stop_reason) in zip(outputs, cases, strict=True):
        assert output.token_ids == STORY[:num_tokens]
        assert output.outputs[0].stop_reason == stop_reason
    assert outputs[3].finish_reason == "length"
    assert outputs[7].text == "Once the"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_statistics_exclude_what_is_behind_a_stop(steps_in_flight: int) -> None:
    params = [greedy(stop_token_ids=[token]) for token in STORY[:-1]]
    outputs, _ = write(params, max_steps_in_flight=steps_in_flight)
    for i, output in enumerate(outputs):
        # The prompt's last chunk samples the first token; a step commits NUM_DRAFTS + 1 at most.
        runs = [min(NUM_DRAFTS + 1, i - start) for start in range(0, i, NUM_DRAFTS + 1)]
        accepted = [min(run, NUM_DRAFTS) for run in runs]
        stats = output.stats
        assert stats.num_verify_steps == len(runs)
        assert stats.num_verify_tokens == i
        assert stats.num_accepted == stats.num_drafted == sum(accepted)
        by_position = [sum(n > position for n in accepted) for position in range(NUM_DRAFTS)]
        assert stats.accepted_per_position == stats.drafted_per_position == by_position


def test_last_steps_draft_no_more_than_max_tokens_leaves() -> None:
    outputs, _ = write([greedy(max_tokens=n) for n in range(1, len(STORY))])
    for i, output in enumerate(outputs):
        runs = [min(NUM_DRAFTS + 1, i - start) for start in range(0, i, NUM_DRAFTS + 1)]
        stats = output.stats
        assert stats.num_verify_tokens == i
        # Of a run of n tokens the last is the target's own: n - 1 drafts were enough.
        assert stats.num_drafted == stats.num_accepted == sum(run - 1 for run in runs)


def test_characters_split_over_tokens_are_streamed_whole() -> None:
    (output,), (increments,) = write([greedy()], num_speculative_tokens=0)
    assert all("\ufffd" not in increment.new_text for increment in increments)
    assert len(increments) == len(STORY)
    # Cut inside a character: what is left of it shows as one replacement at the very end.
    inside = STORY.index(0x9F) + 1
    (output,), (increments,) = write([greedy(max_tokens=inside)])
    assert output.text == "Once the lamp was lit\u00e9\u706f\ufffd"
    assert_streamed(output, increments)


def test_aborted_text_is_streamed_to_its_last_token() -> None:
    llm = LLM(story_target(), "none", "greedy", max_model_len=64)
    llm.engine.add_request("a", PROMPT, greedy(stop="ships sailed"))
    increments = [i for _ in range(3) for i in llm.engine.step()]
    llm.engine.abort("a")
    increments += llm.engine.step()
    output = increments[-1].output
    assert output is not None
    assert output.text == "Once the lamp"
    assert_streamed(output, increments)
    assert not llm.engine.has_requests


# --- trim and the detokenizer alone ---------------------------------------------------------------


def trim_in_runs(
    token_ids: Sequence[int], cuts: Sequence[int], room: int, params: SamplingParams
) -> tuple[list[int], Trimmed, str, list[str]]:
    """Trim a text that comes in runs cut at `cuts`; returns kept ids, end, text and the stream."""
    detokenizer = Detokenizer(TOKENIZER, params.stop_strings)
    kept: list[int] = []
    streamed: list[str] = []
    trimmed = Trimmed([])
    bounds = sorted({0, len(token_ids), *cuts})
    for start, end in itertools.pairwise(bounds):
        run = token_ids[start:end]
        before = len(detokenizer.token_ids)
        trimmed = trim(run, room - len(kept), params, frozenset({EOS}), detokenizer)
        kept += trimmed.token_ids
        if trimmed.finish_reason is not None:
            detokenizer.finish()
            streamed.append(detokenizer.piece(before, len(kept), final=True))
            break
        streamed.append(detokenizer.piece(before, len(kept), final=False))
    else:
        detokenizer.finish()
        streamed.append(detokenizer.piece(len(kept), len(kept), final=True))
    return kept, trimmed, detokenizer.text, streamed


TOKENS = st.lists(st.sampled_from(STORY), min_size=1, max_size=20)
CUTS = st.lists(st.integers(0, 20), max_size=8)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    token_ids=TOKENS,
    cuts=CUTS,
    room=st.integers(1, 24),
    stop=st.lists(st.sampled_from(STOP_STRINGS), max_size=2),
    stop_token_ids=st.lists(st.sampled_from(STORY), max_size=2),
    ignore_eos=st.booleans(),
)
def test_end_of_a_text_does_not_depend_on_how_it_is_cut_into_runs(
    token_ids: list[int],
    cuts: list[int],
    room: int,
    stop: list[str],
    stop_token_ids: list[int],
    ignore_eos: bool,
) -> None:
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    kept, trimmed, text, streamed = trim_in_runs(token_ids, cuts, room, params)

    assert (kept, text) == trim_in_runs(token_ids, [], room, params)[::2]
    assert "".join(streamed) == text
    ends = [
        [n for n, t in enumerate(token_ids, 1) if t == EOS and not ignore_eos],
        [n for n, t in enumerate(token_ids, 1) if t in stop_token_ids],
        [n for n in range(1, len(token_ids) + 1) if any(s in decode(token_ids[:n]) for s in stop)],
        [room] if room <= len(token_ids) else [],
    ]
    earliest = min((n for numbers in ends for n in numbers), default=None)
    assert len(kept) == (earliest or len(token_ids))
    if earliest is None:
        assert trimmed.finish_reason is None
    elif earliest in ends[0] or earliest in ends[1]:
        assert trimmed.finish_reason == "stop"
        assert text == decode(token_ids[: earliest - 1])
    elif earliest in ends[2]:
        assert trimmed.stop_reason in stop
        whole = decode(token_ids[:earliest])
        assert text == whole[: min(whole.find(s) for s in stop if s in whole)]
    else:
        assert trimmed.finish_reason == "length"
        assert text == decode(token_ids[:earliest])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_ids=TOKENS, stop=st.sampled_from(STOP_STRINGS))
def test_nothing_that_becomes_a_stop_string_was_streamed(token_ids: list[int], stop: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, [stop])
    streamed = ""
    for i, token_id in enumerate(token_ids):
        found = detokenizer.add(token_id)
        # Checked before anything more is streamed: a cut must not reach what already went out.
        assert detokenizer.text.startswith(streamed)
        streamed += detokenizer.piece(i, i + 1, final=False)
        if found:
            break
    assert stop not in streamed


def test_no_tokenizer_gives_no_text_and_still_ends() -> None:
    detokenizer = Detokenizer(None)
    trimmed = trim([5, 6, EOS, 7], 9, SamplingParams(), frozenset({EOS}), detokenizer)
    assert trimmed == Trimmed([5, 6, EOS], "stop", None)
    assert detokenizer.text == ""


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer that, as SentencePiece's do, drops the space that begins a text."""
    words = ["<unk>", "<eos>", "\u2581Hello", "\u2581world", "\u2581", "!"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(token_ids=st.lists(st.integers(1, 5), max_size=8), stop=st.sampled_from([(), ("never",)]))
def test_special_tokens_inside_a_text_drop_no_space(token_ids: list[int], stop: tuple[str]) -> None:
    detokenizer, streamed = Detokenizer(word_tokenizer(), stop), ""
    for i, token_id in enumerate(token_ids):
        detokenizer.add(token_id)
        streamed += detokenizer.piece(i, i + 1, final=False)
    detokenizer.finish()
    streamed += detokenizer.piece(len(token_ids), len(token_ids), final=True)
    whole = word_tokenizer().decode(token_ids, skip_special_tokens=True)
    assert (detokenizer.text, streamed) == (whole, whole)
