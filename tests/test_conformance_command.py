"""The command of the conformance kit: exit codes, one sentence for a mistake, and the cases."""

import subprocess
import sys
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec.testing import conformance_cases
from specdec.testing.__main__ import main
from specdec.testing.conformance import RULES, read_values
from tests import broken_drafters

ROOT = Path(__file__).resolve().parent.parent


def test_a_sound_drafter_gives_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ngram", "max_n=2", "--rule", "bounds", "--rule", "draft_kv"]) == 0
    shown = capsys.readouterr().out
    assert "1 passed, 0 broken, 1 not applicable" in shown
    assert "declared kv=None" in shown


def test_a_broken_drafter_gives_exit_code_1_and_names_the_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{broken_drafters.__name__}:ReadsHost"
    assert main([name, "--rule", "host_reads", "--rule", "interface"]) == 1
    shown = capsys.readouterr()
    assert "1 passed, 1 broken" in shown.out
    assert "rule 'host_reads' is broken" in shown.err
    assert "broken_drafters" in shown.err  # where it was read


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ngrm"], "did you mean 'ngram'?"),
        (["ngram", "max_m=3"], "did you mean 'max_n'?"),
        (["ngram", "max_n=0"], "needs 1 <= min_n <= max_n"),
        (["ngram", "max_n"], "no key=value"),
        (["ngram", "--rule", "bound"], "no rule 'bound'; known: interface"),
        (["ngram", "--device", "tpu"], "device='tpu' is not allowed"),
        (["ngram", "-k", "-1"], "num_speculative_tokens=-1 is not allowed"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert words in shown
    assert len(shown.strip().splitlines()) == 1


def test_values_are_read_as_yaml() -> None:
    assert read_values(["a=3", "b=[1, 2]", "c=x", "d=null"]) == {
        "a": 3,
        "b": [1, 2],
        "c": "x",
        "d": None,
    }
    with pytest.raises(ConfigError, match="quote it"):
        read_values(["a=[1"])


def test_the_quick_subset_leaves_out_what_is_marked_slow() -> None:
    slow = [case.id for case in conformance_cases() if case.marks]
    assert slow == [rule.name for rule in RULES if rule.slow]
    assert 0 < len(slow) < len(RULES) / 2


def test_the_plugin_of_pytest_loads_nothing_heavy() -> None:
    code = (
        "import sys, specdec.testing.plugin;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
