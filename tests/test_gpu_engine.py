"""The engine on a CUDA device: the same text as on the CPU, by the same code.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy

import pytest
import torch

from runner.loader import LoadedTarget, load_target, locate
from runner.models.hf import HFModel
from runner.weights import EMBEDDED_NAME
from specdec import LLM, SamplingParams
from specdec.types import RequestOutput
from tests.models import FAMILIES, random_prompts, reference_greedy, tiny_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 40
PROMPTS = random_prompts((5, 17, 40, 3, 9, 12, 33, 21))
SIZES = {"device": "cuda", "max_model_len": 200, "graph_num_reqs": [1, 8]}
MODES = {
    "batch 8": {},
    "one at a time": {"max_num_reqs": 1},
    "one step in flight": {"max_steps_in_flight": 1},
    "chunks and preemption": {"num_kv_blocks": 20, "block_size": 8, "max_num_batched_tokens": 16},
}


def cuda_target(model: torch.nn.Module) -> LoadedTarget:
    """Put a copy of a model on the GPU behind the runner."""
    return LoadedTarget("tiny", HFModel(copy.deepcopy(model).cuda()), None)


def drafters(texts: list[list[int]]) -> list[object]:
    """Return one configuration of each drafter; the oracle replays the given texts."""
    return [
        "none",
        "ngram",
        {"name": "draft_model", "model": "target"},
        {"name": "oracle", "texts": texts},
    ]


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.token_ids for out in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_on_gpu_equals_transformers_on_cpu(family: str) -> None:
    model = tiny_model(family)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    target = cuda_target(model)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    whole = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    for drafter in drafters(whole):
        for mode, options in MODES.items():
            llm = LLM(target, drafter, "greedy", 4, **SIZES, **options)
            outputs = llm.generate(PROMPTS, params)
            assert texts_of(outputs) == expected, (drafter, mode)
            if mode == "chunks and preemption":
                assert sum(out.stats.num_preemptions for out in outputs) > 0


def test_sampled_match_text_on_gpu_does_not_depend_on_drafter_or_batch() -> None:
    model = tiny_model("llama")
    target = cuda_target(model)
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=k, max_tokens=NUM_TOKENS, seed=i)
        for i, k in enumerate((0, 5, 0, 20, 0, 1, 0, 50))
    ]
    plain = LLM(target, "none", "sampled_match", **SIZES, graph_scope="none")
    expected = texts_of(plain.generate(PROMPTS, params))
    for drafter in drafters([])[:3]:
        for mode in MODES.values():
            llm = LLM(target, drafter, "sampled_match", 4, **SIZES, **mode)
            assert texts_of(llm.generate(PROMPTS, params)) == expected, (drafter, mode)


def test_noise_gives_the_same_sampled_text_on_gpu_and_cpu() -> None:
    model = tiny_model("llama")
    params = [SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=i) for i in range(8)]
    on_gpu = LLM(cuda_target(model), "none", "sampled_match", **SIZES)
    cpu_target = LoadedTarget("tiny", HFModel(copy.deepcopy(model)), None)
    on_cpu = LLM(cpu_target, "none", "sampled_match", device="cpu", max_model_len=200)
    assert texts_of(on_gpu.generate(PROMPTS, params)) == texts_of(on_cpu.generate(PROMPTS, params))


def test_rejection_on_gpu_keeps_every_draft_of_the_target_itself() -> None:
    target = cuda_target(tiny_model("llama"))
    drafter = {"name": "draft_model", "model": "target", "sampling": "gumbel"}
    llm = LLM(target, drafter, "rejection", 4, **SIZES)
    params = [SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=i) for i in range(8)]
    outputs = llm.generate(PROMPTS, params)
    drafted = sum(out.stats.num_drafted for out in outputs)
    accepted = sum(out.stats.num_accepted for out in outputs)
    # p and q differ by rounding alone, so next to nothing is rejected.
    assert accepted >= 0.99 * drafted > 0


def test_real_target_on_gpu_writes_the_text_of_transformers_in_float32() -> None:
    from transformers import AutoModelForCausalLM

    from experiments.prompts import builtin_questions, select_questions

    device = torch.device("cuda")
    target = load_target(EMBEDDED_NAME, torch.float32, device)
    assert target.tokenizer is not None
    reference = AutoModelForCausalLM.from_pretrained(locate(EMBEDDED_NAME), dtype=torch.float32)
    reference = reference.to(device).eval()
    prompts = []
    for question in select_questions(builtin_questions(), per_category=4, limit=None):
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": question.turns[0]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompts.append(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
        )
        expected.append(output[0, len(prompt) :].tolist())
    whole = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=64)
    for drafter in drafters(whole):
        for max_num_reqs in (1, 8):
            llm = LLM(target, drafter, "rejection", 4, device="cuda", max_num_reqs=max_num_reqs)
            assert texts_of(llm.generate(prompts, params)) == expected, (drafter, max_num_reqs)
