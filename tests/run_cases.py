"""A tiny target in a folder, questions, and the run app's inside on them."""

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.run import RunResult, execute
from experiments.schemas import load_config, register_schemas
from tests.models import tiny_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "short", "turns": ["a b a b a b"]},
    {"question_id": "two", "category": "short", "turns": ["one two one two", "and again"]},
    {"question_id": 3, "category": "other", "turns": ["tell me more of it"]},
]


def save_tiny_target(folder: Path) -> Path:
    """Save a random model of two thousand tokens' context with a tokenizer of bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["one two one two", "tell me more", "a b a b"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    model = tiny_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048
    )
    model.save_pretrained(folder)
    return folder


def run_tiny(target: Path, folder: Path, *overrides: str) -> RunResult:
    """Run the app's inside on QUESTIONS.

    Args:
        target: folder of the target.
        folder: the question file and the run folder `run` go into it.
        overrides: of the configuration.
    """
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    register_schemas()
    given = [
        f"target.name={target}",
        "engine.device=cpu",
        "prompts=file",
        f"prompts.path={questions}",
        "sampling.max_tokens=12",
        "equality.max_tokens=12",
        "warmup_tokens=2",
        *overrides,
    ]
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        cfg = compose("run", overrides=given)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return execute(load_config(cfg), folder / "run", "python -m experiments.run", resolved)
