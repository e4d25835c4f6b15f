"""The equality verdict: does an arm write the autoregressive arm's text?

A verified position is computed in another batch shape than its autoregressive twin, and in bf16
that alone flips tokens. So the verdict is taken in float32, on a subset of the questions, after the
timed runs. A first difference counts as a tie where the gap
between the two candidates lies below the noise that changing the batch shape alone makes on the
very same tokens.
"""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from experiments.arms import ArmSpec, Turn, build_engine, groups_of, play, request_seed
from experiments.prompts import Question, select_questions
from experiments.schemas import RunConfig
from runner.attention import single_request_metadata
from runner.loader import LoadedTarget, load_target
from runner.models.hf import HFModel
from sampler.noise import STREAM_TARGET, mix_seed, noise_gumbel, noise_key
from specdec.errors import SpecdecError
from specdec.log import progress
from specdec.parallel.groups import RankError
from specdec.parallel.tensor_ranks import tensor_parallel_of
from specdec.types import SamplingParams

logger = logging.getLogger(__name__)

EQUAL = "equal"
TIE = "equal up to a tie"
DIFFERENT = "different"
IN_DISTRIBUTION = "lossless in distribution"
LOSSY = "lossy"
NOT_CHECKED = "not checked"
REFERENCE = "reference"  # the autoregressive arm itself

_NOISE_POSITIONS = 32  # the last ones before a difference, each a batch shape of its own
_CHUNK = 5  # positions: a verification of K = 4
_MAX_NOTES = 3


@dataclass(frozen=True)
class Verdict:
    """An arm's verdict.

    Args:
        status: one of the constants above.
        dtype: of the texts that were compared; of the timed run where none were.
        num_compared, num_equal: turns.
        note: what differed, or why nothing was compared.
    """

    status: str
    dtype: str
    num_compared: int = 0
    num_equal: int = 0
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """The size of a first difference.

    Args:
        gap: between the target's two candidates, in logits.
        noise: largest difference of a logit between batch shapes, on the same tokens.
    """

    gap: float
    noise: float


# Measures the first difference of two texts: the turn, index of the new token, the two candidates.
Measure = Callable[[Turn, int, int, int], Difference]


def first_verdict(spec: ArmSpec, config: RunConfig, timed_dtype: str) -> tuple[Verdict, bool]:
    """Return what rule and temperature alone say, and whether texts have to be compared."""
    verifier = config.verifier.entry.cls(config.verifier.config)
    if spec.drafter.never_drafts:
        return Verdict(REFERENCE, timed_dtype), False
    if not verifier.lossless:
        return Verdict(LOSSY, timed_dtype, note=getattr(verifier, "note", "")), False
    if not verifier.text_equal and config.sampling.temperature > 0:
        return Verdict(IN_DISTRIBUTION, timed_dtype), False
    if not config.equality.enabled:
        return Verdict(NOT_CHECKED, timed_dtype, note="equality.enabled=false"), False
    if spec.is_recorder:
        note = "a recorder: it would record the texts of this pass, too"
        return Verdict(NOT_CHECKED, timed_dtype, note=note), False
    return Verdict(NOT_CHECKED, timed_dtype, note="the run ended before texts were compared"), True


def judge(
    reference: Sequence[Turn], turns: Sequence[Turn], dtype: str, measure: Measure
) -> Verdict:
    """Compare an arm's texts with the autoregressive arm's.

    A question's turns are compared up to the first difference: later ones have other histories.

    Args:
        reference: the autoregressive arm's turns.
        turns: the arm's.
        dtype: in which both were written.
        measure: tells ties from differences.
    """
    own = {turn.request_id: turn for turn in turns}
    ended: set[str] = set()
    notes: list[str] = []
    num_compared = num_equal = num_different = 0
    for expected in sorted(reference, key=lambda turn: turn.turn):
        given = own.get(expected.request_id)
        if given is None or expected.question_id in ended:
            continue
        num_compared += 1
        if given.token_ids == expected.token_ids:
            num_equal += 1
            continue
        ended.add(expected.question_id)
        is_tie, note = _first_difference(expected, given, measure)
        num_different += not is_tie
        # What is no tie comes first: it is what a reader has to see.
        notes.insert(0 if not is_tie else len(notes), note)
    if num_compared == 0:
        return Verdict(NOT_CHECKED, dtype, note="no turn was answered by both arms")
    status = DIFFERENT if num_different else TIE if num_equal < num_compared else EQUAL
    note = "; ".join(notes[:_MAX_NOTES])
    if len(notes) > _MAX_NOTES:
        note += f"; and {len(notes) - _MAX_NOTES} more"
    return Verdict(status, dtype, num_compared, num_equal, note)


def _first_difference(expected: Turn, given: Turn, measure: Measure) -> tuple[bool, str]:
    """Return whether two unequal texts part at a tie, and where they part, in words."""
    pairs = zip(expected.token_ids, given.token_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    where = f"question {expected.question_id} turn {expected.turn}"
    if index is None:
        lengths = f"{len(expected.token_ids)} and {len(given.token_ids)}"
        return False, f"{where}: one text begins the other ({lengths} tokens)"
    found = measure(expected, index, expected.token_ids[index], given.token_ids[index])
    is_tie = found.gap < found.noise
    sign = "<" if is_tie else ">="
    return is_tie, (
        f"{where}: parts at new token {index}, gap {found.gap:.2g} {sign} noise {found.noise:.2g}"
    )


class TargetProbe:
    """Computes a target's logits over one text in chosen batch shapes.

    Args:
        model: the target.
    """

    def __init__(self, model: HFModel) -> None:
        self._model = model

    def logits(self, token_ids: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Return float32 logits [num_tokens, V] of a text that is run in pieces.

        Args:
            token_ids: the text.
            ends: end of each piece, ascending; the last one is the text's length.
        """
        model, device = self._model, self._model.device
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
        kv = model.make_kv_cache(num_blocks=1, block_size=len(token_ids))
        lines: list[Tensor] = []
        start = 0
        for end in ends:
            positions = torch.arange(start, end, device=device)
            metadata = single_request_metadata(kv, positions, end)
            hidden = model.forward(tokens[start:end], positions, metadata)
            keep = max(len(token_ids) - _NOISE_POSITIONS, start)
            if keep < end:  # logits of a whole prompt would take gigabytes
                lines.append(model.compute_logits(hidden[keep - start :]).float())
            start = end
        return torch.cat(lines)

    def measure(
        self, params: SamplingParams, turn: Turn, index: int, first: int, second: int
    ) -> Difference:
        """Measure a first difference; see `Measure`.

        Above temperature 0 the candidates are compared with their noise, back in logits.
        """
        token_ids = turn.prompt_token_ids + turn.token_ids[:index]
        length = len(token_ids)
        start = max(length - _NOISE_POSITIONS, 0)
        head = [start] if start else []
        whole = self.logits(token_ids, [length])
        others = (
            self.logits(token_ids, [*head, *range(start + 1, length + 1)]),
            self.logits(token_ids, [*head, *range(start + _CHUNK, length, _CHUNK), length]),
        )
        noise = max(float((whole - other).abs().max()) for other in others)
        scores = whole[-1, [first, second]]
        if params.temperature > 0:
            seed = torch.tensor([mix_seed(turn.seed, 0)], device=scores.device)
            position = torch.tensor([length], device=scores.device)
            ids = torch.tensor([first, second], dtype=torch.int32, device=scores.device)
            drawn = noise_gumbel(noise_key(seed, position, STREAM_TARGET), ids)
            scores = scores + params.temperature * drawn
        return Difference(float((scores[0] - scores[1]).abs()), noise)


def check_equality(
    specs: Sequence[ArmSpec],
    config: RunConfig,
    target: LoadedTarget,
    questions: Sequence[Question],
) -> tuple[dict[str, Verdict], list[tuple[ArmSpec, Turn]]]:
    """Play a subset of the questions on every arm that needs it, and compare.

    Args:
        specs: the arms, the autoregressive one first.
        config: of the run.
        target: in float32.
        questions: those that were timed.

    Returns:
        Verdicts by arm name, and all texts that were written.
    """
    chosen = select_questions(questions, config.equality.per_category, None)
    groups = groups_of(chosen, config.batch_size)
    texts: list[tuple[ArmSpec, Turn]] = []
    verdicts: dict[str, Verdict] = {}
    dtype = str(target.model.dtype).removeprefix("torch.")
    params = config.sampling.params(seed=None, max_tokens=config.equality.max_tokens)

    def make_params(name: str) -> SamplingParams:
        return dataclasses.replace(params, seed=request_seed(config, name))

    reference: list[Turn] = []
    for spec in specs:
        engine = build_engine(spec, config, target)
        turns: list[Turn] = []
        with progress(f"{spec.name} in {dtype}", total=len(groups)) as bar:
            for group in groups:
                turns += play(engine, group, make_params).turns
                bar.advance()
        texts += [(spec, turn) for turn in turns]
        if spec is specs[0]:
            reference = turns
            verdicts[spec.name] = Verdict(REFERENCE, dtype)
            continue
        measure = partial(TargetProbe(target.model).measure, params)
        verdicts[spec.name] = judge(reference, turns, dtype, measure)
    return verdicts, texts


def try_equality(
    specs: Sequence[ArmSpec],
    config: RunConfig,
    questions: Sequence[Question],
    device: torch.device,
    target: LoadedTarget | None = None,
) -> tuple[dict[str, Verdict], list[tuple[ArmSpec, Turn]]]:
    """Take the target in float32 and check; what cannot be checked is said so.

    Args:
        specs: the arms, the autoregressive one first.
        config: of the run.
        questions: those that were timed.
        device: where to load the target.
        target: in float32, where it is loaded already.

    Returns:
        As `check_equality`.
    """
    gc.collect()  # engines hold cycles, and their memory is needed now
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        # Loaded anew: a CPU's bf16 weights are packed, so that they cannot be converted in place.
        target = target or load_target(
            config.target.name,
            torch.float32,
            device,
            tensor_parallel_of(config.engine),
            config.engine.weight_dtype,
        )
        # Whatever dtype was asked for is that of the timed runs.
        engine = dataclasses.replace(config.engine, dtype="float32")
        config = dataclasses.replace(config, engine=engine)
        return check_equality(specs, config, target, questions)
    except RankError:
        raise  # nothing can be told of the rest of a run that lost a rank
    except (SpecdecError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        logger.warning("texts are not compared: %s", reason)
        verdict = Verdict(NOT_CHECKED, "float32", note=reason)
        return {spec.name: verdict for spec in specs[1:]}, []
