"""Definitions of FlashInfer-Bench and SOL-ExecBench as kernel tasks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from components.cli.main import app
from components.core.config import resolve
from components.core.errors import UserError
from components.core.workloads import workloads_of
from components.evaluation.definitions import convert
from components.evaluation.suites import load_suite

NORM: dict[str, Any] = {
    "name": "rms.norm_h8",
    "description": "A norm by 'root mean square', and \"quoted\".",
    "axes": {
        "width": {"type": "expr", "expression": "hidden // 2"},
        "rows": {"type": "var"},
        "hidden": {"type": "const", "value": 8},
    },
    "inputs": {
        "x": {"shape": ["rows", "width"], "dtype": "float16"},
        "index": {"shape": ["rows"], "dtype": "int32"},
        "mask": {"shape": ["rows"], "dtype": "bool"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float16"}},
    "reference": (
        "import torch\n\ndef run(x, index, mask, eps):\n    return x * mask[:, None] + eps + index[0]\n"
    ),
}
CUSTOM: dict[str, Any] = {
    "name": "custom",
    "axes": {"n": {"type": "var"}},
    "custom_inputs_entrypoint": "get_inputs",
    "inputs": {"a": {"shape": ["n"], "dtype": "float32"}, "scale": {"shape": None, "dtype": "float32"}},
    "outputs": {name: {"shape": ["n"], "dtype": "float32"} for name in ("twice", "half")},
    "reference": (
        "from __future__ import annotations\nimport torch\n\nclass Model:\n    factor = 2\n\n"
        "def get_inputs(axes_and_scalars, device):\n"
        "    return {'scale': 3.0, 'a': torch.ones(axes_and_scalars['n'], device=device)}\n\n"
        "def run(a, scale):\n    return {'half': a / Model.factor, 'twice': a * Model.factor * scale}\n"
    ),
}


def workload(axes: dict[str, int], **inputs: Any) -> dict[str, Any]:
    return {"uuid": "0", "axes": axes, "inputs": inputs}


RANDOM = {"type": "random"}
NORM_WORKLOADS = [
    workload({"rows": rows}, x=RANDOM, index=RANDOM, mask=RANDOM, eps={"type": "scalar", "value": 0.5})
    for rows in (*range(20, 0, -1), 7)
]
CUSTOM_WORKLOADS = [workload({"n": n}, a={"type": "custom"}, scale={"type": "custom"}) for n in (4, 2)]


def problem(folder: Path, definition: dict[str, Any], workloads: list[dict[str, Any]]) -> None:
    """Write a problem as SOL-ExecBench does."""
    folder.mkdir(parents=True)
    (folder / "definition.json").write_text(json.dumps(definition))
    (folder / "workload.jsonl").write_text("\n".join(map(json.dumps, workloads)))


def executed(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "task"}
    exec(code, names)
    return names


def test_a_definition_becomes_a_task_with_spread_workloads(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out"
    for folder in ("definitions/norm", "workloads/norm"):
        (trace / folder).mkdir(parents=True)
    (trace / "definitions/norm/rms.json").write_text(json.dumps(NORM))
    file = {"type": "safetensors", "path": "x.safetensors", "tensor_key": "x"}
    lines = [*NORM_WORKLOADS, workload({"rows": 99}, x=file, eps={"type": "scalar", "value": 0.5})]
    traces = [{"definition": NORM["name"], "workload": line, "solution": None} for line in lines]
    (trace / "workloads/norm/rms.jsonl").write_text("\n".join(map(json.dumps, traces)) + "\n")
    converted = convert(trace, out)
    assert converted.files == [out / "rms.norm_h8.py"] and not converted.left_out
    code = converted.files[0].read_text()
    calls = [found.call for found in workloads_of(code, "task")]
    assert calls == [f"get_inputs({rows}, 0.5)" for rows in (1, 4, 6, 9, 12, 15, 17, 20)]
    task = executed(workloads_of(code, "task")[1].code)
    x, index, mask, eps = task["get_inputs"]()
    assert (x.shape, x.dtype) == ((4, 4), torch.float16)
    assert (index.shape, index.dtype, mask.dtype, eps) == ((4,), torch.int32, torch.bool, 0.5)
    model = task["Model"](*task["get_init_inputs"]())
    assert torch.equal(model(x, index, mask, eps), x * mask[:, None] + 0.5 + index[0])
    assert model.__doc__ == NORM["description"]
    params = resolve("smoke", (f"evaluation.suite={out}", "evaluation.dtype=float32")).params
    assert [one.name for one in load_suite(params, tmp_path)] == ["rms.norm_h8"]


def test_a_source_may_make_its_inputs_and_use_a_tasks_names(tmp_path: Path) -> None:
    problem(tmp_path / "in/L1/custom", CUSTOM, CUSTOM_WORKLOADS)
    code = convert(tmp_path / "in", tmp_path / "out").files[0].read_text()
    first, last = workloads_of(code, "task")
    assert (first.call, last.call) == ("get_inputs(2)", "get_inputs(4)")
    task = executed(last.code)
    inputs = task["get_inputs"]()
    twice, half = task["Model"]()(*inputs)
    assert inputs[1] == 3.0 and torch.equal(twice, torch.full([4], 6.0))
    assert torch.equal(half, torch.full([4], 0.5))


@pytest.mark.parametrize(
    ("changes", "workloads", "reason"),
    [
        (
            {"inputs": {"x": {"shape": ["rows"], "dtype": "float8_e4m3fn"}}},
            NORM_WORKLOADS,
            "dtype float8_e4m3fn",
        ),
        ({"outputs": {"y": {"shape": None, "dtype": "float32"}}}, NORM_WORKLOADS, "an output is a number"),
        ({"reference": "def walk(x): ..."}, NORM_WORKLOADS, "its source has no function run"),
        ({"reference": "def run(x:"}, NORM_WORKLOADS, "not valid Python"),
        ({"name": "../norm"}, NORM_WORKLOADS, "no name of a file"),
        ({"axes": {"a b": {"type": "var"}}}, NORM_WORKLOADS, "'a b' is no name in Python"),
        ({"axes": {"rows": {"type": "free"}}}, NORM_WORKLOADS, "axes.rows.type"),
        ({}, [workload({"rows": 1}, eps=RANDOM)], "none of its 1 workloads"),
        ({}, [{"axes": {"rows": 1}}], "workload.jsonl:1: inputs"),
    ],
)
def test_what_does_not_fit_is_left_out_with_the_reason(
    changes: dict[str, Any], workloads: list[dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    problem(tmp_path / "in/bad", NORM | changes, workloads)
    problem(tmp_path / "in/good", CUSTOM, CUSTOM_WORKLOADS)
    converted = convert(tmp_path / "in", tmp_path / "out")
    assert [file.name for file in converted.files] == ["custom.py"]
    assert list(converted.left_out) == ["bad/definition.json"]
    assert reason in converted.left_out["bad/definition.json"]


def test_a_definition_that_is_not_utf_8_is_left_out(tmp_path: Path) -> None:
    problem(tmp_path / "in/bad", NORM, NORM_WORKLOADS)
    problem(tmp_path / "in/good", CUSTOM, CUSTOM_WORKLOADS)
    (tmp_path / "in/bad/definition.json").write_bytes(b"\xff")
    assert "can't decode" in convert(tmp_path / "in", tmp_path / "out").left_out["bad/definition.json"]


def test_a_trace_may_have_line_separators_in_its_texts(tmp_path: Path) -> None:
    problem(tmp_path / "problem", NORM, [])
    trace = {"workload": NORM_WORKLOADS[0], "log": "one\u2028two\x85three"}
    lines = json.dumps(trace, ensure_ascii=False) + "\n"
    (tmp_path / "problem" / "workload.jsonl").write_text(lines)
    assert not convert(tmp_path, tmp_path / "out").left_out


def test_two_definitions_of_one_name_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for name in ("one", "other"):
        problem(tmp_path / "in" / name, CUSTOM, CUSTOM_WORKLOADS)
    with pytest.raises(UserError, match=r"other/definition\.json: has the name custom, .*in/one/definition"):
        convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_definition_that_fits_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="there is none"):
        convert(tmp_path / "in", tmp_path / "out")
    problem(tmp_path / "in/bad", NORM, [])
    (tmp_path / "in/bad/workload.jsonl").unlink()
    found = CliRunner().invoke(
        app, ["data", "convert", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--json"]
    )
    assert isinstance(found.exception, UserError) and not (tmp_path / "out").exists()
    assert "workload.jsonl is missing" in str(found.exception)
