"""Prompts to token ids: a string, token ids, or chat messages, checked before they are queued."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.errors import ConfigError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_FORMS = "give a string, a list of token ids, or a list of chat messages with 'role' and 'content'"


class PromptReader:
    """Tokenises and checks prompts for one target.

    Args:
        tokenizer: of the target; None accepts token ids only.
        vocab_size: V.
        max_model_len: tokens a request may hold; a prompt has to leave room for one more.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, where it has one, and its token ids.

        A string is tokenised as it is; chat messages go through the chat template.

        Raises:
            ConfigError: the prompt is empty, too long, of a wrong type, or has a foreign token id.
        """
        text, token_ids = self._tokenize(prompt)
        if not token_ids:
            raise ConfigError("the prompt is empty; give at least one token")
        limit = self._max_model_len - 1
        if len(token_ids) > limit:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens, at most {limit} fit with "
                f"max_model_len={self._max_model_len}; shorten it or raise max_model_len"
            )
        foreign = [t for t in token_ids if not 0 <= t < self._vocab_size]
        if foreign:
            raise ConfigError(
                f"token id {foreign[0]} is not in the vocabulary [0, {self._vocab_size})"
            )
        return text, token_ids

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
            raise ConfigError(f"prompt={prompt!r} is not allowed; {_FORMS}")
        if not isinstance(prompt, str) and all(isinstance(p, int | np.integer) for p in prompt):
            return None, [int(p) for p in prompt]  # pyright: ignore[reportArgumentType]
        if self._tokenizer is None:
            raise ConfigError("this target has no tokenizer; give prompts as lists of token ids")
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens=True)
        for message in prompt:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ConfigError(f"prompt holds {message!r}; {_FORMS}")
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError("the target's tokenizer has no chat template; give a string")
        from jinja2 import TemplateError  # here: nothing else needs it

        try:
            text = self._tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise ConfigError(
                f"the target's chat template refuses the messages: {error}"
            ) from error
        return text, self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is no valid text: {error}") from error
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
