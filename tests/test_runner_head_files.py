"""Heads by hub id, without a network: what is asked of the hub, and what its refusal becomes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.head_files import read_head, write_head
from specdec.errors import WeightsError


def test_a_hub_id_is_fetched_without_its_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_head(tmp_path, {"a": 1}, {"w": torch.arange(3.0)})
    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    config, tensors = read_head("someone/a-head.eagle3")
    assert config == {"a": 1}
    assert torch.equal(tensors["w"], torch.arange(3.0))
    assert asked == [("someone/a-head.eagle3", ["config.json", "*.safetensors"])]


def test_what_the_hub_does_not_give_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no way\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(WeightsError, match=r"'a/b' is no folder here.*no way to the hub") as caught:
        read_head("a/b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./heads", "/no/such", "~/heads", "heads", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_a_folder_that_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(WeightsError, match="does not exist; give a folder"):
        read_head(name)
