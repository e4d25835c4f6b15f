"""Drafters that come with the project, trained by `experiments.train` for the embedded target.

    drafters/trained/<target>/<drafter>/    what the drafter loads, and a model card

`SHIPPED` as the path of a drafter takes the one that was trained for the run's target.
"""

from pathlib import Path

from specdec.errors import ConfigError
from specdec.protocols import TargetView

SHIPPED = "shipped"
_FOLDER = Path(__file__).parent / "trained"
# What a target must be for the files of a folder: model type, layers, hidden size, vocabulary.
_TARGETS = {"smollm2-135m-instruct": ("llama", 30, 576, 49152)}


def shipped_folder(drafter: str, target: TargetView, option: str) -> str:
    """Return the folder of the drafter that was trained for a target.

    Args:
        drafter: its name.
        target: of the run.
        option: of the drafter, which names a folder.

    Raises:
        ConfigError: nothing was trained for this target.
    """
    model = target.model
    own = (model.config.model_type, len(model.layers), target.hidden_size, target.vocab_size)
    for name, sizes in _TARGETS.items():
        if sizes == own and (_FOLDER / name / drafter).is_dir():
            return str(_FOLDER / name / drafter)
    raise ConfigError(
        f"no {drafter} comes with the project for this target ({own[0]}, {own[1]} layers, hidden "
        f"size {own[2]}, {own[3]} tokens), only for {', '.join(_TARGETS)}; give "
        f"{option}=<folder or hub id> of one that was trained for it, or train one: "
        f"python -m experiments.train fit={drafter}"
    )
