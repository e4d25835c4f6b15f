"""One shard of a dataset: which texts the target writes, and which follow from which.

A shard is a list of families. What belongs to one family stays in one split:

    free          the chat model goes on from an empty user turn; then it answers its own question
    instruction   it answers an instruction from templates
    passages      it writes one passage or several; then it summarises them, answers questions about
                  them and rewrites them
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.training.dataset import TokenSequence
from experiments.training.filters import SeenTexts, repeated_share
from experiments.training.player import Player, Text
from experiments.training.seeds import ALONE_KINDS, PASSAGE_KIND, TASK_KINDS, SeedPrompts
from specdec.errors import ConfigError

FREE_KIND = "free"
SOURCES = (FREE_KIND, *ALONE_KINDS, PASSAGE_KIND, *TASK_KINDS)
# What a share can be given of; "passages" counts the tasks on them, too.
FAMILIES = (FREE_KIND, *ALONE_KINDS, PASSAGE_KIND)
_NUM_PASSAGES = (1, 1, 2, 2, 3)  # of a family, drawn from these
_PASSAGE_FAMILY_SIZE = sum(_NUM_PASSAGES) / len(_NUM_PASSAGES) + len(TASK_KINDS)
_SLOT = "\u2063user text\u2063"  # stands in the chat template for what the user says


@dataclass
class WritingConfig:
    """How the target writes.

    Args:
        temperatures: of answers.
        temperature_shares: of answers at each of them.
        question_temperature: of the user turns that the chat model writes itself.
        passage_temperature: of the passages that are worked on.
        max_question_tokens: of such a user turn.
        max_passage_tokens: of a passage.
        max_answer_tokens: of an answer.
        min_answer_tokens: shorter answers are dropped.
        max_repeated_share: answers are dropped where more than this share of their 4-grams repeats
            earlier ones.
        max_shared: answers are dropped where more than this share of a sketch of their 8-grams
            stands in earlier ones.
    """

    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.7, 1.0])
    temperature_shares: list[float] = field(default_factory=lambda: [0.6, 0.1, 0.1, 0.2])
    question_temperature: float = 0.8
    passage_temperature: float = 0.7
    max_question_tokens: int = 192
    max_passage_tokens: int = 512
    max_answer_tokens: int = 256
    min_answer_tokens: int = 4
    max_repeated_share: float = 0.5
    max_shared: float = 0.5

    def __post_init__(self) -> None:
        """Check every range."""
        temperatures, shares = self.temperatures, self.temperature_shares
        if not temperatures or len(temperatures) != len(shares):
            raise ConfigError(
                f"writing.temperatures={temperatures} and writing.temperature_shares={shares} do "
                "not belong together; give one share for each temperature, at least one"
            )
        for value in (*temperatures, self.question_temperature, self.passage_temperature):
            if value != 0 and not 1e-5 <= value < float("inf"):
                raise ConfigError(f"writing: temperature {value} is not allowed; give 0 or more")
        if min(shares) < 0 or sum(shares) <= 0:
            raise ConfigError(
                f"writing.temperature_shares={shares} is not allowed; give numbers >= 0, one above"
            )
        for name in ("max_question_tokens", "max_passage_tokens", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"writing.{name}={getattr(self, name)} is not allowed; give >= 1")
        for name in ("max_repeated_share", "max_shared"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"writing.{name}={getattr(self, name)} is not allowed; give a number in [0, 1]"
                )
        if not 1 <= self.min_answer_tokens <= self.max_answer_tokens:
            raise ConfigError(
                f"writing.min_answer_tokens={self.min_answer_tokens} is not allowed; give an "
                f"integer in [1, max_answer_tokens={self.max_answer_tokens}]"
            )


class ChatFormat:
    """A user's turn as the chat template has it, in token ids.

    Args:
        tokenizer: of the target.

    Raises:
        ConfigError: there is no chat template, or it does not leave the user's text as it is.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the target has no chat template; the stage data needs a chat model")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SLOT}], add_generation_prompt=True, tokenize=False
        )
        if text.count(_SLOT) != 1:
            raise ConfigError("the target's chat template does not keep a user's text as it is")
        self._tokenizer = tokenizer
        self._before, self._behind = text.split(_SLOT)
        self.opening = self._encode([self._before])[0]  # an empty user turn

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what stands before the answers to some user texts."""
        return self._encode([self._before + text + self._behind for text in texts])

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, without special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def user_text(self, prompt: Sequence[int]) -> str:
        """Return what the user says in a prompt."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return text.removeprefix(self._before).removesuffix(self._behind)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def counts_of(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Return how many families of each kind about `total` texts are made of."""
    whole = sum(shares.values()) or 1.0
    return {
        kind: round(total * shares.get(kind, 0.0) / whole / _size_of(kind)) for kind in FAMILIES
    }


def _size_of(kind: str) -> float:
    return _PASSAGE_FAMILY_SIZE if kind == PASSAGE_KIND else 1.0


@dataclass(frozen=True)
class Written:
    """A text of a shard.

    Args:
        place: in the order of the shard.
        sequence: prompt and answer.
        root: the text that decides the family's split.
    """

    place: tuple[int, int]
    sequence: TokenSequence
    root: str


class ShardWriter:
    """Queues the texts of one shard and gathers what the target made of them.

    Args:
        config: how to write.
        chat: of the target.
        seeds: instructions.
        seen: what earlier shards hold.
        max_len: tokens of a text at most, prompt included.
    """

    def __init__(
        self,
        config: WritingConfig,
        chat: ChatFormat,
        seeds: SeedPrompts,
        seen: SeenTexts,
        max_len: int,
    ) -> None:
        self._config, self._chat, self._seeds, self._seen = config, chat, seeds, seen
        self._max_len = max_len
        self.dropped: Counter[str] = Counter()
        self._written: list[Written] = []
        shares = np.cumsum(config.temperature_shares)
        self._bounds = (shares / shares[-1]).tolist()

    def begin(self, player: Player, seed: int, shard: int, counts: Mapping[str, int]) -> None:
        """Queue a shard.

        Args:
            player: writes.
            seed: of the dataset.
            shard: its index.
            counts: families of each kind in every shard.
        """
        self._player, self._name = player, f"{seed}/{shard}"
        self._written, family = [], 0
        # Those that most follows from come first, and the longest, so that the rows stay busy.
        sizes = [random.Random(f"{self._name}/{i}") for i in range(counts[PASSAGE_KIND])]
        wanted = [draw.choice(_NUM_PASSAGES) for draw in sizes]
        # Every family may take as many as the largest, so that shards do not depend on each other.
        most = max(_NUM_PASSAGES)
        first = shard * most * len(wanted)
        instructions = self._seeds.take(PASSAGE_KIND, first, most * len(wanted)) if wanted else []
        for i, num_passages in enumerate(wanted):
            texts = instructions[most * i : most * i + num_passages]
            self._begin_passages(family, texts)
            family += 1
        for _ in range(counts[FREE_KIND]):
            self._begin_free(family)
            family += 1
        for kind in ALONE_KINDS:
            texts = self._seeds.take(kind, shard * counts[kind], counts[kind])
            for text, prompt in zip(texts, self._chat.prompts(texts), strict=True):
                self._ask((family, 0), text, prompt, kind, self._player.add)
                family += 1

    def finish(self) -> list[Written]:
        """Return the shard's texts in their order, without loops and copies."""
        kept = []
        for written in sorted(self._written, key=lambda written: written.place):
            reason = self._why_not(written.sequence)
            if reason is None:
                kept.append(written)
            else:
                self.dropped[reason] += 1
        return kept

    def _why_not(self, sequence: TokenSequence) -> str | None:
        """Return why a text is dropped; None where it is not, and from now on known."""
        reason = self._quality(sequence.answer)
        if reason is not None:
            return reason
        prompt = sequence.token_ids[: sequence.num_prompt]
        # An empty user turn is everybody's prompt.
        if sequence.num_prompt > len(self._chat.opening) and self._seen.has_prompt(prompt):
            return "same prompt"
        return None if self._seen.add_new(sequence) else "copy"

    def _quality(self, answer: np.ndarray) -> str | None:
        """Return what is wrong with an answer alone, None where nothing is."""
        if len(answer) < self._config.min_answer_tokens:
            return "short"
        is_loop = repeated_share(answer) > self._config.max_repeated_share
        return "loop" if is_loop else None

    # --- families -------------------------------------------------------------------------------

    def _begin_free(self, family: int) -> None:
        """Let the chat model write the user's turn, then answer it."""

        def then(token_ids: list[int], ended: bool) -> None:
            question = self._chat.text(token_ids)
            if not ended:  # no question, but the target's own text all the same
                temperature = self._config.question_temperature
                self._keep((family, 0), self._chat.opening, token_ids, temperature, FREE_KIND)
                return
            if not question:
                self.dropped["no question"] += 1
                return
            prompt = self._chat.prompts([question])[0]
            self._ask((family, 1), question, prompt, FREE_KIND, self._player.add_next)

        config = self._config
        self._player.add(
            Text(
                self._chat.opening,
                config.question_temperature,
                config.max_question_tokens,
                self._seed_of((family, 0)),
                then,
            )
        )

    def _begin_passages(self, family: int, instructions: Sequence[str]) -> None:
        """Let the target write passages, and work on them once all are there."""
        passages: dict[int, str] = {}
        config, root = self._config, instructions[0]
        prompts = self._chat.prompts(instructions)

        def wait_for(index: int) -> Callable[[list[int], bool], None]:
            def then(token_ids: list[int], ended: bool) -> None:
                temperature = config.passage_temperature
                place = family, index
                self._keep(place, prompts[index], token_ids, temperature, PASSAGE_KIND, root)
                is_sound = self._quality(np.array(token_ids)) is None
                passages[index] = self._chat.text(token_ids) if is_sound else ""
                if len(passages) == len(instructions):
                    texts = [passages[i] for i in range(len(instructions)) if passages[i]]
                    self._begin_tasks(family, len(instructions), texts, root)

            return then

        for index, prompt in enumerate(prompts):
            self._player.add(
                Text(
                    prompt,
                    config.passage_temperature,
                    config.max_passage_tokens,
                    self._seed_of((family, index)),
                    wait_for(index),
                )
            )

    def _begin_tasks(self, family: int, first: int, passages: list[str], root: str) -> None:
        """Ask for work on passages, as many of them as fit."""
        draw = random.Random(f"{self._name}/{family}/tasks")
        room = self._max_len - self._config.max_answer_tokens
        for index, kind in enumerate(TASK_KINDS):
            template_draw = draw.random()
            for count in range(len(passages), 0, -1):
                passage = "\n\n".join(passages[:count])
                text = self._seeds.task(kind, passage, random.Random(template_draw))
                prompt = self._chat.prompts([text])[0]
                if len(prompt) <= room:
                    place = family, first + index
                    self._ask(place, text, prompt, kind, self._player.add_next, root)
                    break
            else:
                self.dropped["no passage that fits"] += 1

    def _ask(
        self,
        place: tuple[int, int],
        question: str,
        prompt: list[int],
        kind: str,
        add: Callable[[Text], None],
        root: str | None = None,
    ) -> None:
        """Queue an answer, unless earlier shards hold the very prompt."""
        if self._seen.has_prompt(prompt):
            self.dropped["same prompt"] += 1
            return
        if len(prompt) + self._config.max_answer_tokens > self._max_len:
            self.dropped["long prompt"] += 1
            return
        temperature = self._temperature_of(place)

        def then(token_ids: list[int], ended: bool) -> None:
            self._keep(place, prompt, token_ids, temperature, kind, root or question)

        seed = self._seed_of(place)
        add(Text(prompt, temperature, self._config.max_answer_tokens, seed, then))

    def _keep(
        self,
        place: tuple[int, int],
        prompt: list[int],
        answer: list[int],
        temperature: float,
        kind: str,
        root: str | None = None,
    ) -> None:
        token_ids = np.array([*prompt, *answer], dtype=np.int32)
        sequence = TokenSequence(token_ids, len(prompt), temperature, SOURCES.index(kind))
        self._written.append(Written(place, sequence, root or self._chat.text(answer)))

    def _temperature_of(self, place: tuple[int, int]) -> float:
        drawn = random.Random(f"{self._name}/{place}/temperature").random()
        index = next(i for i, bound in enumerate(self._bounds) if drawn < bound)
        return self._config.temperatures[index]

    def _seed_of(self, place: tuple[int, int]) -> int:
        digest = hashlib.blake2b(f"{self._name}/{place}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
