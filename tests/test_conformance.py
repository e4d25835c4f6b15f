"""Every drafter of ours is held to the rules of the conformance kit, a class each."""

from typing import Any, ClassVar

from runner.loader import LoadedTarget
from specdec.testing import DrafterConformance, Subject
from specdec.testing.play import autoregressive, same_arrivals
from specdec.testing.rules_history import alternating


def oracle(target: LoadedTarget) -> dict[str, Any]:
    """Return an oracle that knows the texts of some rules, and is wrong now and then."""
    subject, texts = Subject("none"), []
    schedules = [alternating(subject, seed, 7) for seed in (41, 43, 47, 53)]
    for seed, temperature in ((23, 0.0), (31, 0.8)):
        fields = {"temperature": temperature, "max_tokens": 30}
        schedules.append(same_arrivals(subject, seed, 4, **fields))
    for arrivals in schedules:
        for name, text in autoregressive(subject, arrivals).items():
            texts.append([*arrivals[int(name)].prompt, *text])
    return {"name": "oracle", "texts": texts, "rates": [0.8, 0.6]}


class TestNone(DrafterConformance):
    drafter = "none"


class TestNgram(DrafterConformance):
    drafter = "ngram"


class TestOracle(DrafterConformance):
    drafter = staticmethod(oracle)


class TestDraftModelArgmax(DrafterConformance):
    drafter: ClassVar = {"name": "draft_model", "model": "target"}


class TestDraftModelGumbel(DrafterConformance):
    drafter: ClassVar = {"name": "draft_model", "model": "target", "sampling": "gumbel"}
