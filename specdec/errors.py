"""Errors a user can cause or meet: each says what was given, what is allowed, how to fix it."""


class SpecdecError(Exception):
    """Base of every error that is shown as one sentence, without a traceback."""


class ConfigError(SpecdecError, ValueError):
    """A key, value or combination that is not allowed; raised before any model loads."""


class UnsupportedError(SpecdecError):
    """A combination that is understood and refused, with the reason."""


class CapacityError(SpecdecError):
    """Too little memory, rows or context; states what was asked and what there is."""


class WeightsError(SpecdecError):
    """A weight file that is missing, damaged, of the wrong shape or of a refused format."""
