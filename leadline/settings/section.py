"""What every section of a recipe is."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16", "float16"]
Strings = Annotated[tuple[str, ...], Field(strict=False)]  # TOML and JSON have lists, not tuples


class Section(BaseModel):
    """A part of the config. Types are taken strictly: neither \"8\" nor true is a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
