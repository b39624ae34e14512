"""Base class of the records that cross module borders or are stored as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable record that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
