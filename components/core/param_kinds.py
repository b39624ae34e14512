"""The kind of every parameter, `result` or `throughput`, and the values of those that change results."""

import functools
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from components.core.config import KNOWN, flatten_values
from components.core.params import Params


def _kind(key: str) -> str:
    marks = KNOWN[key].json_schema_extra
    if not marks:
        raise TypeError(
            f"components/core/params.py: {key} is not marked; make its field with result() or throughput()"
        )
    return str(marks["kind"])


# Kind of every parameter by dotted key; sections have none.
KINDS = {
    key: _kind(key)
    for key, field in KNOWN.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
}


@functools.cache
def _result_keys(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the dotted keys of the parameters that change results and are in or below `names`.

    `names` are dotted keys of parameters or of sections; None means all parameters.
    """
    return tuple(
        key
        for key, kind in KINDS.items()
        if kind == "result"
        and (names is None or any(key == name or key.startswith(f"{name}.") for name in names))
    )


def result_values(params: Params, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the values of the parameters that change results, by dotted key.

    `names` are the dotted keys of parameters or of sections; by default, all parameters are returned. The
    value of a mapping, such as data.operator_mix, is one value.
    """
    values = flatten_values(params.model_dump(mode="json"))
    keys = _result_keys(None if names is None else tuple(names))
    return {key: values[key] for key in keys if key in values}
