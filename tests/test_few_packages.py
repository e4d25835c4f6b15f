"""A GPU host needs no more than torch, triton, transformers and what these bring, and pytest."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Run in a process of its own. What is left out is not found at all, as where it is not installed.
_ON_A_BARE_HOST = """
import os, sys
from importlib.machinery import PathFinder

LEFT_OUT = {"hydra", "omegaconf", "wandb", "pandas", "pyarrow", "hypothesis", "rich", "scipy",
            "matplotlib", "gguf", "jinja2"}

class BarePathFinder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in LEFT_OUT:
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[:] = [BarePathFinder if f is PathFinder else f for f in sys.meta_path]

from specdec import LLM, SamplingParams
from specdec.log import progress, setup_logging
from specdec.trace import StepTrace
from tests.models import random_prompts, tiny_model, tiny_target

import experiments.bench_generate, experiments.bundle, experiments.prompts
import experiments.training.data, experiments.training.eval, experiments.training.fit

setup_logging()
options = {"device": "cpu", "max_model_len": 64}
llm = LLM(tiny_target(tiny_model()), "ngram", "greedy", 2, StepTrace(), **options)
sys.stderr.isatty = lambda: True
for _ in range(2):
    with progress("texts", total=1) as bar:
        out = llm.generate(random_prompts((5,)), SamplingParams(temperature=0, max_tokens=4))[0]
        bar.advance()
    assert len(out.token_ids) == 4, out
assert not LEFT_OUT & {name.partition(".")[0] for name in sys.modules}

import pytest

raise SystemExit(
    pytest.main(["-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider", "tests"])
)
"""


def test_engine_and_gpu_tests_need_few_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_BARE_HOST],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("rich is not installed: no progress bars") == 1
    # Nothing is left out because its module could not be seen to have GPU tests.
    marked = re.compile(r"\bmark\.gpu\b")
    files = {p.name for p in (ROOT / "tests").glob("test_*.py") if marked.search(p.read_text())}
    collected = set(re.findall(r"^tests/(\w+\.py): [1-9]", done.stdout, re.MULTILINE))
    assert collected == files
