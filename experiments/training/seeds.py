"""Instructions from templates: a stream of distinct prompts for each kind, fixed by a seed.

`seeds.json` holds templates by kind, and what their slots take. A slot is `{topic}`, drawn once a
template however often it stands there; `{topic:2}`, another draw; `{function.task}`, a field of one
that has several; `{5-60}`, a whole number. `{passage}` is given by the caller.
"""

import hashlib
import itertools
import json
import random
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

SEEDS_PATH = Path(__file__).parent / "seeds.json"
# Instructions that stand alone, those that ask for a passage, and those that work on passages.
ALONE_KINDS = ("writing", "code", "maths", "questions", "sentences")
PASSAGE_KIND = "passages"
TASK_KINDS = ("summary", "answers", "rewrite")

_SLOT = re.compile(r"\{(\w+|\d+-\d+)(?:\.(\w+))?(?::(\w+))?\}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_MAX_REPEATS = 1000  # known prompts in a row, after which a kind counts as used up


class SeedPrompts:
    """Prompts of every kind.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        raw = SEEDS_PATH.read_bytes()
        self.digest = hashlib.sha256(raw).hexdigest()[:16]
        content = json.loads(raw)
        self.templates: dict[str, list[str]] = content["templates"]
        self.slots: dict[str, list[Any]] = content["slots"]
        self._streams: dict[str, _Stream] = {}

    def take(self, kind: str, first: int, count: int) -> list[str]:
        """Return the prompts `first` to `first + count - 1` of a kind; no two are alike.

        Raises:
            ConfigError: the templates of the kind give no more.
        """
        stream = self._streams.setdefault(kind, _Stream(self, kind, self._seed))
        return stream.up_to(first + count)[first:]

    def task(self, kind: str, passage: str, draw: random.Random) -> str:
        """Return an instruction to work on a passage."""
        return self.fill(draw.choice(self.templates[kind]), draw, passage)

    def fill(self, template: str, draw: random.Random, passage: str = "") -> str:
        """Return a template with its slots filled."""
        chosen: dict[tuple[str, str | None], Any] = {}

        def value(found: re.Match[str]) -> str:
            slot, part, mark = found.groups()
            if slot == "passage":
                return passage
            if (slot, mark) not in chosen:
                bounds = _RANGE.fullmatch(slot)
                chosen[slot, mark] = (
                    draw.randint(int(bounds[1]), int(bounds[2]))
                    if bounds
                    else draw.choice(self._others(slot, chosen))
                )
            drawn = chosen[slot, mark]
            return str(drawn if part is None else drawn[part])

        return _SLOT.sub(value, template)

    def _others(self, slot: str, chosen: dict[tuple[str, str | None], Any]) -> list[Any]:
        """Return what a slot can take beside what was drawn for it already."""
        taken = [value for (name, _), value in chosen.items() if name == slot]
        return [value for value in self.slots[slot] if value not in taken]

    @cached_property
    def unknown_slots(self) -> set[str]:
        """Return the slots of templates that nothing is known for; there should be none."""
        texts = itertools.chain.from_iterable(self.templates.values())
        named = {found[1] for text in texts for found in _SLOT.finditer(text)}
        return {name for name in named if not _RANGE.fullmatch(name)} - {*self.slots, "passage"}


class _Stream:
    """The distinct prompts of one kind, made as far as they were asked for."""

    def __init__(self, prompts: SeedPrompts, kind: str, seed: int) -> None:
        self._prompts, self._kind = prompts, kind
        self._draw = random.Random(f"{seed}/{kind}")
        self._made: dict[str, None] = {}

    def up_to(self, count: int) -> list[str]:
        """Return the first `count` of them."""
        templates, repeats = self._prompts.templates[self._kind], 0
        while len(self._made) < count:
            prompt = self._prompts.fill(self._draw.choice(templates), self._draw)
            repeats = repeats + 1 if prompt in self._made else 0
            if repeats > _MAX_REPEATS:
                raise ConfigError(
                    f"the templates give no more than about {len(self._made)} prompts of the kind "
                    f"{self._kind!r}, {count} are wanted; lower its share, num_shards or "
                    "prompts_per_shard"
                )
            self._made[prompt] = None
        return list(itertools.islice(self._made, count))
