"""What processors refuse, as one sentence."""

from collections.abc import Iterable

from specdec.errors import ConfigError


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that ids are in the vocabulary.

    Raises:
        ConfigError: one is not.
    """
    foreign = [i for i in token_ids if not 0 <= i < vocab_size]
    if foreign:
        raise ConfigError(
            f"{name} holds token id {foreign[0]}, which is not in the vocabulary [0, {vocab_size})"
        )


def check_count(what: str, count: int, most: int) -> None:
    """Check that the rows have room for a request's entries.

    Raises:
        ConfigError: they have not.
    """
    if count > most:
        raise ConfigError(f"{what} has {count} entries, at most {most} are allowed; give fewer")
