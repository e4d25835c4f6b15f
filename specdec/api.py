"""`LLM.generate`: prompts in, texts out, over the step-level engine."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from runner.loader import LoadedTarget
from specdec.config import EngineConfig, check_keys
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError, UnsupportedError
from specdec.intake import Prompt
from specdec.parallel.replicas import DataParallelEngine
from specdec.trace import StepTrace
from specdec.types import Increment, RequestOutput, SamplingParams

_OWN_OPTIONS = ("target", "drafter", "verifier", "num_speculative_tokens", "trace", "draft_length")


class LLM:
    """A target with a drafter and a verifier.

    Args:
        target: "smollm2-135m-instruct" (embedded), a hub id, a local folder, or a loaded target.
        drafter: registered name, mapping with a key "name", or a config object; "none" decodes
            autoregressively.
        verifier: likewise; "greedy", "rejection", "sampled_match" or another of docs/verifiers.md.
        num_speculative_tokens: drafts a step at most (K).
        trace: collects step traces where given.
        draft_length: how many of the K drafts a step proposes: "fixed" (all), or another policy by
            name, mapping or config object: "by_batch_size", "confidence", "goodput".
        options: fields of `specdec.config.EngineConfig` (dtype, device, seed, max_num_reqs,
            max_model_len, max_num_batched_tokens, num_kv_blocks, block_size, ...). With
            data_parallel_size or tensor_parallel_size above 1 every rank builds its LLM and makes
            the same calls; each returns all outputs (docs/parallel.md).

    Raises:
        ConfigError, WeightsError, UnsupportedError, CapacityError: see `Engine`.
        RankError: ranks lost, or contradict, one another.
    """

    def __init__(
        self,
        target: str | LoadedTarget = "smollm2-135m-instruct",
        drafter: str | Mapping[str, Any] | object = "none",
        verifier: str | Mapping[str, Any] | object = "rejection",
        num_speculative_tokens: int = 4,
        trace: StepTrace | None = None,
        draft_length: str | Mapping[str, Any] | object = "fixed",
        **options: Any,
    ) -> None:
        if "config" not in options:  # an EngineConfig instead of its fields: the engine's to check
            names = [f.name for f in dataclasses.fields(EngineConfig)]
            check_keys(options, [*_OWN_OPTIONS, *names], "engine option")
        given = options.get("config")
        replicas = getattr(given, "data_parallel_size", options.get("data_parallel_size", 1))
        several = isinstance(replicas, int) and replicas > 1
        self.engine = (DataParallelEngine if several else Engine)(
            target,
            drafter,
            verifier,
            num_speculative_tokens,
            trace=trace,
            draft_length=draft_length,
            **options,
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        labels: Sequence[Any] | None = None,
        on_increment: Callable[[Increment], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends.

        Args:
            prompts: one prompt or a list; each a string, token ids, or chat messages.
            params: one for all, or one a prompt.
            labels: one a prompt, carried into traces.
            on_increment: called with everything a step adds.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ConfigError: a prompt or parameter that is not allowed; of several prompts the message
                begins with the index of the one. Nothing stays queued after an error.
            UnsupportedError, CapacityError: see `Engine.add_request`.
        """
        batch = _as_list(prompts)
        each = _params_of(params, len(batch))
        if labels is not None and len(labels) != len(batch):
            raise ConfigError(f"{len(labels)} labels for {len(batch)} prompts")
        names = [f"generate-{next(self._ids)}" for _ in batch]
        own: set[str] = set()  # those really added: an id of the caller's own may be taken
        foreign: list[Increment] = []  # of requests that the caller runs on the same engine
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, (name, prompt) in enumerate(zip(names, batch, strict=True)):
                label = labels[i] if labels is not None else None
                try:
                    self.engine.add_request(name, prompt, each[i], label)
                except (ConfigError, UnsupportedError, CapacityError) as error:
                    if len(batch) == 1:
                        raise
                    raise type(error)(f"prompt {i}: {error}") from error
                own.add(name)
            while len(outputs) < len(names):
                if not self.engine.has_requests:
                    gone = min(own - outputs.keys())
                    raise ConfigError(f"request {gone!r} was discarded meanwhile; end it by abort")
                increments = self.engine.step()
                foreign += [i for i in increments if i.request_id not in own]
                for increment in increments:
                    if increment.request_id not in own:
                        continue
                    if on_increment is not None:
                        on_increment(increment)
                    if increment.output is not None:
                        outputs[increment.request_id] = increment.output
        finally:
            with ExitStack() as cleanup:  # all of it, whatever a drafter does at a text's end
                cleanup.callback(self.engine.put_back, foreign)
                for name in own - outputs.keys():  # ended by `abort`, and no step told of it
                    cleanup.callback(self.engine.take_back, name)
                for name in self.engine.unfinished_ids & own:
                    cleanup.callback(self.engine.discard, name)
        return [outputs[name] for name in names]


def _params_of(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt.

    Raises:
        ConfigError: something else was given, or another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    wrong = f"give a SamplingParams for all prompts, or a list of one each ({num_prompts})"
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ConfigError(f"params={params!r} is not allowed; {wrong}")
    for i, own in enumerate(params):
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"params[{i}]={own!r} is not allowed; {wrong}")
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} sampling parameters for {num_prompts} prompts; {wrong}")
    return list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return a list of prompts; a lone string, id list or message list becomes a list of one."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # what is no prompt at all is refused when it is read
    items = list(prompts)
    if items and isinstance(items[0], Mapping):
        return [items]
    if items and not isinstance(items[0], str | Sequence | np.ndarray):
        return [items]
    if not items:
        raise ConfigError("no prompt was given; give a string, token ids, or chat messages")
    return items
