"""The rule-based kernel writer: right kernels are right, wrong ones wrong, episodes look real."""

import collections
import itertools
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_bench import WORKDIR, build, call, reference

from components.bootstrap.chain_parser import PATTERNS, read_chain
from components.bootstrap.demonstrations import (
    DONE,
    MEASURE,
    STYLES,
    SUFFIX,
    make_demonstration,
    mutate,
    write_kernel,
)
from components.core.config import resolve
from components.core.task import KernelTask
from components.policy.prompts import IN_TURNS
from components.synthesis.compose import compose_tasks, every_operator_matters, write_source
from components.synthesis.core_operators import BY_NAME, CORE_OPERATORS

PARAMS = resolve("smoke").params


def small(task: KernelTask) -> str:
    """The task's source on 24 rows, so that the reference is quick."""
    return re.sub(r"randn\(\d+, ", "randn(24, ", task.code)


def chosen_tasks() -> list[str]:
    """Every operator alone, then composed chains; row operators also before and after each other."""
    rng = random.Random(5)
    alone = [
        ((seed.name, tuple(rng.choice(palette) for palette in seed.constants)),) for seed in CORE_OPERATORS
    ]
    rows = [
        (("layer_norm", ()), ("softmax", ())),
        (("rms_norm", ()), ("logsumexp", ())),
        (("softmax", ()), ("layer_norm", ()), ("amax", ())),
    ]
    sources = [write_source(steps, 24, 512) for steps in [*alone, *rows]]
    return sources + [small(task) for task in itertools.islice(compose_tasks(11, PARAMS.data), 24)]


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error relative to the output's scale; infinite for values that are not finite."""
    worst = ((out.double() - exact).abs().max() / exact.abs().max()).item()
    return worst if worst == worst else float("inf")


def test_every_style_computes_what_torch_computes(tmp_path: Path) -> None:
    sources = chosen_tasks()
    kernels = [(code, style) for code in sources for style in STYLES["cpu"]]
    texts = [write_kernel(code, style, "cpu") for code, style in kernels]
    assert None not in texts
    library = build([text for text in texts if text], tmp_path)
    for index, (code, style) in enumerate(kernels):
        arguments, expected, exact = reference(code)
        out = torch.full_like(expected, float("nan"))
        call(library, index, [*arguments, out])
        assert error(out, exact) < 2e-6, (style, error(out, exact), code)


def test_mutated_kernels_do_not_compute_it(tmp_path: Path) -> None:
    rng = random.Random(2)
    sources = [small(task) for task in itertools.islice(compose_tasks(21, PARAMS.data), 12)]
    wrong = 0
    kept: list[tuple[str, str]] = []
    for code in sources:
        right = write_kernel(code, rng.choice(STYLES["cpu"]), "cpu")
        assert right is not None
        kernel = mutate(right, rng)
        assert kernel != right
        try:
            build([kernel], tmp_path / str(len(kept) + wrong))
        except subprocess.CalledProcessError:
            wrong += 1
        else:
            kept.append((code, kernel))
    assert wrong >= 1, "some mistakes do not compile"
    library = build([kernel for _, kernel in kept], tmp_path)
    for index, (code, _) in enumerate(kept):
        arguments, expected, exact = reference(code)
        out = torch.full_like(expected, float("nan"))
        call(library, index, [*arguments, out])
        wrong += error(out, exact) > 1e-4
    assert wrong >= 0.9 * len(sources)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_kernels_compile(tmp_path: Path) -> None:
    text = '#include "binding_registry.h"\n#include "vec.h"\n#include <cmath>\n'
    for index, task in enumerate(itertools.islice(compose_tasks(31, PARAMS.data), 10)):
        for style in STYLES["cuda"]:
            kernel = write_kernel(task.code, style, "cuda")
            assert kernel is not None
            body = "\n".join(line for line in kernel.splitlines() if not line.startswith("#include"))
            text += f"namespace {style}{index} {{\n{body}\n}}\n"
    (tmp_path / "all.cu").write_text(text)
    subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90", "-I", str(WORKDIR), "-c", "all.cu", "-o", "all.o"],
        cwd=tmp_path,
        check=True,
    )


def test_the_writer_knows_every_operator_of_the_composer() -> None:
    assert PATTERNS.keys() == BY_NAME.keys()
    for task in itertools.islice(compose_tasks(3, PARAMS.data), 100):
        chain = read_chain(task.code)
        assert chain is not None
        assert tuple(step.name for step in chain.steps) == task.ops


def test_foreign_sources_are_left_alone() -> None:
    code = write_source((("relu", ()),), 16, 256)
    assert write_kernel(code.replace("F.relu(x)", "torch.cumsum(x, 0)"), "simd", "cpu") is None
    assert write_kernel(code.replace("return x", "return x + x"), "simd", "cpu") is None
    assert write_kernel("print(", "simd", "cpu") is None


def test_a_kernel_does_not_depend_on_shapes() -> None:
    steps = (("gelu", ()), ("softmax", ()))
    assert write_kernel(write_source(steps, 64, 256), "simd", "cpu") == write_kernel(
        write_source(steps, 128, 4096), "simd", "cpu"
    )


def test_parameters_come_in_state_dict_order() -> None:
    code = write_source((("layer_norm", ()), ("scale", ()), ("rms_norm", ()), ("shift", ())), 16, 256)
    namespace: dict = {}
    exec(code, namespace)
    names = {"layer_norm.weight": "weight", "layer_norm.bias": "bias", "rms_norm.weight": "gain"}
    chain = read_chain(code)
    assert chain is not None
    assert chain.tensors[1:-1] == tuple(names.get(key, key) for key in namespace["Model"]().state_dict())


def test_demonstrations_are_mixed_as_asked() -> None:
    rng = random.Random(0)
    tasks = list(itertools.islice(compose_tasks(4, PARAMS.data), 150))
    coldstart = PARAMS.coldstart
    single: collections.Counter[str] = collections.Counter()
    multi = 0
    second: list[bool] = []
    for task in tasks * 8:
        messages = make_demonstration(task, rng, coldstart, "cpu")
        several = len(messages) > 2
        assert messages[0] == {"role": "user", "content": task.code + (IN_TURNS if several else "")}
        first = messages[1]["content"]
        kernel = first.split("<parameter=content>\n")[1].split("</parameter>")[0]
        if not several:
            assert MEASURE not in first
            styles = [style for style in STYLES["cpu"] if write_kernel(task.code, style, "cpu") == kernel]
            single[styles[0] if styles else "wrong"] += 1
        else:
            multi += 1
            assert [message["role"] for message in messages[1:]] == ["assistant", "tool"] * (
                (len(messages) - 2) // 2
            ) + ["assistant"]
            assert messages[-1]["content"] == DONE
            second += [
                write_kernel(task.code, "simd", "cpu") in message["content"] for message in messages[3:-1:2]
            ]
            assert all(
                MEASURE in message["content"] for message in messages[1:-1] if message["role"] == "assistant"
            )
    total = sum(single.values())
    assert abs(multi / len(tasks) / 8 - coldstart.multi_turn_share) < 0.05
    assert abs(single["wrong"] / total - coldstart.wrong_share) < 0.05
    assert abs(single["simd"] / total - coldstart.fast_share * (1 - coldstart.wrong_share)) < 0.05
    assert (
        abs(sum(second) / len(second) - coldstart.second_fast_share * (1 - coldstart.wrong_share / 3)) < 0.08
    )
    assert single["passes"] > 0.2 * total and single["fused"] > 0.2 * total


def test_observations_name_the_file_and_the_milestone() -> None:
    rng = random.Random(1)
    seen = set()
    for task in itertools.islice(compose_tasks(6, PARAMS.data), 200):
        for message in make_demonstration(task, rng, PARAMS.coldstart, "cuda"):
            if message["role"] == "tool":
                lines = message["content"].splitlines()
                assert lines[0] == f"Written kernels/forward.{SUFFIX['cuda']}."
                seen.add(lines[1].split(":")[0] if "PASS" not in lines[1] else lines[-1].split(" ", 5)[-1])
    assert {"Build failed", "[FAIL] wrong_output", "Milestone: 3 of 3."} <= {
        text.split("compile. ")[-1] for text in seen
    }


def test_chains_that_cannot_be_judged_are_not_composed() -> None:
    assert not every_operator_matters((("softmax", ()), ("sum", ())))
    assert not every_operator_matters((("square", ()), ("relu", ())))
    assert not every_operator_matters((("add_constant", ("0.5",)), ("softmax", ())))
    assert not every_operator_matters((("sum", ()), ("tanh", ()), ("tanh", ()), ("tanh", ())))
    assert every_operator_matters((("gelu", ()), ("mul_constant", ("0.5",))))
