"""Configuration shared by verifiers without parameters."""

from dataclasses import dataclass


@dataclass
class VerifierConfig:
    """Base of a verifier's configuration; `name` selects it."""

    name: str = "rejection"
