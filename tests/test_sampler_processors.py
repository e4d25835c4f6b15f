"""Processors on the host: rows that change owners, what is refused, what is left out, dead ends."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sampler.processors.allowed_token_ids import AllowedTokenIds
from sampler.processors.bad_words import MAX_TOKENS, MAX_WORDS, encode_word
from sampler.processors.builtin import make_processors
from sampler.processors.chain import ProcessorChain
from sampler.processors.logit_bias import MAX_BIASED_TOKENS
from sampler.processors.min_tokens import MAX_STOP_TOKENS
from sampler.processors.token_mask import has_bits_ref, pack_token_ids
from sampler.sampler import Sampler
from sampler.verify.greedy import GreedyConfig, GreedyVerifier
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, UnsupportedError
from specdec.registry import build_config
from tests.models import byte_tokenizer, random_prompts, tiny_model, tiny_target
from tests.parameter_oracle import letter_tokenizer
from tests.processor_cases import K, make_case, setup_of

V = 97
CPU = torch.device("cpu")
USED: list[dict[str, Any]] = [
    {"allowed_token_ids": [3, 4]},
    {"bad_words": ["ab", "c"]},
    {"min_tokens": 60, "max_tokens": 60, "stop_token_ids": [5]},
    {"logit_bias": {7: 2.0}},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"min_p": 0.4},
]


def make_chain(num_rows: int = 4, tokenizer: Any = None) -> ProcessorChain:
    processors = make_processors(setup_of(V, num_rows, CPU))
    return ProcessorChain(processors, num_rows, V, CPU, tokenizer, frozenset({0}))


def apply_writes(chain: ProcessorChain) -> None:
    for table in chain.tables:
        table.apply_write()


@pytest.mark.parametrize("fields", USED, ids=lambda fields: next(iter(fields)))
def test_new_owner_of_a_row_finds_nothing_of_the_last_one(fields: dict[str, Any]) -> None:
    case = make_case(V, 0, CPU, num_reqs=1)
    chain = make_chain(case.num_rows, letter_tokenizer(17, 3))
    row, state = case.rows[0], case.ctx.state
    batch: Any = SimpleNamespace(
        plain=False, idx_mapping=torch.tensor([row, -1], dtype=torch.int32)
    )
    for params in (SamplingParams(**fields), SamplingParams()):
        chain.add_request(row, params)
        apply_writes(chain)
        chain.prepare_rows(state)
        early, late = chain.active(case.logits, batch)
        uses = params != SamplingParams()
        assert bool(early or late) == uses
        assert bool(chain.deferred.tensor[row]) == bool(early)
        changed = False
        # All of them, as a GPU would run them.
        for processor in chain.processors:
            logits, _ = case.copy_of_logits()
            processor.apply(logits, case.ctx)
            changed |= not torch.equal(logits[: K + 1], case.logits[: K + 1])
        assert changed == uses


def test_lines_of_other_rows_do_not_count_as_use() -> None:
    chain = make_chain()
    chain.add_request(1, SamplingParams(min_p=0.1))
    chain.add_request(2, SamplingParams(repetition_penalty=2.0))
    chain.add_request(3, SamplingParams())
    for rows, expected in (([3], (0, 0)), ([3, 1], (0, 1)), ([2, -1], (1, 0)), ([2, 1], (1, 1))):
        batch: Any = SimpleNamespace(plain=False, idx_mapping=torch.tensor(rows, dtype=torch.int32))
        early, late = chain.active(torch.zeros(1), batch)
        assert (len(early), len(late)) == expected


@pytest.mark.parametrize("scope", ["none", "step"])
def test_plain_requests_run_no_processor_on_a_cpu(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it ran")

    llm = LLM(tiny_target(tiny_model()), "ngram", max_model_len=64, graph_scope=scope)
    params = [SamplingParams(temperature=t, seed=1, top_p=0.9, max_tokens=6) for t in (0.0, 1.0)]
    for name in (
        "token_mask.apply_token_mask_ref",
        "bad_words.apply_bad_words_ref",
        "min_tokens.apply_min_tokens_ref",
        "logit_bias.apply_logit_bias_ref",
        "penalties.apply_penalties_ref",
        "penalties.count_committed_ref",
        "penalties.count_tokens_ref",
        "min_p.apply_min_p_ref",
    ):
        monkeypatch.setattr(f"sampler.processors.{name}", refuse)
    monkeypatch.setattr("sampler.sampler.scale_deferred", refuse)
    llm.generate(random_prompts((4, 9)), params)
    # Where all are greedy, the logits are not even copied.
    monkeypatch.setattr("sampler.sampler.scale_logits", refuse)
    llm.generate(random_prompts((4, 9)), params[0])
    with pytest.raises(AssertionError, match="it ran"):
        llm.generate(random_prompts((4, 9)), params[1])


def test_mask_holds_the_ids() -> None:
    for vocab_size in (1, 31, 32, 33, 97):
        ids = sorted({0, vocab_size - 1, vocab_size // 2, 31 % vocab_size})
        mask = torch.from_numpy(pack_token_ids(ids[::-1], vocab_size))
        assert has_bits_ref(mask, vocab_size).nonzero().flatten().tolist() == ids


class Pieces:
    """A tokenizer that knows some words, with and without a space before them."""

    vocabulary = (" hello", " b", " x y", " ", "hel", "lo", "a", "b", "x", "y")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            piece = next(p for p in self.vocabulary if text.startswith(p))
            ids.append(self.vocabulary.index(piece))
            text = text[len(piece) :]
        return ids


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("hello", [(4, 5), (0,)]),  # one piece behind a space, two without
        ("  hello", [(4, 5), (0,)]),
        ("a", [(6,)]),  # behind a space it is the same piece: that form ends with it
        ("b", [(7,), (1,)]),
        ("x y", [(8, 3, 9), (2,)]),
    ],
)
def test_words_are_encoded_as_they_are_and_behind_a_space(
    word: str, forms: list[tuple[int, ...]]
) -> None:
    assert encode_word(Pieces(), word) == forms


def test_words_of_a_byte_tokenizer_have_one_form() -> None:
    assert encode_word(byte_tokenizer(), "ab") == [(97, 98)]


def too_many_words() -> list[str]:
    return [chr(ord("a") + i % 17) + chr(ord("a") + i // 17) for i in range(MAX_WORDS + 1)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_token_ids": [3, 97]}, "allowed_token_ids holds token id 97"),
        ({"logit_bias": {97: 1.0}}, "logit_bias holds token id 97"),
        ({"logit_bias": {i: 1.0 for i in range(MAX_BIASED_TOKENS + 1)}}, "token id 97"),
        ({"bad_words": too_many_words()}, f"at most {MAX_WORDS}"),
        ({"bad_words": ["a" * (MAX_TOKENS + 1)]}, f"at most {MAX_TOKENS}"),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(V)) + [V - 1] * 60},
            None,  # 97 of them
        ),
    ],
)
def test_requests_that_rows_cannot_hold_are_refused(
    fields: dict[str, Any], words: str | None
) -> None:
    target = tiny_target(tiny_model(), letter_tokenizer(17, 3))
    llm = LLM(target, "none", max_model_len=32)
    if words is None:
        llm.generate([1], SamplingParams(**fields))
        return
    with pytest.raises(ConfigError, match=words):
        llm.generate([1], SamplingParams(**fields))
    assert not llm.engine.has_requests


def test_counts_beyond_the_rows_are_refused() -> None:
    chain = make_chain()
    chain._vocab_size = 5000  # a vocabulary that has so many ids
    for fields, most in (
        ({"logit_bias": {i: 1.0 for i in range(MAX_BIASED_TOKENS + 1)}}, MAX_BIASED_TOKENS),
        ({"min_tokens": 1, "stop_token_ids": list(range(1, 129))}, MAX_STOP_TOKENS),
    ):
        with pytest.raises(ConfigError, match=f"at most {most}"):
            chain.check_request(SamplingParams(**fields), [1])  # pyright: ignore[reportArgumentType]


def test_bad_words_need_a_tokenizer() -> None:
    llm = LLM(tiny_target(tiny_model()), "none", max_model_len=32)
    with pytest.raises(UnsupportedError, match="bad_words need a tokenizer"):
        llm.generate([1], SamplingParams(bad_words=["x"]))


def test_engine_without_penalties_refuses_them_and_keeps_no_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="sampler.processors.builtin"):
        llm = LLM(tiny_target(tiny_model()), "none", max_model_len=32, penalties=False)
    assert "0.0 MiB of token counts" in caplog.text
    with pytest.raises(ConfigError, match="penalties=True"):
        llm.generate([1], SamplingParams(repetition_penalty=1.1))
    llm.generate([1], SamplingParams(min_p=0.1))


@pytest.mark.parametrize("verifier", ["sampled_match", "rejection"])
@pytest.mark.parametrize("scope", ["none", "step"])
@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "ngram",
        {"name": "draft_model", "model": "target"},
        {"name": "draft_model", "model": "target", "sampling": "gumbel"},
    ],
    ids=["none", "ngram", "target", "target sampled"],
)
def test_line_without_a_token_left_still_draws_one_of_the_vocabulary(
    drafter: Any, scope: str, verifier: str
) -> None:
    # Behind one of them every allowed token completes a bad word: known only while they are drawn.
    dead = {"allowed_token_ids": [65, 66], "bad_words": ["AA", "AB", "BA", "BB"]}
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, **dead),
        SamplingParams(temperature=1.0, max_tokens=8, seed=1, **dead),
        SamplingParams(temperature=0.7, max_tokens=8, seed=2, top_p=0.8, top_k=5, **dead),
        SamplingParams(temperature=0.7, max_tokens=8, seed=3, min_p=0.5, **dead),
        SamplingParams(temperature=1.0, max_tokens=8, seed=4),
    ]
    tokenizer = byte_tokenizer()
    vocab_size = len(tokenizer)
    target = tiny_target(tiny_model(vocab_size=vocab_size), tokenizer)
    llm = LLM(target, drafter, verifier, 3, max_model_len=40, graph_scope=scope)
    outputs = llm.generate(random_prompts((4, 9, 3, 5, 6)), params)
    plain = llm.generate(random_prompts((4, 9, 3, 5, 6))[4:], params[4:])
    for output in outputs:
        assert all(0 <= token < vocab_size for token in output.token_ids)
        assert len(output.token_ids) == 8
    for output in outputs[:4]:
        assert [token in (65, 66) for token in output.token_ids] == [True, False] * 4
    assert outputs[4].token_ids == plain[0].token_ids  # its neighbours do no harm


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["greedy", "sampled_match", "rejection"])
def test_dead_lines_draw_inside_the_vocabulary_on_a_gpu(device: torch.device, name: str) -> None:
    entry, config = build_config("verifier", name)
    case = make_case(V, 2, device, num_reqs=2)
    chain = ProcessorChain([AllowedTokenIds(setup_of(V, case.num_rows, device))], 9, V, device)
    sampler = Sampler(entry.cls(config), case.num_rows, V, device, processors=chain)
    params = SamplingParams(
        temperature=0.0 if name == "greedy" else 0.8, seed=1, top_p=0.9, allowed_token_ids=[4]
    )
    for row in case.rows:
        sampler.add_request(row, params, 1)
    for table in sampler.tables:
        table.apply_write()
    mask = chain.processors[0]._mask.tensor  # pyright: ignore[reportAttributeAccessIssue]
    mask[case.rows[0]] = 0  # no token at all
    num_lines = len(case.logits)
    batch: Any = SimpleNamespace(
        plain=False,
        num_reqs=3,
        num_logits=num_lines,
        max_num_logits=K + 1,
        idx_mapping=torch.tensor([*case.rows, -1], dtype=torch.int32, device=device),
        cu_num_logits=torch.tensor([0, 4, 8, 9], dtype=torch.int32, device=device),
        positions=case.ctx.draw_positions - 1,
        logits_indices=torch.arange(num_lines, device=device),
        expanded_idx_mapping=case.ctx.expanded_idx_mapping,
        expanded_local_pos=case.ctx.expanded_local_pos,
    )
    state: Any = SimpleNamespace(
        num_speculative_tokens=K,
        draft_tokens=case.ctx.draft_tokens,
        draft_kind=torch.ones(case.num_rows, dtype=torch.int8, device=device),
        view=lambda: case.ctx.state,
    )
    output = sampler.sample(case.logits.nan_to_num(0.0), batch, state, None)
    counts, tokens = output.num_sampled.tolist(), output.sampled_tokens.tolist()
    for place in range(2):
        assert all(0 <= token < V for token in tokens[place][: counts[place]])
    assert tokens[1][counts[1] - 1] == 4


def test_sampler_without_processors_keeps_no_rows_for_them() -> None:
    sampler = Sampler(GreedyVerifier(GreedyConfig()), 2, V, CPU)
    assert sampler.processors.tables == []
