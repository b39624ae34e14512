"""No description that a task's source can send makes the judge raise anything but its documented errors."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.core.config import resolve
from components.core.errors import TaskTooLarge
from components.judge.memory_plan import MemoryBudget, plan_layout
from components.judge.task_description import Description
from components.judge.task_layout import Sizing

PLAIN: dict[str, Any] = {
    "init_inputs": [],
    "inputs": [[[256, 1024], "float32"], None],
    "scalars": [None, [3]],
    "outputs": [[[256, 1024], "float32"]],
    "state": [["scale", [1024], "float32"]],
    "parameters": ["scale"],
    "seconds": 0.001,
    "peak_bytes": 0,
    "operations": 0,
}
BUDGETS = (MemoryBudget(0, 0, 1 << 40), MemoryBudget(80 << 30, 0, 1 << 40))
PARAMS = resolve("ci").params

numbers = st.integers() | st.sampled_from([-1, 0, 1 << 24, 1 << 39, 1 << 40, 1 << 63, 10**400]) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
shapes = st.lists(st.integers(0, 1 << 40) | st.integers(0, 64), max_size=17)
specs = st.tuples(shapes, st.sampled_from(["float32", "float64", "int8", "bool", "complex64", "float8", ""]))
fields = {
    "inputs": st.lists(st.none() | specs, max_size=6),
    "outputs": st.lists(specs, max_size=6),
    "state": st.lists(st.tuples(st.text(max_size=3), shapes, st.just("float32")), max_size=4),
    "seconds": st.floats(),
    "peak_bytes": numbers,
    "operations": numbers,
}


def take(reply: bytes) -> None:
    """Do what the judge does with a description, up to the layout and the messages to further runners."""
    try:
        description = Description.model_validate_json(reply)
    except ValidationError:
        return
    assert not math.isnan(description.seconds)
    assert len(description.inputs) == len(description.scalars)
    state = [(shape, dtype) for _, shape, dtype in description.state]
    forms = [*filter(None, description.inputs), *description.outputs, *state]
    for shape, dtype in forms:
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    for budget in BUDGETS:
        try:
            layout = plan_layout(description, PARAMS, Sizing(), budget)
        except TaskTooLarge:
            continue
        assert min(layout.calls, layout.capacity, layout.input_sets) >= 1
        assert layout.call_bytes < 1 << 60
        json.dumps([layout.header(1, {}), description.init_inputs])


@given(st.binary(max_size=200))
def test_bytes_are_refused(reply: bytes) -> None:
    take(reply)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(PLAIN, values)))
def test_any_value_of_a_field_is_taken_or_refused(changed: dict[str, Any]) -> None:
    take(json.dumps(PLAIN | changed).encode())


@given(st.fixed_dictionaries({}, optional=fields))
def test_any_form_of_the_tensors_is_taken_or_refused(changed: dict[str, Any]) -> None:
    take(json.dumps(PLAIN | changed).encode())


@pytest.mark.parametrize(
    "reply",
    [
        b"[" * 900_000,
        b'{"init_inputs": ' + b"[" * 150 + b"]" * 150 + b"}",
        json.dumps(PLAIN).encode().replace(b"[3]", b"[" + b"9" * 5000 + b"]"),
        json.dumps(PLAIN).encode().replace(b"[3]", b"[" * 150 + b"]" * 150),
        json.dumps(PLAIN).encode().replace(b"0.001", b"NaN"),
        json.dumps(PLAIN).encode().replace(b'"peak_bytes": 0', b'"peak_bytes": ' + b"9" * 400),
        json.dumps(PLAIN | {"inputs": [[[1 << 39, 1 << 39, 0], "float32"], None]}).encode(),
        json.dumps(PLAIN | {"scalars": [None]}).encode(),
    ],
    ids=["deep", "nested", "digits", "nested_scalar", "nan", "peak", "empty_and_huge", "lengths"],
)
def test_an_extreme_description_is_taken_or_refused(reply: bytes) -> None:
    take(reply)
