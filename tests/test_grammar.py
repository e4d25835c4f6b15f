"""Structured output: every text follows its grammar, whatever drafts and verifies."""

import collections
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

import specdec.grammar
from specdec import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from specdec.errors import ConfigError, UnsupportedError
from specdec.grammar import GrammarBackend
from tests.models import bigram_model, byte_tokenizer, tiny_model, tiny_target
from tests.statistics import chi_square

TOKENIZER = byte_tokenizer(["ye", "es", '":', "tru", "no"])
V = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
K = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"enum": ["lamp", "la"]},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": [1, 23]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["key", "on", "list"],
    "additionalProperties": False,
}
REGEX = r"(ab|ba){2,4}-[x-z]{1,3}"
CHOICE = ["yes", "no", "noes", "maybe\n"]
LARK = 'start: "(" start ")" | "x"'
GBNF = 'root ::= "(" root ")" | "x"'


def json_params(**fields: Any) -> StructuredOutputsParams:
    """Return a schema without spaces: a random model would write little else."""
    return StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True, **fields)


def follows_schema(text: str) -> bool:
    """Return whether a text is what the schema asks for."""
    value = json.loads(text)
    return (
        list(value) == ["key", "on", "list"]
        and value["key"] in ("lamp", "la")
        and value["on"] in (True, False)
        and 1 <= len(value["list"]) <= 3
        and set(value["list"]) <= {1, 23}
    )


def is_nested(text: str) -> bool:
    """Return whether a text is an x in brackets."""
    depth = text.count("(")
    return text == "(" * depth + "x" + ")" * depth


# What is asked for, and how its text is checked without the package that walks grammars.
STRUCTURES: list[tuple[StructuredOutputsParams | None, Callable[[str], Any]]] = [
    (json_params(), follows_schema),
    (StructuredOutputsParams(regex=REGEX), lambda text: re.fullmatch(REGEX, text)),
    (None, lambda text: True),
    (StructuredOutputsParams(choice=CHOICE), CHOICE.__contains__),
    (StructuredOutputsParams(grammar=LARK), is_nested),
    (StructuredOutputsParams(grammar=GBNF), is_nested),
    (StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True), follows_schema),
    (None, lambda text: True),
]
# Prompt lookup finds in them much of what the texts have to be.
PROMPTS = [
    '{"key":"lamp","on":true,"list":[1,23]}{"key":"la","on":false',
    "abbaab-xyx abba-zz ab",
    "lamp lamp lamp",
    "yes no noes maybe\n",
    "((x)) (x) ((",
    "(((x)))",
    '{"key":"lamp","on":true,"list":[1]}',
    "noes",
]
PARAMS = [
    SamplingParams(temperature=0.0 if i in (4, 7) else 1.0, top_p=0.9 if i == 1 else 1.0, seed=i)
    for i in range(len(PROMPTS))
]
for _params, (_structure, _) in zip(PARAMS, STRUCTURES, strict=True):
    _params.structured_outputs = _structure
    _params.max_tokens = 12 if _structure is None else 80
PREEMPTING = {"num_kv_blocks": 24, "block_size": 8}
DRAFTERS: dict[str, Any] = {
    "none": "none",
    "ngram": {"name": "ngram", "min_n": 1, "max_n": 2},
    "target": {"name": "draft_model", "model": "target"},
    "sampled": {"name": "draft_model", "model": "target", "sampling": "gumbel"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {},
    "two rows": {"max_num_reqs": 2},
    "chunks in flight": {"max_steps_in_flight": 3, "max_num_batched_tokens": 29},
    "fixed shape": {"graph_scope": "step", "max_steps_in_flight": 2},
    "preempted": {"max_steps_in_flight": 2, **PREEMPTING},
}


@functools.cache
def target() -> Any:
    """Return a random target whose EOS ends texts."""
    return tiny_target(tiny_model("llama", vocab_size=V, eos_token_id=EOS), TOKENIZER)


def make_llm(drafter: str = "ngram", verifier: str = "sampled_match", **options: Any) -> LLM:
    """Return an LLM over the random target."""
    return LLM(target(), DRAFTERS[drafter], verifier, K, **{"max_model_len": 160, **options})


def write(drafter: str, verifier: str = "sampled_match", **options: Any) -> list[RequestOutput]:
    """Write all texts in one engine."""
    return make_llm(drafter, verifier, **options).generate(PROMPTS, PARAMS)


@functools.cache
def autoregressive_texts() -> list[list[int]]:
    """Return what each request writes alone, without drafts."""
    return [output.token_ids for output in write("none", max_num_reqs=1)]


def check_texts(outputs: list[RequestOutput]) -> None:
    """Check every text against what it has to follow."""
    for output, (structure, is_right) in zip(outputs, STRUCTURES, strict=True):
        assert is_right(output.text), output.text
        if structure is not None:
            assert output.finish_reason == "stop"
            assert output.token_ids[-1] == EOS


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        *(pytest.param("ngram", options, id=f"ngram, {name}") for name, options in OPTIONS.items()),
        ("none", OPTIONS["chunks in flight"]),
        ("target", OPTIONS["fixed shape"]),
        ("sampled", OPTIONS["batch"]),
        ("sampled", OPTIONS["preempted"]),
    ],
)
def test_text_is_the_autoregressive_one_and_follows_its_grammar(drafter: str, options: Any) -> None:
    outputs = write(drafter, **options)
    check_texts(outputs)
    assert [output.token_ids for output in outputs] == autoregressive_texts()
    if "num_kv_blocks" in options:
        assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("ngram", {}),
        ("ngram", OPTIONS["fixed shape"]),
        ("target", {}),
        ("sampled", OPTIONS["fixed shape"]),
    ],
)
def test_text_follows_its_grammar_under_rejection(drafter: str, options: Any) -> None:
    outputs = write(drafter, "rejection", **options)
    check_texts(outputs)
    for output, params, text in zip(outputs, PARAMS, autoregressive_texts(), strict=True):
        if params.temperature == 0:
            assert output.token_ids == text


def test_drafts_are_kept_inside_a_grammar_and_rejected_outside() -> None:
    # Without this the equality above might hold because nothing was ever accepted.
    stats = [
        output.stats
        for output, params in zip(write("ngram"), PARAMS, strict=True)
        if params.structured_outputs is not None
    ]
    assert 0 < sum(s.num_accepted for s in stats) < sum(s.num_drafted for s in stats)


def test_requests_without_a_grammar_write_what_they_write_alone() -> None:
    free = [i for i, params in enumerate(PARAMS) if params.structured_outputs is None]
    llm = make_llm()
    alone = llm.generate([PROMPTS[i] for i in free], [PARAMS[i] for i in free])
    assert [out.token_ids for out in alone] == [autoregressive_texts()[i] for i in free]
    assert "waits for a grammar" not in llm.engine.runner.graphs.launches


def test_row_of_a_grammar_passes_to_a_request_without_one() -> None:
    llm = make_llm(max_num_reqs=1, max_steps_in_flight=2)
    engine = llm.engine
    free = SamplingParams(seed=5, max_tokens=10)
    expected = make_llm(max_num_reqs=1).generate("a lamp", free)[0].token_ids
    engine.add_request("json", PROMPTS[0], PARAMS[0])
    for _ in range(3):
        engine.step()
    engine.discard("json")
    assert llm.generate("a lamp", free)[0].token_ids == expected


def test_outcomes_are_waited_for_only_while_a_grammar_runs() -> None:
    llm = make_llm(max_steps_in_flight=2)
    waits = llm.engine.runner.graphs.launches
    llm.generate(PROMPTS[2], SamplingParams(max_tokens=9))
    assert waits["waits for a grammar"] == 0
    (output,) = llm.generate([PROMPTS[0]], [PARAMS[0]])
    # One for each step but the first, whose outcome nothing comes before.
    assert 0 < waits["waits for a grammar"] <= len(output.token_ids)


def test_samples_of_a_request_walk_on_their_own() -> None:
    params = SamplingParams(n=6, seed=3, max_tokens=80, structured_outputs=json_params())
    texts = []
    for drafter in ("none", "ngram"):
        (output,) = make_llm(drafter, max_num_reqs=4).generate([PROMPTS[0]], params)
        assert all(follows_schema(sample.text) for sample in output.outputs)
        texts.append([sample.token_ids for sample in output.outputs])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) > 1


def test_failed_step_is_started_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm(max_steps_in_flight=2).engine
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    increments = [i for _ in range(4) for i in engine.step()]
    monkeypatch.setattr(engine.runner, "execute_model", _fail)
    with pytest.raises(OSError, match="lost"):
        engine.step()
    monkeypatch.undo()
    while engine.has_requests:
        increments += engine.step()
    outputs = {i.request_id: i.output for i in increments if i.output is not None}
    texts = [outputs[str(i)].token_ids for i in range(len(PROMPTS))]
    assert texts == autoregressive_texts()


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("lost")


def test_text_that_is_cut_begins_one_that_follows_the_grammar() -> None:
    params = SamplingParams(seed=0, max_tokens=9, structured_outputs=json_params())
    (output,) = make_llm().generate([PROMPTS[0]], params)
    assert output.finish_reason == "length"
    assert output.token_ids == autoregressive_texts()[0][:9]


def test_stop_string_ends_a_text_inside_its_grammar() -> None:
    params = SamplingParams(seed=0, max_tokens=80, stop='"on"', structured_outputs=json_params())
    (output,) = make_llm().generate([PROMPTS[0]], params)
    assert output.finish_reason == "stop"
    assert output.text in ('{"key":"lamp",', '{"key":"la",')


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_text_ends_where_another_parameter_forbids_what_the_grammar_allows(drafter: str) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no", "noes"])
    params = SamplingParams(
        max_tokens=20, allowed_token_ids=[*b"yen"], structured_outputs=choice, temperature=0
    )
    (output,) = make_llm(drafter).generate(["yes yes no no"], params)
    assert output.finish_reason == "abort"
    assert output.outputs[0].stop_reason == "grammar: a token was drawn that it forbids"
    assert output.text in ("ye", "n")
    stats = output.stats
    assert 0 <= stats.num_accepted <= stats.num_drafted
    assert all(count >= 0 for count in stats.accepted_per_position)


# --- the law --------------------------------------------------------------------------------------


CHOICES = ["ab", "aba", "bb", "ba", "cc"]
LAW_PROMPT = "abab bb aba cc "
NUM_TEXTS = 800


@functools.cache
def law_logits() -> torch.Tensor:
    """Return logits after each token, of bytes and the special tokens; EOS comes first of these."""
    return 0.7 * torch.randn(258, 258, generator=torch.Generator().manual_seed(0))


def text_law(masked: bool) -> np.ndarray:
    """Return how probable each choice is; not masked, the target's own law, made to sum to 1."""
    logits, law = law_logits().double().numpy(), []
    for choice in CHOICES:
        before, probability = LAW_PROMPT.encode()[-1], 1.0
        for i in range(len(choice) + 1):
            prefix = choice[:i]
            begun = [c for c in CHOICES if c.startswith(prefix)]
            after = {256 if c == prefix else c.encode()[i] for c in begun}
            token = 256 if choice == prefix else choice.encode()[i]
            weights = np.exp(logits[before])
            probability *= weights[token] / (weights[list(after)] if masked else weights).sum()
            before = token
        law.append(probability)
    assert masked == math.isclose(sum(law), 1.0)
    return np.array(law) / sum(law)


@functools.cache
def count_texts(drafter: str) -> np.ndarray:
    """Return how often each choice was written under rejection."""
    tokenizer = byte_tokenizer()  # without pieces each text has one way to be written
    model = bigram_model(law_logits())
    model.config.eos_token_id = tokenizer.eos_token_id
    spec = DRAFTERS[drafter]
    llm = LLM(tiny_target(model, tokenizer), spec, "rejection", 2, max_model_len=32, seed=7)
    structure = StructuredOutputsParams(choice=CHOICES)
    params = SamplingParams(n=NUM_TEXTS, max_tokens=8, structured_outputs=structure)
    (output,) = llm.generate(LAW_PROMPT, params)
    seen = collections.Counter(sample.text for sample in output.outputs)
    assert set(seen) <= set(CHOICES)
    if drafter != "none":
        assert 0 < output.stats.num_accepted < output.stats.num_drafted
    return np.array([seen[choice] for choice in CHOICES])


@pytest.mark.parametrize("drafter", ["none", "ngram", "sampled"])
def test_texts_are_drawn_from_the_masked_target(drafter: str) -> None:
    assert chi_square(count_texts(drafter), text_law(masked=True)).passes


def test_law_of_texts_that_were_only_filtered_is_told_apart() -> None:
    assert not chi_square(count_texts("ngram"), text_law(masked=False)).passes


# --- the walk -------------------------------------------------------------------------------------


def pieces_of(text: bytes) -> list[list[int]]:
    """Return every way to write a text in tokens."""
    if not text:
        return [[]]
    ways = []
    for token in range(V):
        piece = TOKENIZER.convert_ids_to_tokens(token)
        spelled = bytes(_BYTE_OF[symbol] for symbol in piece) if token < EOS else b""
        if spelled and text.startswith(spelled):
            ways += [[token, *rest] for rest in pieces_of(text[len(spelled) :])]
    return ways


_BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
WAYS = [[*way, EOS] for choice in CHOICE for way in pieces_of(choice.encode())]


def backend(vocab_size: int = V) -> GrammarBackend:
    """Return a backend of the tokenizer."""
    return GrammarBackend(TOKENIZER, vocab_size, frozenset({EOS}))


def allowed_by(words: np.ndarray, vocab_size: int = V) -> set[int]:
    """Return the tokens of a mask."""
    bits = (words[np.arange(vocab_size) // 32] >> (np.arange(vocab_size) % 32)) & 1
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("vocab_size", [V, V + 37])
def test_masks_allow_what_begins_a_text_and_nothing_else(vocab_size: int) -> None:
    grammars = backend(vocab_size)
    grammar = grammars.compile(StructuredOutputsParams(choice=CHOICE))
    rng = np.random.default_rng(0)
    for way in WAYS:
        # Committed tokens, then drafts that go on as a text does, the last one maybe not.
        cut = int(rng.integers(0, len(way)))
        own = grammar.copy()
        own.restart(way[:cut])
        drafts = way[cut : cut + K]
        if rng.random() < 0.5:
            drafts[int(rng.integers(0, len(drafts)))] = int(rng.integers(0, V))
        other = grammar.copy()
        masks = grammars.masks([(own, drafts), (other, [])], K + 1)
        assert masks.shape == (2, K + 1, -(-vocab_size // 32))
        text = way[:cut]
        for words, draft in zip(masks[0], [*drafts, None], strict=False):
            expected = {w[len(text)] for w in WAYS if w[: len(text)] == text and len(w) > len(text)}
            assert allowed_by(words, vocab_size) == expected
            if draft not in expected or draft == EOS:
                break
            text = [*text, draft]
        assert allowed_by(masks[1, 0], vocab_size) == {w[0] for w in WAYS}
        # The walk left the grammar where it was.
        assert own.cut(list(way[cut:]), frozenset({EOS})) is None


def test_run_is_cut_where_it_leaves_the_grammar() -> None:
    grammar = backend().compile(StructuredOutputsParams(regex="a+b?"))
    ends = frozenset({EOS, ord("b")})
    for run, kept, reason in (
        ([*b"aa"], [*b"aa"], None),
        ([*b"aaca"], [*b"aa"], "grammar: a token was drawn that it forbids"),
        ([EOS], [], "grammar: a token was drawn that it forbids"),
        ([*b"a", EOS, *b"zz"], [*b"a", EOS, *b"zz"], None),
        ([*b"abzz"], [*b"abzz"], None),  # b is a stop token here
        ([*b"ca"], [], "grammar: a token was drawn that it forbids"),
        ([], [], None),
    ):
        assert grammar.copy().cut(run, ends) == reason
        assert run == kept


def test_grammar_is_compiled_once() -> None:
    grammars = backend()
    first = grammars.compile(json_params())
    matcher = next(iter(grammars._compiled.values()))
    second = grammars.compile(json_params())
    assert next(iter(grammars._compiled.values())) is matcher
    assert len({id(first.matcher), id(second.matcher), id(matcher)}) == 3
    for i in range(80):
        grammars.compile(StructuredOutputsParams(regex=f"a{i}"))
    assert len(grammars._compiled) == 64


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "takes exactly one of json, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"choice": []}, r"choice=\[\] is not allowed; give at least one string"),
        ({"choice": ["a", ""]}, "give non-empty strings"),
        ({"choice": "ab"}, "structured_outputs key choice='ab' is not allowed"),
    ],
)
def test_structure_that_is_none_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (StructuredOutputsParams(regex="(a"), "no valid grammar: .*unclosed group"),
        (StructuredOutputsParams(json={"type": "lamp"}), "no valid grammar: Invalid type: lamp"),
        (StructuredOutputsParams(json="{lamp"), "cannot be read: key must be a string"),
        (StructuredOutputsParams(grammar="start: lamp"), 'unknown name: "lamp"'),
        (StructuredOutputsParams(grammar="root ::= ("), "cannot be read|no valid grammar"),
    ],
)
def test_grammar_that_is_none_is_refused_before_it_is_queued(structure: Any, message: str) -> None:
    llm = make_llm()
    with pytest.raises(ConfigError, match=message) as caught:
        llm.generate("a", SamplingParams(structured_outputs=structure))
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_requests


def test_what_grammars_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=json_params())
    endless = byte_tokenizer()
    endless.eos_token = None
    no_end = tiny_target(tiny_model("llama", vocab_size=V), endless)
    no_tokenizer = tiny_target(tiny_model("llama", vocab_size=V, eos_token_id=EOS))
    for loaded, message in (
        (no_tokenizer, "needs a fast tokenizer, which this target has not"),
        (no_end, "needs a target with an EOS token"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            LLM(loaded, max_model_len=64).generate([[1, 2]], params)
    monkeypatch.setattr(specdec.grammar, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="needs the package llguidance, which is not inst"):
        make_llm().generate("a", params)


def test_end_that_is_ignored_does_not_go_with_a_grammar() -> None:
    with pytest.raises(ConfigError, match="ignore_eos=True is not allowed; give False"):
        SamplingParams(ignore_eos=True, structured_outputs=json_params())
