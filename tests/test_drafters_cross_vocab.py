"""Draft models with another tokenizer: which tokens are shared, and what is drafted and read."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from drafters.draft_model import DraftModelConfig
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from runner.vocabulary import map_vocabulary
from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from tests.models import byte_tokenizer, random_prompts, tiny_model, tiny_target

CPU = torch.device("cpu")
PIECES = [" lamp", "ing", "the"]
K = 4


def shuffled_tokenizer(pieces: Sequence[str], seed: int = 0) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer whose ids are in no order; <eos> and <turn> come last."""
    symbols = bytes_to_unicode()
    words = ["".join(symbols[byte] for byte in piece.encode()) for piece in pieces]
    tokens = [*symbols.values(), *words]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed)).tolist()
    tokenizer = Tokenizer(BPE(vocab=dict(zip(tokens, order, strict=True)), merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>", "<turn>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def save_renumbered(folder: Path, model: Any, target: Any, other: Any) -> str:
    """Save a model under another tokenizer's ids: the same function of the same tokens."""
    renumbered = copy.deepcopy(model)
    own, theirs = target.get_vocab(), other.get_vocab()
    source = torch.tensor([own[t] for t in sorted(theirs, key=theirs.__getitem__)])
    for module in (renumbered.get_input_embeddings(), renumbered.get_output_embeddings()):
        module.weight.data = module.weight.data[source].clone()
    renumbered.config.vocab_size = len(source)
    renumbered.save_pretrained(folder)
    other.save_pretrained(folder)
    return str(folder)


def save_random(folder: Path, tokenizer: Any, padding: int = 0) -> str:
    """Save a random model of a tokenizer, with some ids that stand for nothing."""
    tiny_model("llama", seed=1, vocab_size=len(tokenizer) + padding).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def drafting(path: str, **options: Any) -> dict[str, Any]:
    """Return the drafter that maps."""
    return {"name": "draft_model", "model": path, "cross_vocab": True, **options}


def test_tokens_of_equal_strings_are_mapped_and_the_others_read_as_stand_ins() -> None:
    target, other = byte_tokenizer(PIECES), shuffled_tokenizer(["ing", "zebra"])
    own, theirs = target.get_vocab(), other.get_vocab()
    size, other_size = len(target) + 3, len(other)
    mapped = map_vocabulary(target, other, (size, other_size), CPU)
    shared = own.keys() & theirs.keys()
    assert mapped.num_shared == len(shared) == 256 + 1 + 2
    assert {"ing", "<eos>", "<turn>"} <= shared
    for token, i in own.items():
        assert bool(mapped.missing[i]) == (token not in shared)
        if token in shared:
            assert mapped.model_ids[i] == mapped.columns[i] == theirs[token]
    # A token that the other vocabulary lacks reads as the first one that its text gives there.
    assert mapped.model_ids[own["\u0120lamp"]] == theirs["\u0120"]
    assert mapped.model_ids[own["the"]] == theirs["t"]
    # An id of no token at all, and there is no unknown token: the end.
    assert mapped.missing[len(target) :].all()
    assert (mapped.model_ids[len(target) :] == theirs["<eos>"]).all()
    logits = torch.randn(2, other_size)
    translated = mapped.target_logits(logits)
    assert translated.shape == (2, size)
    assert (translated == float("-inf"))[0].tolist() == mapped.missing.tolist()
    assert torch.equal(translated[:, own["ing"]], logits[:, theirs["ing"]])


def test_the_sign_of_a_space_may_be_written_in_two_ways() -> None:
    words = [f"word{i}" for i in range(9)]
    plain = {word: i for i, word in enumerate(words)}

    def tokenizer(sign: str) -> PreTrainedTokenizerFast:
        vocab = {**plain, **{sign + word: 9 + i for word, i in plain.items()}}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=vocab, merges=[])))

    mapped = map_vocabulary(tokenizer("\u0120"), tokenizer("\u2581"), (18, 18), CPU)
    assert mapped.model_ids.tolist() == list(range(18))
    assert mapped.num_shared == 18


def test_tokenizers_that_share_too_little_are_refused() -> None:
    def tokenizer(prefix: str, shared: int) -> PreTrainedTokenizerFast:
        words = [f"{prefix}{i}" for i in range(100 - shared)] + [f"=={i}" for i in range(shared)]
        vocab = {word: i for i, word in enumerate(words)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=vocab, merges=[])))

    for shared in (0, 4):
        with pytest.raises(ConfigError, match=f"share {shared} of 100 and 100 tokens"):
            map_vocabulary(tokenizer("a", shared), tokenizer("b", shared), (100, 100), CPU)
    assert map_vocabulary(tokenizer("a", 5), tokenizer("b", 5), (100, 100), CPU).num_shared == 5


@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
def test_the_target_under_other_ids_accepts_every_draft(tmp_path: Path, sampling: str) -> None:
    tokenizer, other = byte_tokenizer(PIECES), shuffled_tokenizer(PIECES)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    path = save_renumbered(tmp_path, model, tokenizer, other)
    # "coupled" hands the drafter the target's own noise: equal laws draw equal tokens.
    verifier = "greedy" if sampling == "argmax" else "coupled"
    params = SamplingParams(temperature=0 if sampling == "argmax" else 0.8, max_tokens=18)
    options = {"max_model_len": 64, "seed": 3}
    drafter = drafting(path, sampling=sampling)
    llm = LLM(tiny_target(model, tokenizer), drafter, verifier, K, **options)
    prompts = random_prompts((5, 9, 14), vocab_size=256)
    for output in llm.generate(prompts, params):
        assert output.stats.num_accepted == output.stats.num_drafted > 0


def test_drafts_come_with_their_law_over_the_targets_ids(tmp_path: Path) -> None:
    tokenizer, other = byte_tokenizer(PIECES), shuffled_tokenizer(["ing"])
    path = save_random(tmp_path, other, padding=5)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    drafter = drafting(path, sampling="gumbel")
    llm = LLM(tiny_target(model, tokenizer), drafter, "rejection", K, max_model_len=64)
    runner: Any = llm.engine.runner
    plain: Any = tiny_model("llama", seed=1, vocab_size=len(other) + 5)
    mapped = runner.drafter.vocabulary_map
    errors, choose = [], runner.drafter.sampler.choose

    @torch.inference_mode()
    def spy(ctx: Any, logits: Tensor, index: int) -> Tensor:
        drafts = choose(ctx, logits, index)
        row = int(ctx.idx_mapping[0])
        if index == 0 and ctx.state.draft_limit[row] > 0:
            text = ctx.state.all_token_ids[row, : int(ctx.state.total_len[row])].long()
            own = plain(mapped.model_ids[text][None]).logits[0, -1]
            expected = torch.where(mapped.missing, float("-inf"), own[mapped.columns])
            law, q = expected.softmax(0), runner.draft_logits[row, 0].softmax(0)
            errors.append(float((law - q).abs().max()))
            assert float(q[mapped.missing].sum()) == 0
            assert not mapped.missing[drafts[0]]
        return drafts

    runner.drafter.sampler.choose = spy
    (output,) = llm.generate([[*range(7), 256, 258]], SamplingParams(temperature=1, max_tokens=20))
    assert len(output.token_ids) == 20 or output.finish_reason == "stop"
    assert len(errors) > 3
    assert max(errors) < 1e-4


def test_text_is_the_targets_own_whatever_is_shared(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(PIECES)
    path = save_random(tmp_path, shuffled_tokenizer(["zebra"]))
    target = tiny_target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    prompts = [[*prompt, 256, 257] for prompt in random_prompts((5, 9, 14, 3), vocab_size=259)]
    texts = {}
    for name, drafter in {"none": "none", "mapped": drafting(path)}.items():
        for scope in ("none", "step"):
            llm = LLM(target, drafter, "sampled_match", K, graph_scope=scope, max_model_len=64)
            params = [
                SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16) for i in range(4)
            ]
            outputs = llm.generate(prompts, params)
            texts[name, scope] = [output.token_ids for output in outputs]
            assert (sum(output.stats.num_drafted for output in outputs) > 0) == (name == "mapped")
    assert len({str(text) for text in texts.values()}) == 1


def test_mapping_is_refused_where_it_cannot_be_or_does_nothing(tmp_path: Path) -> None:
    path = save_random(tmp_path, shuffled_tokenizer([]))
    alone = LoadedTarget("tiny", HFModel(tiny_model("llama", vocab_size=258)), None)
    with pytest.raises(ConfigError, match="this target has none"):
        LLM(alone, drafting(path), "greedy", max_model_len=64)
    with pytest.raises(ConfigError, match="no effect with model='target'"):
        DraftModelConfig(model="target", cross_vocab=True)
    off = {**drafting(path), "cross_vocab": False}
    target = replace(alone, tokenizer=byte_tokenizer())
    with pytest.raises(ConfigError, match=r"another tokenizer.*cross_vocab=True"):
        LLM(target, off, "greedy", max_model_len=64)
