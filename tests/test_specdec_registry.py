"""The registry: built-in names, decorator, entry points, dotted paths, and what is refused."""

import importlib.metadata
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafters.base import DrafterBase, DrafterConfig
from drafters.ngram import NgramConfig, NgramDrafter
from specdec._layout import check_layout
from specdec.errors import ConfigError
from specdec.protocols import API_VERSION, DraftContext, Drafter
from specdec.registry import build_config, known_names, register_drafter, resolve

PLUGIN = """
from dataclasses import dataclass
from drafters.base import DrafterBase, DrafterConfig
from specdec import register_drafter

@dataclass
class EchoConfig(DrafterConfig):
    name: str = "{name}"
    times: int = 2

@register_drafter("{name}", EchoConfig)
class EchoDrafter(DrafterBase):
    def propose(self, ctx):
        pass
"""


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_builtin_name_gives_class_and_config() -> None:
    entry, config = build_config("drafter", {"name": "ngram", "max_n": 4})
    assert entry.cls is NgramDrafter
    assert config == NgramConfig(max_n=4)


def test_every_builtin_name_resolves_to_a_drafter() -> None:
    for name in ("none", "ngram", "oracle", "draft_model"):
        assert name in known_names("drafter")
        assert isinstance(
            resolve("drafter", name).cls.__new__(resolve("drafter", name).cls), Drafter
        )


def test_config_object_is_taken_as_it_is() -> None:
    config = NgramConfig(min_n=2, max_n=5)
    assert build_config("drafter", config)[1] is config


def test_dotted_path_imports_the_module(plugin_folder: Path) -> None:
    (plugin_folder / "echo_by_path.py").write_text(PLUGIN.format(name="echo_by_path"))
    entry, config = build_config("drafter", {"name": "echo_by_path:EchoDrafter", "times": 3})
    assert entry.cls.__name__ == "EchoDrafter"
    assert config.times == 3


def test_dotted_path_takes_the_class_of_that_very_module(plugin_folder: Path) -> None:
    source = (Path(__file__).parent.parent / "drafters" / "ngram.py").read_text()
    (plugin_folder / "my_copy.py").write_text(source.replace('"ngram"', '"my_ngram"'))
    resolve("drafter", "ngram")
    assert resolve("drafter", "my_copy:NgramDrafter").cls.__module__ == "my_copy"


def test_builtin_cannot_be_replaced_by_a_class_of_its_name(plugin_folder: Path) -> None:
    source = (Path(__file__).parent.parent / "drafters" / "ngram.py").read_text()
    (plugin_folder / "my_thief.py").write_text(source)
    with pytest.raises(ConfigError, match=r"'ngram' is taken by a class of drafters\.ngram"):
        resolve("drafter", "my_thief:NgramDrafter")


def test_entry_point_is_found_by_name(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin_folder / "echo_by_entry.py").write_text(PLUGIN.format(name="echo_by_entry"))
    point = importlib.metadata.EntryPoint(
        "echo_by_entry", "echo_by_entry:EchoDrafter", "specdec.drafters"
    )
    monkeypatch.setattr("specdec.registry.entry_points", lambda group: [point])
    assert "echo_by_entry" in known_names("drafter")
    assert resolve("drafter", "echo_by_entry").cls.__name__ == "EchoDrafter"


def test_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'ngram'.*known: .*draft_model.*none"):
        resolve("drafter", "ngrm")


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_m.*did you mean 'max_n'"):
        build_config("drafter", {"name": "ngram", "max_m": 3})


def test_a_module_without_the_class_says_what_it_registers(plugin_folder: Path) -> None:
    source = "from drafters.ngram import NgramDrafter\n" + PLUGIN.format(name="echo_lacking")
    source += "\n\nclass Plain: pass\n"
    (plugin_folder / "echo_lacking.py").write_text(source)
    (plugin_folder / "echo_empty.py").write_text("")
    for name, words in (
        ("echo_lacking:Nope", "echo_lacking has no drafter Nope; it registers EchoDrafter$"),
        ("echo_lacking:EchDrafter", "did you mean 'EchoDrafter'"),
        ("echo_lacking:Plain", r"Plain of module echo_lacking is not registered.*@register_draft"),
        ("echo_empty:Nope", "echo_empty has no drafter Nope, and registers none; decorate"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve("drafter", name)


def test_missing_module_of_a_path_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot import 'no_such_module_here'"):
        resolve("drafter", "no_such_module_here:Drafter")


def test_other_api_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"version {API_VERSION + 1}, this is {API_VERSION}"):
        register_drafter("old", DrafterConfig, api_version=API_VERSION + 1)


def test_taken_name_is_refused() -> None:
    @dataclass
    class OtherConfig(DrafterConfig):
        name: str = "ngram"

    class Other(DrafterBase):
        def propose(self, ctx: DraftContext) -> None: ...

    with pytest.raises(ConfigError, match=r"'ngram' is taken by a class of drafters\.ngram"):
        register_drafter("ngram", OtherConfig)(Other)


def test_import_of_the_public_surface_loads_nothing_heavy() -> None:
    code = """
        import sys
        import specdec
        assert "torch" not in sys.modules and "transformers" not in sys.modules
        try:
            specdec.nothing_of_that_name
        except AttributeError as error:
            assert "SamplingParams" in str(error)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_foreign_package_of_our_name_is_named(plugin_folder: Path) -> None:
    intruder = plugin_folder / "foreign_sampler" / "__init__.py"
    intruder.parent.mkdir()
    intruder.write_text("")
    with pytest.raises(ImportError, match=r"'foreign_sampler' must lie beside specdec"):
        check_layout(("foreign_sampler",))
