"""The samples of a user's request, from the first to the last that ends."""

from dataclasses import fields

from specdec.ending import Trimmed
from specdec.outcomes import fold_outcomes
from specdec.request import Request
from specdec.types import CompletionOutput, RequestOutput, RequestStats


class RequestGroup:
    """A user's request: its samples run on their own and are handed out together.

    Args:
        samples: at least one, in the order of their indices.
    """

    def __init__(self, samples: list[Request]) -> None:
        self.samples = samples
        self._ended: dict[int, CompletionOutput] = {}

    @property
    def unfinished(self) -> list[Request]:
        """Return the samples that wait or run."""
        return [sample for sample in self.samples if sample.sample_index not in self._ended]

    def end_sample(self, sample: Request, trimmed: Trimmed) -> RequestOutput | None:
        """Note how a sample ended; returns the request's output with its last sample."""
        fold_outcomes(sample.outcomes, sample.stats)
        self._ended[sample.sample_index] = ended = CompletionOutput(
            index=sample.sample_index,
            text="",
            token_ids=sample.output_token_ids,
            finish_reason=trimmed.finish_reason,
            stop_reason=trimmed.stop_reason,
            stats=sample.stats,
            logprobs=sample.logprobs,  # this step's are still to come
        )
        sample.detokenizer.finish()
        ended.text = sample.detokenizer.text
        if len(self._ended) < len(self.samples):
            return None
        first = self.samples[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[self._ended[index] for index in range(len(self.samples))],
            stats=sum_stats([sample.stats for sample in self.samples]),
            seed=first.seed,
            prompt_logprobs=first.prompt_logprobs,
        )


def sum_stats(parts: list[RequestStats]) -> RequestStats:
    """Return the statistics of several samples together; those of one are that one's own."""
    if len(parts) == 1:
        return parts[0]
    total = RequestStats()
    for part in fields(RequestStats):
        values = [getattr(stats, part.name) for stats in parts]
        per_position = isinstance(values[0], list)
        places = zip(*values, strict=True) if per_position else ()
        setattr(total, part.name, [sum(p) for p in places] if per_position else sum(values))
    return total
