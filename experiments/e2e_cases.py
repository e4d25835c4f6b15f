"""What `bench=e2e` runs: models, drafters and batches, with the aims and a peer's figures.

The peer is vLLM 0.26.0 on one H200: bf16, temperature 0, prompts of 128 random tokens, 256 tokens
of output, K = 4, exactly three tokens committed a step by a synthetic sampler. The figures are
milliseconds a step, of its newer runner where that takes the drafter, else of its older one (V1).
Those of the 135M shape are its best repeats, as its host swings; those of 8B are medians. They are
set beside a line only where the machine is of the same kind.
"""

from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig

NUM_DRAFTS = 4  # K
RATES = [1.0, 1.0, 0.0, 0.0]  # of the synthetic verifier: two drafts and one token in every step
TOKENS_PER_STEP = 3.0
DRAFTERS = ("eagle3", "none", "draft_model", "ngram")
PEER_DEVICE = "H200"
LONGEST = 1 << 16  # positions of every model


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama.

    Args:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim:
            as in its config.
        tied: the output head is the embedding.
        eight_bit: the weights of the layers are rounded to 8 bits (`weight_dtype=fp8`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    eight_bit: bool = False

    def config(self) -> LlamaConfig:
        """Return transformers' config; no token ends a text."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )


@dataclass(frozen=True)
class ScaleAxes:
    """Along what the cost of scale is measured.

    Args:
        batches, contexts, drafts: values of the axes.
        batch: requests along contexts and drafts.
        num_steps: of a measurement.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    batch: int
    num_steps: int


@dataclass(frozen=True)
class ShapeSet:
    """The models of a run.

    Args:
        models: by the name that cases give.
        draft_model: of the 8B model's draft model.
        head_rows: rows of the output layer of EAGLE-3 heads.
        prompt_len: tokens of each prompt.
        output_len: tokens that a request commits while it is measured.
        max_model_len: tokens that a request may hold.
        kv_bytes: of the target's KV cache.
        axes: of the cost of scale.
    """

    models: dict[str, ModelShape]
    draft_model: ModelShape
    head_rows: int
    prompt_len: int
    output_len: int
    max_model_len: int
    kv_bytes: dict[str, int]
    axes: ScaleAxes


_LLAMA_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, False)
_SMOLLM2 = ModelShape(49152, 576, 1536, 30, 9, 3, 64, True)
_TINY_8B = ModelShape(256, 64, 96, 5, 4, 2, 16, False)
_TINY_135M = ModelShape(128, 32, 48, 5, 4, 2, 16, True)
SHAPE_SETS = {
    "full": ShapeSet(
        models={
            "8b": _LLAMA_8B,
            "8b_fp8": replace(_LLAMA_8B, eight_bit=True),
            "135m": _SMOLLM2,
            "135m_real": _SMOLLM2,
        },
        draft_model=ModelShape(128256, 2048, 8192, 16, 32, 8, 64, True),
        head_rows=32000,
        prompt_len=128,
        output_len=256,
        max_model_len=2048,
        kv_bytes={"8b": 6 << 30, "8b_fp8": 6 << 30, "135m": 2 << 30, "135m_real": 2 << 30},
        axes=ScaleAxes(
            batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            contexts=(512, 1024, 2048, 4096, 8192, 16384, 32768),
            drafts=(1, 2, 4, 8, 16),
            batch=8,
            num_steps=40,
        ),
    ),
    "tiny": ShapeSet(
        models={
            "8b": _TINY_8B,
            "8b_fp8": replace(_TINY_8B, eight_bit=True),
            "135m": _TINY_135M,
            "135m_real": _TINY_135M,
        },
        draft_model=ModelShape(256, 32, 48, 2, 4, 2, 16, True),
        head_rows=64,
        prompt_len=16,
        output_len=40,
        max_model_len=256,
        kv_bytes={"8b": 4 << 20, "8b_fp8": 4 << 20, "135m": 4 << 20, "135m_real": 4 << 20},
        axes=ScaleAxes((1, 2), (32, 64), (1, 2, 4), batch=2, num_steps=4),
    ),
}

# Model and drafter, in the order of the tables.
KINDS = (
    *(("8b", drafter) for drafter in DRAFTERS),
    *(("135m", drafter) for drafter in ("eagle3", "none", "ngram")),
    *(("135m_real", drafter) for drafter in ("eagle3", "none")),
    *(("8b_fp8", drafter) for drafter in ("eagle3", "none")),
)
_ONLY_BATCHES = {"8b_fp8": (1, 32)}

_PEER: dict[tuple[str, str], tuple[str, tuple[float, ...]]] = {
    ("8b", "eagle3"): ("V2, median", (5.963, 6.373, 7.656, 11.499)),
    ("8b", "none"): ("V2, median", (4.816, 4.879, 5.349, 5.928)),
    ("8b", "draft_model"): ("V1, median", (13.631, 14.014, 14.974, 20.775)),
    ("8b", "ngram"): ("V1, median", (6.697, 7.347, 9.154, 13.172)),
    ("135m", "eagle3"): ("V2, best", (2.79, 3.08, 3.53, 4.11)),
    ("135m", "none"): ("V2, best", (1.32, 1.51, 1.86, 2.27)),
    ("135m", "ngram"): ("V1, best", (2.52, 2.87, 3.58, 4.70)),
}
_PEER_BATCHES = (1, 8, 32, 64)
_AIMS: dict[tuple[str, str], dict[int, float]] = {
    ("8b", "eagle3"): {1: 5.4, 8: 5.8, 32: 7.2, 64: 10.9},
    ("8b", "none"): {1: 4.5, 8: 4.6, 32: 5.0, 64: 5.6},
    ("8b", "draft_model"): {1: 8.5},
    ("8b", "ngram"): {1: 4.8, 32: 6.5},
    ("135m", "eagle3"): {1: 1.25, 32: 1.75},
    ("135m", "none"): {1: 0.75, 32: 1.0},
}
# The target's forward alone, head included, over the time of reading its weights: aim and peer.
FORWARD_AIM, FORWARD_PEER = 1.3, 1.47


@dataclass(frozen=True)
class Case:
    """One line of the bench."""

    model: str
    drafter: str
    batch: int

    @property
    def name(self) -> str:
        """Return what a line is called."""
        return f"{self.model} {self.drafter} batch {self.batch}"

    @property
    def aim_ms(self) -> float | None:
        """Return the aim, in ms a step, where there is one."""
        return _AIMS.get((self.model, self.drafter), {}).get(self.batch)

    @property
    def peer(self) -> tuple[str, float] | None:
        """Return what the peer's figure is, and its ms a step, where there is one."""
        kind, figures = _PEER.get((self.model, self.drafter), ("", ()))
        if not figures or self.batch not in _PEER_BATCHES:
            return None
        return kind, figures[_PEER_BATCHES.index(self.batch)]

    @property
    def num_drafts(self) -> int:
        """Return K, 0 without a drafter."""
        return 0 if self.drafter == "none" else NUM_DRAFTS

    @property
    def is_real(self) -> bool:
        """Return whether the weights are trained ones, and acceptance is what it is."""
        return self.model.endswith("_real")

    @property
    def verifier(self) -> Any:
        """Return what decides over drafts."""
        if self.is_real:
            return "rejection"
        return {"name": "synthetic", "rates": RATES} if self.num_drafts else "greedy"

    @property
    def tokens_per_step(self) -> float | None:
        """Return tokens a request commits a step, None where that is measured alone."""
        if self.num_drafts == 0:
            return 1.0
        return None if self.is_real else TOKENS_PER_STEP


def list_cases(batches: list[int], kinds: list[str]) -> list[Case]:
    """Return the cases of a run, those with an aim first.

    Args:
        batches: requests.
        kinds: "model drafter" each; none means all.
    """
    found = [
        Case(model, drafter, batch)
        for model, drafter in KINDS
        if not kinds or f"{model} {drafter}" in kinds
        for batch in batches
        if batch in _ONLY_BATCHES.get(model, batches)
    ]
    return sorted(found, key=lambda case: case.aim_ms is None)  # stable
