"""Lets a target write many texts at once, some of which follow from others."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdec.engine import Engine
from specdec.types import SamplingParams


@dataclass(frozen=True)
class Text:
    """A text to be written.

    Args:
        prompt: token ids before it.
        temperature: at which it is drawn.
        max_tokens: its length at most.
        seed: of its noise.
        then: takes its tokens, the end token included, and whether it came to an end.
    """

    prompt: list[int]
    temperature: float
    max_tokens: int
    seed: int
    then: Callable[[list[int], bool], None]


class Player:
    """Keeps the rows of an engine busy.

    A step with prompts in it runs outside of the captured graphs, so texts do not begin one by one
    as rows fall free, but some together.

    Args:
        engine: of the target, with nothing running.
        num_rows: requests that it runs together.
        end_token_ids: tokens that end a text.
    """

    def __init__(self, engine: Engine, num_rows: int, end_token_ids: Iterable[int]) -> None:
        self._engine, self._num_rows = engine, num_rows
        self._end_token_ids = sorted(end_token_ids)
        self._num_together = max(1, num_rows // 8)
        self._queue: deque[Text] = deque()
        self._running: dict[str, Text] = {}
        self._num_started = 0
        self.num_tokens = 0  # that were written
        self.seconds = 0.0  # it took

    def add(self, text: Text) -> None:
        """Queue a text behind the others."""
        self._queue.append(text)

    def add_next(self, text: Text) -> None:
        """Queue a text before the others: what follows from others should not come last."""
        self._queue.appendleft(text)

    @property
    def num_queued(self) -> int:
        """Return the texts that wait; what will follow from them is not counted."""
        return len(self._queue)

    def play(self, on_text: Callable[[], None] = lambda: None) -> None:
        """Write what is queued, and all that follows from it.

        Args:
            on_text: called for each text that was written.
        """
        before, started = self.seconds, time.perf_counter()
        while self._queue or self._running:
            self._start()
            for increment in self._engine.step():
                output = increment.output
                if output is None:
                    continue
                text = self._running.pop(output.request_id)
                self.num_tokens += len(output.token_ids)
                text.then(output.token_ids, output.finish_reason == "stop")
                self.seconds = before + time.perf_counter() - started
                on_text()

    def _start(self) -> None:
        """Begin texts where enough rows are free."""
        num_free = self._num_rows - len(self._running)
        if num_free < min(self._num_together, len(self._queue)):
            return
        for _ in range(min(num_free, len(self._queue))):
            text = self._queue.popleft()
            name = f"text-{self._num_started}"
            self._num_started += 1
            params = SamplingParams(
                temperature=text.temperature,
                max_tokens=text.max_tokens,
                stop_token_ids=self._end_token_ids,
                seed=text.seed,
            )
            self._engine.add_request(name, text.prompt, params)
            self._running[name] = text
