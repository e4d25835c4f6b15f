"""The recorded texts of a shadow run, and what the target says at their positions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from experiments.arms import Turn, groups_of, play
from experiments.prompts import Question
from runner.attention_metadata import single_request_metadata
from runner.models.hf import HFModel
from sampler.temperature import scale_logits
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.log import progress
from specdec.types import SamplingParams

_LINES = 64  # of logits at a time: a line is as wide as the vocabulary


@dataclass(frozen=True)
class Text:
    """A text that the target wrote.

    Args:
        request_id: of the turn; noise is that of the request.
        prompt: of the question: turns of one conversation are one unit of the bootstrap.
        category: of the question.
        seed: of the request.
        token_ids: prompt and answer, which ended by itself or at `max_total_len`.
        prompt_len: tokens of the prompt.
        max_total_len: tokens that the text could have had.
    """

    request_id: str
    prompt: str
    category: str
    seed: int
    token_ids: list[int]
    prompt_len: int
    max_total_len: int

    @property
    def first_start(self) -> int:
        """Return where the first verification starts: behind the token that the prompt gave."""
        return self.prompt_len + 1

    @property
    def num_starts(self) -> int:
        """Return how many positions a verification could start at."""
        return max(len(self.token_ids) - self.first_start, 0)


def text_of(turn: Turn, max_tokens: int, max_model_len: int) -> Text:
    """Return what is kept of an answered turn."""
    prompt = turn.prompt_token_ids
    return Text(
        request_id=turn.request_id,
        prompt=turn.question_id,
        category=turn.category,
        seed=turn.seed,
        token_ids=[*prompt, *turn.token_ids],
        prompt_len=len(prompt),
        max_total_len=min(len(prompt) + max_tokens, max_model_len),
    )


def record_turns(
    engine: Engine,
    questions: Sequence[Question],
    batch_size: int,
    make_params: Callable[[str], SamplingParams],
) -> list[Turn]:
    """Let the target answer questions by itself.

    Args:
        engine: without a drafter.
        questions: in the order in which they are kept.
        batch_size: that run together.
        make_params: gives a request's sampling parameters from its name.
    """
    turns: list[Turn] = []
    groups = groups_of(questions, batch_size)
    with progress("recording", total=len(groups)) as bar:
        for group in groups:
            turns += play(engine, group, make_params).turns
            bar.advance(f"{len(turns)} texts")
    order = {str(question.question_id): i for i, question in enumerate(questions)}
    return sorted(turns, key=lambda turn: (order[turn.question_id], turn.turn))


# Keys of a run's config.yaml that say what its texts are.
_TEXT_KEYS = (
    "target.name",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.max_tokens",
    "sampling.ignore_eos",
    "engine.max_model_len",
)
_LATER_KEYS = ("engine.logits_processors", "engine.weight_dtype")  # runs made before have none


def read_texts(folder: Path, resolved: dict[str, Any], same_noise: bool) -> list[Text]:
    """Read the texts that the autoregressive arm of a run wrote.

    Args:
        folder: of the run.
        resolved: the configuration at hand; what says how texts are written has to be the run's.
        same_noise: the texts have to be the very ones that the rule writes, not only of its law.

    Raises:
        ConfigError: no run folder, or one of another target or another way to sample.
    """
    try:
        theirs = OmegaConf.load(folder / "config.yaml")
        arms = json.loads((folder / "arms.json").read_text(encoding="utf-8"))
        lines = (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"texts={str(folder)!r} cannot be read ({error}); give the folder of a finished run, "
            f"or null to record texts"
        ) from error
    ours = OmegaConf.create(resolved)
    later = [key for key in _LATER_KEYS if OmegaConf.select(theirs, key) is not None]
    for key in (*_TEXT_KEYS, *later, *(["verifier.name"] if same_noise else [])):
        given, wanted = OmegaConf.select(theirs, key), OmegaConf.select(ours, key)
        if given != wanted:
            raise ConfigError(
                f"texts={str(folder)!r} was run with {key}={given}, and {key}={wanted} is given; "
                f"set {key}={given}, or texts=null"
            )
    limits = (
        int(OmegaConf.select(ours, "sampling.max_tokens")),
        int(OmegaConf.select(ours, "engine.max_model_len")),
    )
    texts = []
    for record in records:
        if record["arm"] != arms[0]["arm"] or record["finish_reason"] not in ("stop", "length"):
            continue
        own = {name: record[name] for name in _TURN_FIELDS}
        texts.append(text_of(Turn(**own, text="", stats=None), *limits))  # pyright: ignore
    if not texts:
        raise ConfigError(f"texts={str(folder)!r} holds no text that ended; give another folder")
    return texts


_TURN_FIELDS = (
    "question_id",
    "category",
    "turn",
    "prompt_token_ids",
    "token_ids",
    "finish_reason",
    "seed",
)


@dataclass(frozen=True)
class TextStates:
    """What the target computed for the positions of a text of L tokens."""

    token_ids: Tensor  # [L] int64
    hidden: Tensor  # [L, hidden], after its last norm
    aux: dict[int, Tensor]  # of each wanted layer, [L, hidden]
    # [L] float32: log-probability of each token under the law that it was drawn from; 0 in the
    # prompt. None where nothing is judged by it.
    logprobs: Tensor | None


@dataclass(frozen=True)
class Law:
    """What turns the target's logits into the law of a token."""

    temperature: float
    top_p: float
    top_k: int


class TargetPass:
    """Runs the target over whole texts, by the forward that serves.

    Args:
        model: the target.
        max_len: of the texts.
        aux_layers: whose outputs drafters read.
        law: that tokens are drawn from, where their probabilities are wanted.
        chunk: tokens a pass at most.
        idle: nothing is wanted, so nothing is run.
    """

    def __init__(
        self,
        model: HFModel,
        max_len: int,
        aux_layers: Sequence[int],
        law: Law | None,
        chunk: int,
        idle: bool = False,
    ) -> None:
        self.model, self.aux_layers = model, sorted(set(aux_layers))
        self._law, self._chunk, self._idle = law, chunk, idle
        self._kv = model.make_kv_cache(1, max_len)

    @torch.inference_mode()
    def run(self, text: Text) -> TextStates:
        """Run over a text."""
        device = self.model.device
        token_ids = torch.tensor(text.token_ids, device=device)
        if self._idle:
            return TextStates(token_ids, torch.empty(0, device=device), {}, None)
        hidden, aux = [], []
        for positions in torch.arange(len(token_ids), device=device).split(self._chunk):
            end = int(positions[-1]) + 1
            metadata = single_request_metadata(self._kv, positions, end)
            last, outputs = self.model.forward_with_layers(
                token_ids[positions], positions, metadata, self.aux_layers
            )
            hidden.append(last)
            aux.append(last[:, :0] if outputs is None else outputs)
        states = torch.cat(hidden)
        layers = torch.cat(aux).split(self.model.hidden_size, 1)
        by_layer = dict(zip(self.aux_layers, layers, strict=False))
        logprobs = None
        if self._law is not None:
            logprobs = self._logprobs(text, token_ids, states, self._law)
        return TextStates(token_ids, states, by_layer, logprobs)

    def _logprobs(self, text: Text, token_ids: Tensor, hidden: Tensor, law: Law) -> Tensor:
        """Return the log-probabilities of a text's own tokens."""
        device, vocab_size = hidden.device, self.model.vocab_size
        temperature = torch.tensor([law.temperature], device=device)
        top_k = law.top_k if 0 < law.top_k < vocab_size else vocab_size
        limits = torch.tensor([top_k], dtype=torch.int32, device=device)
        masses = torch.tensor([law.top_p], device=device)
        logprobs = torch.zeros(len(token_ids), device=device)
        drawn = torch.arange(text.prompt_len, len(token_ids), device=device)
        for positions in drawn.split(_LINES):
            lines = torch.zeros(len(positions), dtype=torch.int32, device=device)  # all of row 0
            logits = self.model.compute_logits(hidden[positions - 1])
            logits = scale_logits(logits, lines, temperature)
            apply_top_k_top_p(logits, lines, temperature, limits, masses)
            chosen = logits.gather(1, token_ids[positions][:, None])[:, 0]
            logprobs[positions] = chosen - logits.logsumexp(1)
        return logprobs
