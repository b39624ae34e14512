"""The base class of records that modules exchange or store as JSON."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """An immutable record that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
