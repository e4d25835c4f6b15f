"""The template plug-in, installed by pip from another folder, is found by name, runs, and passes.

Minutes: pip, Hydra and the whole kit, each in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.testing import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the template elsewhere and install it; returns the folder with `source` and `site`."""
    folder = tmp_path_factory.mktemp("plugin")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    template = ROOT / "examples" / "template_drafter"
    shutil.copytree(template, folder / "source", ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    target = ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *target], check=True)
    shutil.rmtree(folder / "source" / "template_drafter")  # what is found now is the installed one
    return folder


def run(folder: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a module where the plug-in is installed."""
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def save_tiny_folder(folder: Path) -> None:
    """Save a tiny model with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=256, max_position_embeddings=2048).save_pretrained(folder)


def test_an_experiment_runs_with_the_name_and_the_options_of_the_plugin(
    installed: Path, tmp_path: Path
) -> None:
    save_tiny_folder(tmp_path / "tiny")
    done = run(
        installed,
        "experiments.run",
        "drafter=bigram",
        "drafter.min_count=2",
        "debug=default",
        f"target.name={tmp_path / 'tiny'}",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    assert "bigram K=4" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()
    assert "Deprecat" not in done.stderr + done.stdout
    wrong = run(installed, "experiments.run", "drafter=bigram", "drafter.min_cont=2")
    assert wrong.returncode == 1
    assert "did you mean 'min_count'?" in wrong.stderr


def test_its_own_tests_pass_from_its_own_folder(installed: Path) -> None:
    options = ["-q", "-p", "specdec.testing.plugin", "--rootdir", str(installed / "source")]
    done = run(installed, "pytest", "tests", *options, cwd=installed / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


def test_the_command_and_the_suite_check_it_by_name(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "specdec.testing", "bigram", "min_count=2", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
    options = ["-q", "-p", "specdec.testing.plugin", "-m", "not slow", "-k", "bounds or limits"]
    suite = ["--pyargs", "specdec.testing.suite", "--drafter", "bigram"]
    done = run(installed, "pytest", *suite, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
