"""Drafters with weights that fit a target, and mixtures, are held to the rules of the kit.

The rules that say most of a drafter's own code run every time, the others with the slow tests.
"""

from typing import ClassVar

from specdec.testing import DrafterConformance
from tests import fitting_drafters

QUICK = ("interface", "bounds", "host_reads", "committed_text", "num_drafts", "confidence", "score")


class TestLayerSkip(DrafterConformance):
    drafter: ClassVar = {"name": "layer_skip", "num_layers": 3}
    quick: ClassVar = QUICK


class TestMedusa(DrafterConformance):
    drafter = staticmethod(fitting_drafters.medusa)
    quick: ClassVar = QUICK


class TestEagle(DrafterConformance):
    drafter = staticmethod(fitting_drafters.eagle)
    quick: ClassVar = (*QUICK, "statistics")


class TestEagle3(DrafterConformance):
    """Over a reduced vocabulary, by argmax."""

    drafter = staticmethod(fitting_drafters.eagle3)
    quick: ClassVar = QUICK


class TestEagle3Drawing(DrafterConformance):
    """Over a reduced vocabulary, with its law."""

    drafter = staticmethod(fitting_drafters.eagle3_drawing)
    quick: ClassVar = (*QUICK, "kinds")


class TestBlockParallel(DrafterConformance):
    drafter = staticmethod(fitting_drafters.block_parallel)
    quick: ClassVar = QUICK


class TestOtherTokenizer(DrafterConformance):
    target = staticmethod(fitting_drafters.target_with_tokenizer)
    drafter = staticmethod(fitting_drafters.other_tokenizer)
    quick: ClassVar = QUICK


class TestSuffix(DrafterConformance):
    drafter = "suffix"
    quick: ClassVar = ("interface", "host_drafts", "statistics", "preemption", "num_drafts")


class TestSuffixOfOwnText(DrafterConformance):
    """Without the outputs of other requests, drafts follow from the text."""

    drafter: ClassVar = {"name": "suffix", "use_global": False}
    quick: ClassVar = ("committed_text", "row_reuse", "preemption")


class TestSuffixElseModel(DrafterConformance):
    drafter: ClassVar = fitting_drafters.mixed("suffix", fitting_drafters.ITSELF)
    quick: ClassVar = ("bounds", "host_reads", "host_drafts", "statistics", "num_drafts")


class TestNgramElseEagle(DrafterConformance):
    drafter = staticmethod(fitting_drafters.ngram_else_eagle)
    quick: ClassVar = QUICK


class TestBestOfTwo(DrafterConformance):
    drafter = staticmethod(fitting_drafters.best_of_two)
    quick: ClassVar = ("bounds", "host_reads", "statistics", "num_drafts", "confidence")


class TestRecordBesideNgram(DrafterConformance):
    """What records proposes nothing: it stands in front of what does."""

    drafter: ClassVar = fitting_drafters.mixed("tests.fitting_drafters:RecordAnew", "ngram")
    quick: ClassVar = ("interface", "bounds", "committed_text", "row_reuse")
