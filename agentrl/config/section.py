"""Base class of a recipe's sections."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
