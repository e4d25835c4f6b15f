"""Bench `generate`: our arms beside transformers' own generate, interleaved in one process.

Every prompt is run by every arm in turn, the order rotated by prompt, so that a drift of the
machine hits all arms alike. tokens/s counts new tokens over the whole call, prefill included.
Nothing here needs Hydra.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from experiments.prompts import Question
from runner.loader import LoadedTarget, load_target, locate, resolve_device, resolve_dtype
from specdec.api import LLM
from specdec.errors import CapacityError, ConfigError
from specdec.log import progress
from specdec.types import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

_HF_LOOKUP = "transformers prompt lookup"
_HF_LOOKUP_TOKENS = 10  # transformers' own default of prompt lookup
_ARMS = ("ngram 4", "ngram 10", "draft_model 3", "eagle3 2", "eagle3 3", "eagle3 5")


@dataclass
class GenerateBenchConfig:
    """What `bench=generate` runs.

    Args:
        target: name, hub id or folder.
        dtype: "auto" or a dtype's name.
        device: "auto", "cpu" or "cuda".
        max_tokens: new tokens a prompt at most.
        per_category: prompts of each category (or file).
        arms: of ours, beside the autoregressive one: a drafter's name and K, as "ngram 4", or a
            mapping with the keys `drafter` (name, or mapping with a key "name"),
            `num_speculative_tokens` and, if it is to be called otherwise, `label`.
        max_model_len: tokens, prompt included; longer prompts are left out.
    """

    name: str = "generate"
    target: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    device: str = "auto"
    max_tokens: int = 48
    per_category: int = 4
    arms: list[Any] = field(default_factory=lambda: list(_ARMS))
    max_model_len: int = 2048

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("max_tokens", "per_category", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"bench.{name}={getattr(self, name)} is not allowed; give >= 1")
        names = [arm.label for arm in self.parsed_arms()]
        if len({*names}) < len(names):
            raise ConfigError(f"bench.arms has an arm twice: {', '.join(names)}; give labels")

    def parsed_arms(self) -> list["ArmOfOurs"]:
        """Return what the arms are.

        Raises:
            ConfigError: one cannot be read.
        """
        return [_parse_arm(arm) for arm in self.arms]


@dataclass(frozen=True)
class ArmOfOurs:
    """A drafter at a number of drafts."""

    label: str
    drafter: Any
    k: int


def _parse_arm(value: Any) -> ArmOfOurs:
    """Read an arm; see `GenerateBenchConfig`."""
    if isinstance(value, str):
        name, _, k = value.partition(" ")
        value = {"drafter": name, "num_speculative_tokens": int(k) if k.isdecimal() else k}
    k = value.get("num_speculative_tokens") if isinstance(value, Mapping) else None
    drafter = value.get("drafter") if isinstance(value, Mapping) else None
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or not drafter:
        raise ConfigError(
            f"bench.arms: {value!r} is no arm; give a drafter and K >= 1, as 'ngram 4', or a "
            f"mapping with drafter and num_speculative_tokens"
        )
    name = drafter.get("name") if isinstance(drafter, Mapping) else drafter
    return ArmOfOurs(str(value.get("label") or f"{name} K={k}"), drafter, k)


# An arm takes prompt token ids and returns (new token ids, seconds, statistics).
Arm = Callable[[list[int]], tuple[list[int], float, dict[str, float]]]


def run_generate_bench(config: GenerateBenchConfig, questions: list[Question]) -> "pd.DataFrame":
    """Return `generate_bench_rows` as a frame."""
    import pandas as pd

    return pd.DataFrame(generate_bench_rows(config, questions))


def generate_bench_rows(
    config: GenerateBenchConfig, questions: list[Question]
) -> list[dict[str, Any]]:
    """Run every arm on the first turn of every question.

    Returns:
        One row per arm and question: arm, category, question_id, num_tokens, wall_s, num_steps,
        num_verify_tokens, same_text (whether it is transformers' greedy text).

    Raises:
        CapacityError: no question is short enough.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    target = load_target(config.target, dtype, device)
    tokenizer = target.tokenizer
    assert tokenizer is not None, "the bench needs chat prompts"
    prompts = []
    for question in questions:
        message = [{"role": "user", "content": question.turns[0]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(prompt) + config.max_tokens > config.max_model_len:
            logger.warning("question %s is too long: left out", question.question_id)
        else:
            prompts.append((question, prompt))
    if not prompts:
        raise CapacityError(
            f"none of the {len(questions)} questions fits bench.max_model_len="
            f"{config.max_model_len} with bench.max_tokens={config.max_tokens} new ones; raise the "
            "one, lower the other or ask shorter questions"
        )
    arms = _arms(config, target, dtype, device)
    rows: list[dict[str, Any]] = []
    names = list(arms)
    for name in names:
        arms[name](prompts[0][1][-32:])  # first calls build caches that later ones reuse
    with progress("bench", total=len(prompts)) as bar:
        for i, (question, prompt) in enumerate(prompts):
            texts = {}
            for j in range(len(names)):
                name = names[(i + j) % len(names)]
                token_ids, wall_s, stats = arms[name](prompt)
                texts[name] = token_ids
                rows.append(
                    {
                        "arm": name,
                        "category": question.category,
                        "question_id": question.question_id,
                        "num_tokens": len(token_ids),
                        "wall_s": wall_s,
                        **stats,
                    }
                )
            for row in rows[-len(names) :]:
                row["same_text"] = texts[row["arm"]] == texts["transformers"]
            bar.advance()
    return rows


def _arms(
    config: GenerateBenchConfig, target: LoadedTarget, dtype: torch.dtype, device: torch.device
) -> dict[str, Arm]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        locate(config.target), dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    model = model.to(device).eval()
    arms: dict[str, Arm] = {
        "transformers": _hf_arm(model, config, {}),
        _HF_LOOKUP: _hf_arm(model, config, {"prompt_lookup_num_tokens": _HF_LOOKUP_TOKENS}),
        "none": _our_arm(target, config, "none", 0, 0.0),
        "none T=1": _our_arm(target, config, "none", 0, 1.0),
    }
    for arm in config.parsed_arms():
        arms[arm.label] = _our_arm(target, config, arm.drafter, arm.k, 0.0)
    return arms


def _hf_arm(model: Any, config: GenerateBenchConfig, options: dict[str, Any]) -> Arm:
    def run(prompt: list[int]) -> tuple[list[int], float, dict[str, float]]:
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=config.max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        token_ids = output[0, len(prompt) :].tolist()
        return token_ids, time.perf_counter() - started, {}

    return run


def _our_arm(
    target: LoadedTarget, config: GenerateBenchConfig, drafter: Any, k: int, temperature: float
) -> Arm:
    llm = LLM(
        target,
        drafter,
        "rejection",
        k,
        max_num_reqs=1,
        max_model_len=config.max_model_len,
        device=config.device,
    )
    params = SamplingParams(temperature=temperature, max_tokens=config.max_tokens, seed=0)

    def run(prompt: list[int]) -> tuple[list[int], float, dict[str, float]]:
        started = time.perf_counter()
        out = llm.generate([prompt], params)[0]
        wall_s = time.perf_counter() - started
        stats = {
            "num_steps": float(out.stats.num_verify_steps),
            "num_verify_tokens": float(out.stats.num_verify_tokens),
        }
        return out.token_ids, wall_s, stats

    return run


def summarise_generate_bench(rows: "pd.DataFrame", num_resamples: int = 2000) -> "pd.DataFrame":
    """Summarise the bench: tokens/s, accepted length, and factors with 95 % bootstrap intervals.

    Args:
        rows: from `run_generate_bench`.
        num_resamples: bootstrap resamples over prompts.

    Returns:
        One row per arm: tokens_per_s, accepted_length, and the factors over transformers' greedy
        generate, plain and with prompt lookup, over our autoregressive arm and over the fastest arm
        of prompt lookup, each with the ends of its interval.
    """
    import pandas as pd

    # Every arm ran the questions in the same order, so that one draw picks the same ones of each.
    arms: dict[str, Any] = {arm: rows[rows["arm"] == arm] for arm in rows["arm"].unique()}
    (num_prompts,) = {len(own) for own in arms.values()}
    picks = np.random.default_rng(0).integers(num_prompts, size=(num_resamples, num_prompts))
    resampled, rates = {}, {}
    for arm, own in arms.items():
        tokens, seconds = own["num_tokens"].to_numpy(), own["wall_s"].to_numpy()
        resampled[arm] = tokens[picks].sum(1) / seconds[picks].sum(1)
        rates[arm] = tokens.sum() / seconds.sum()
    bases = {"transformers": "transformers", "none": "none"}
    if _HF_LOOKUP in arms:
        bases["transformers_lookup"] = _HF_LOOKUP
    lookups = [arm for arm in arms if arm.startswith("ngram")]
    if lookups:
        bases["ngram"] = max(lookups, key=rates.__getitem__)
    table = []
    for arm, own in arms.items():
        line: dict[str, Any] = {
            "arm": arm,
            "tokens_per_s": rates[arm],
            "accepted_length": own["num_verify_tokens"].sum() / (own["num_steps"].sum() or np.nan),
            "same_text": int(own["same_text"].sum()),
            "num_prompts": num_prompts,
        }
        for base, other in bases.items():
            low, high = np.percentile(resampled[arm] / resampled[other], [2.5, 97.5])
            line[f"over_{base}"] = rates[arm] / rates[other]
            line[f"over_{base}_low"], line[f"over_{base}_high"] = low, high
        table.append(line)
    return pd.DataFrame(table)
