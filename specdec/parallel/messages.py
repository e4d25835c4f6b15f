"""What replicas tell one another of a step, as JSON: increments, and outputs of what ended."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from specdec.request import Request
from specdec.samples import RequestGroup
from specdec.types import (
    CompletionOutput,
    Increment,
    Logprob,
    RequestOutput,
    RequestStats,
    TokenLogprobs,
)

Groups = dict[str, RequestGroup]  # requests by their ids, on the rank that reads or writes


def pack(increments: Sequence[Increment], groups: Groups) -> list[Any]:
    """Turn a replica's own increments into what JSON can hold."""
    return [_pack_increment(i, groups[i.request_id].samples[i.sample_index]) for i in increments]


def unpack(values: Sequence[Any], groups: Groups) -> list[Increment]:
    """Turn another replica's increments into those of this rank.

    Their text is decoded here when it is read, by the detokenizers of this rank's own samples.
    """
    return [_unpack_increment(value, groups[value[0]]) for value in values]


def encode(values: Any) -> bytes:
    """Return JSON as bytes; numbers come back as they were."""
    return json.dumps(values, separators=(",", ":")).encode()


def _pack_increment(increment: Increment, sample: Request) -> list[Any]:
    # A stop token is part of the tokens and not of the text.
    ended = increment.finish_reason is not None
    num_text = len(sample.detokenizer.token_ids) if ended else None
    return [
        increment.request_id,
        increment.sample_index,
        list(increment.new_token_ids),
        increment.finish_reason,
        num_text,
        _pack_logprobs(increment.logprobs),
        None if increment.output is None else _pack_output(increment.output),
    ]


def _unpack_increment(value: Sequence[Any], group: RequestGroup) -> Increment:
    request_id, sample_index, token_ids, finish_reason, num_text, logprobs, output = value
    detokenizer = group.samples[sample_index].detokenizer
    start = len(detokenizer.token_ids)
    for token_id in token_ids if num_text is None else token_ids[: num_text - start]:
        detokenizer.add(token_id)
    if finish_reason is not None:
        detokenizer.finish()
    increment = Increment(request_id, token_ids, detokenizer, start, sample_index, finish_reason)
    increment.logprobs = _unpack_logprobs(logprobs)
    if output is not None:
        increment.output = _unpack_output(output, group)
    return increment


def _pack_output(output: RequestOutput) -> list[Any]:
    samples = [
        [
            sample.text,
            sample.token_ids,
            sample.finish_reason,
            sample.stop_reason,
            dataclasses.asdict(sample.stats),
            _pack_logprobs(sample.logprobs),
        ]
        for sample in output.outputs
    ]
    return [samples, dataclasses.asdict(output.stats), _pack_logprobs(output.prompt_logprobs)]


def _unpack_output(value: Sequence[Any], group: RequestGroup) -> RequestOutput:
    samples, stats, prompt_logprobs = value
    first = group.samples[0]
    outputs = [
        CompletionOutput(
            index, text, token_ids, finish, stop, RequestStats(**own), _unpack_logprobs(logprobs)
        )
        for index, (text, token_ids, finish, stop, own, logprobs) in enumerate(samples)
    ]
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=outputs,
        stats=outputs[0].stats if len(outputs) == 1 else RequestStats(**stats),
        seed=first.seed,
        prompt_logprobs=_unpack_logprobs(prompt_logprobs),
    )


def _pack_logprobs(logprobs: Sequence[TokenLogprobs | None] | None) -> list[Any] | None:
    """Return [id, log-probability, rank] of each named token of each place, in their order."""
    if logprobs is None:
        return None
    return [
        None if place is None else [[token_id, *named] for token_id, named in place.items()]
        for place in logprobs
    ]


def _unpack_logprobs(values: Sequence[Any] | None) -> list[Any] | None:
    if values is None:
        return None
    return [
        None if place is None else {token_id: Logprob(*named) for token_id, *named in place}
        for place in values
    ]
