"""Hands what a step sampled to the requests, and tells the caller what each of them got."""

from collections.abc import Callable

from runner.async_output import StepOutput
from specdec.ending import Trimmed, trim
from specdec.outcomes import (
    Outcomes,
    append_logprobs,
    append_prompt_logprobs,
    count_outcome,
    judged,
)
from specdec.request import Request
from specdec.types import Increment

# Ends a sample, given the new tokens that it had before the step, what is left of its run, and the
# list that its increment goes to.
Finish = Callable[[Request, int, Trimmed, list[Increment]], None]


class Delivery:
    """Appends runs to requests, up to the ends of their texts.

    Args:
        num_speculative_tokens: K.
        eos_token_ids: ids that end a text unless `ignore_eos`.
    """

    def __init__(self, num_speculative_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._width = num_speculative_tokens + 1
        self._eos_token_ids = eos_token_ids

    def append(
        self,
        outcomes: Outcomes,
        must_trim: list[bool],
        finish: Finish,
        increments: list[Increment],
    ) -> None:
        """Append what a step sampled; an increment for each sample that got tokens.

        Args:
            outcomes: of the step.
            must_trim: whether a run may end its text whatever its tokens are.
            finish: called for each sample whose text ended.
            increments: added to, each as soon as its sample has the tokens.
        """
        width = self._width
        for request, verifies, run, num_sampled, num_judged, trims in zip(
            *outcomes, must_trim, strict=True
        ):
            if num_sampled == 0:
                continue
            del run[num_sampled:]
            dead_end = None
            if request.grammar is not None:
                dead_end = request.grammar.cut(run, request.end_token_ids)
            # Nothing else ends a text: of any other run `trim` would keep all.
            if trims or dead_end is not None or not request.end_token_ids.isdisjoint(run):
                counts = (num_sampled, num_judged) if verifies else None
                self._trim(request, run, (counts, dead_end), finish, increments)
                continue
            detokenizer = request.detokenizer
            start = len(detokenizer.token_ids)
            detokenizer.token_ids += run
            request.token_ids += run
            if verifies:
                request.outcomes[num_sampled * width + num_judged] += 1
            increments.append(
                Increment(request.request_id, run, detokenizer, start, request.sample_index)
            )

    def _trim(
        self,
        request: Request,
        run: list[int],
        outcome: tuple[tuple[int, int] | None, str | None],
        finish: Finish,
        increments: list[Increment],
    ) -> None:
        """Append a run that may hold the end of its text.

        Args:
            request: whose it is.
            run: what is left of it inside the request's grammar.
            outcome: num_sampled and num_judged of a verification, and why the text cannot go on
                behind the run; None where it was none, and where it can.
            finish: called where the text ended.
            increments: added to.
        """
        counts, dead_end = outcome
        detokenizer, params = request.detokenizer, request.params
        start = len(detokenizer.token_ids)
        room = request.max_total_len - len(request.token_ids)
        try:
            trimmed = trim(run, room, params, self._eos_token_ids, detokenizer)
        except BaseException:  # of the tokenizer; the request gets these tokens again
            detokenizer.rewind(start)
            raise
        kept = trimmed.token_ids
        if trimmed.finish_reason is None and dead_end is not None:
            trimmed = Trimmed(kept, "abort", dead_end)
        request.token_ids += kept
        if counts is not None:
            num_judged, num_accepted = judged(*counts, len(kept), trimmed.finish_reason)
            count_outcome(request.stats, len(kept), num_judged, num_accepted)
        if trimmed.finish_reason is not None:
            finish(request, start, trimmed, increments)
            return
        increments.append(
            Increment(request.request_id, kept, detokenizer, start, request.sample_index)
        )


def deliver_logprobs(
    output: StepOutput,
    requests: list[Request],
    owners: set[Request],
    increments: list[Increment],
) -> None:
    """Give the log-probabilities of a step to those of its requests that own their rows."""
    for prompt in output.prompts:
        if requests[prompt.place] in owners:
            request = requests[prompt.place]
            append_prompt_logprobs(prompt.records.numpy(), prompt.first, request)
    if output.logprobs is not None:
        assert output.logprob_places is not None
        wanting = [requests[place] for place in output.logprob_places.tolist()]
        owned = [i for i, request in enumerate(wanting) if request in owners]
        records = output.logprobs[owned]
        append_logprobs(records, [wanting[i] for i in owned], increments)
