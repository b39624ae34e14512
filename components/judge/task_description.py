"""What a sandboxed process tells the judge about a task: the shapes and dtypes of its tensors, and its cost.

A task is a PyTorch module that is to be made faster, with its inputs. The process runs the task's own source,
which is untrusted, so that all of its description is checked.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from components.core.records import FrozenModel

Dtype = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]
# Dtypes of the float64 outputs, by the dtype of the task's own output; others are the same.
EXACT_DTYPES: dict[Dtype, Dtype] = {
    "float32": "float64",
    "float16": "float64",
    "bfloat16": "float64",
    "complex64": "complex128",
}
MOST_ELEMENTS = 1 << 40


def _check_shape(shape: list[int]) -> list[int]:
    # Empty dimensions count as one, because the strides of the others must be numbers of 64 bits too.
    if (elements := math.prod(size or 1 for size in shape)) >= MOST_ELEMENTS:
        raise ValueError(f"a tensor has {elements} elements, more than {MOST_ELEMENTS}")
    return shape


Shape = Annotated[
    list[Annotated[int, Field(ge=0, lt=MOST_ELEMENTS)]], Field(max_length=16), AfterValidator(_check_shape)
]
TensorSpec = tuple[Shape, Dtype]


class Description(FrozenModel):
    """Validated description of a task, which a sandboxed process with the task's own source has sent.

    A task is a PyTorch module that is to be made faster, with its inputs. `init_inputs` are the arguments of
    the module's constructor. `inputs` and `scalars` both have one entry for each argument of a call. A tensor
    has its shape and dtype in `inputs` and None in `scalars`. Any other value has None in `inputs` and
    `[value]` in `scalars`. `state` has the names, shapes and dtypes of the module's state dict, and
    `parameters` has the names in it that are parameters. `outputs` has the shape and dtype of each output
    tensor of a call. `seconds` is the time of the fastest of the calls that the process timed for the
    description. `peak_bytes` is the GPU memory that the calls reserved, or 0 on cpu. `operations` are the
    floating-point operations of the products and convolutions of a call, also those in attention and in
    recurrent layers.
    """

    init_inputs: list[Any] = Field(max_length=64)
    inputs: list[TensorSpec | None] = Field(max_length=64)
    scalars: list[list[Any] | None] = Field(max_length=64)
    outputs: list[TensorSpec] = Field(min_length=1, max_length=64)
    state: list[tuple[str, Shape, Dtype]] = Field(max_length=4096)
    parameters: list[str] = Field(max_length=4096)
    seconds: float = Field(ge=0, lt=1e6)
    peak_bytes: int = Field(ge=0, lt=1 << 63)
    operations: int = Field(ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _check_entries(self) -> Self:
        if len(self.inputs) != len(self.scalars) or any(
            scalar is not None if spec else len(scalar or []) != 1
            for spec, scalar in zip(self.inputs, self.scalars, strict=True)
        ):
            raise ValueError("an argument has to be in either inputs or scalars")
        names = {name for name, _, _ in self.state}
        if len(names) < len(self.state) or not names.issuperset(self.parameters):
            raise ValueError("names in state have to be unique, and contain those in parameters")
        return self

    @property
    def evidence(self) -> dict[str, Any]:
        """Shapes and dtypes of the input and output tensors, and names in the state dict, as JSON values."""
        inputs = [spec for spec in self.inputs if spec is not None]
        return {
            "inputs": [{"shape": shape, "dtype": dtype} for shape, dtype in inputs],
            "outputs": [{"shape": shape, "dtype": dtype} for shape, dtype in self.outputs],
            "parameters": [name for name, _, _ in self.state],
        }
