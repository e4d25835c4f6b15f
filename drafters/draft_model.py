"""A small causal language model drafts K tokens, one pass each.

Over the target's vocabulary, or, with `cross_vocab`, over the tokens that two vocabularies share:
the model reads the target's tokens through a map (`runner.vocabulary`), and the law that it drafts
from is renormalized over the tokens that the target has too.

A folder may leave out embedding and output head, and take the target's, or the head's rows of a
part of the vocabulary (`runner.shared_model`): it then holds a few layers alone, and its head costs
less.

Source: Leviathan et al. 2023; Chen et al. 2023. Two vocabularies: Timor et al. 2025, token-level
intersection.
"""

from dataclasses import dataclass

from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.draft_sampling import DraftSamplingConfig
from drafters.shipped import SHIPPED, shipped_folder
from runner.loader import check_same_vocabulary, load_model, load_tokenizer
from runner.shared_model import load_shared_model, shares_embedding
from runner.vocabulary import VocabularyMap, map_vocabulary
from runner.weights import EMBEDDED_NAME, check_folder
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, TargetView
from specdec.registry import register_drafter


@dataclass
class DraftModelConfig(DraftSamplingConfig):
    """Parameters of a draft model, beside how its drafts are chosen.

    Args:
        model: name, hub id or folder of a causal model; "shipped" = the one that comes with the
            project for the target; "target" drafts with the target itself.
        cross_vocab: take a model with another tokenizer, and draft what both vocabularies have.
    """

    name: str = "draft_model"
    model: str = SHIPPED
    cross_vocab: bool = False

    def __post_init__(self) -> None:
        """Check the choices, and a local folder."""
        if not self.model:
            raise ConfigError(
                "drafter draft_model needs model=<hub id, folder, 'shipped' or 'target'>, got none"
            )
        if self.model not in ("target", SHIPPED, EMBEDDED_NAME):
            check_folder(self.model, "draft model")
        super().__post_init__()
        if self.cross_vocab and self.model in ("target", SHIPPED):
            raise ConfigError(
                f"drafter draft_model: cross_vocab has no effect with model={self.model!r}, whose "
                f"vocabulary is the same; leave it out"
            )


@register_drafter("draft_model", DraftModelConfig)
class DraftModelDrafter(AutoregressiveDrafter):
    """Any causal language model over the target's vocabulary, or over what it shares with it."""

    config: DraftModelConfig
    vocabulary_map: VocabularyMap | None = None  # where the model has another tokenizer

    def load(self, target: TargetView) -> None:
        """Load the model; check that its tokenizer is the target's, or map one to the other.

        Raises:
            ConfigError: the tokenizers differ and cross_vocab is off, or share too little; or the
                model shares the embedding of another target.
        """
        name = self.config.model
        if name == SHIPPED:
            name = shipped_folder(self.config.name, target, "model")
        if name == "target":
            self.use_model(target.model, target)
            return
        if shares_embedding(name):
            model, self.target_ids = load_shared_model(name, target.model)
            self.use_model(model, target)
            return
        model = load_model(name, target.dtype, target.device)
        if self.config.cross_vocab:
            if target.tokenizer is None:
                raise ConfigError(
                    "drafter draft_model: cross_vocab maps the tokens of two tokenizers, and this "
                    "target has none; give a target with a tokenizer"
                )
            self.vocabulary_map = map_vocabulary(
                target.tokenizer,
                load_tokenizer(name),
                (target.vocab_size, model.vocab_size),
                target.device,
            )
        elif target.tokenizer is not None:
            check_same_vocabulary(target.tokenizer, load_tokenizer(name), name)
        self.use_model(model, target)

    def num_logits(self, target: TargetView) -> int:
        """Return the target's vocabulary where there is a map, else what the two share."""
        return target.vocab_size if self.vocabulary_map else super().num_logits(target)

    @property
    def drafts_all_outputs(self) -> bool:
        """Return whether every output of the model's head may be drafted, under its own id."""
        return self.vocabulary_map is None and super().drafts_all_outputs

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's ids, -inf where the model has no such token."""
        if self.vocabulary_map is None:
            return super().draft_logits(hidden)
        return self.vocabulary_map.target_logits(self.model.compute_logits(hidden))

    def choose(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Choose draft `index`, where the output head may have a part of the vocabulary."""
        return self.sampler.choose_among(ctx, logits, index, self.target_ids)

    def model_ids(self, input_ids: Tensor) -> Tensor:
        """Return the model's ids for the target's."""
        if self.vocabulary_map is None:
            return super().model_ids(input_ids)
        return self.vocabulary_map.model_ids[input_ids]
