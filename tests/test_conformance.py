"""Every drafter of ours is held to the rules of the conformance kit, a class each."""

from typing import Any, ClassVar

from runner.loader import LoadedTarget
from specdec.testing import DrafterConformance, Subject
from specdec.testing.play import autoregressive, same_arrivals


def oracle(target: LoadedTarget) -> dict[str, Any]:
    """Return an oracle that knows the texts of some rules, and is wrong now and then."""
    subject = Subject("none")
    texts = []
    for seed, temperature in ((23, 0.0), (31, 0.8)):
        arrivals = same_arrivals(subject, seed, 4, temperature=temperature, max_tokens=30)
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
