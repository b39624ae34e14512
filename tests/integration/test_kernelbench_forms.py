"""The function with the signature of KernelBench's."""

import judge_fixtures as corpus
import pytest
import torch

from components.core.errors import UserError
from components.judge import kernelbench
from components.judge.kernelbench import eval_kernel_against_ref

pytestmark = pytest.mark.usefixtures("no_compile_baseline")


def test_the_function_of_kernelbench_answers_with_its_fields() -> None:
    result = eval_kernel_against_ref(
        corpus.CODE, corpus.TORCH_HONEST, measure_performance=True, num_perf_trials=100
    )
    assert result is not None and result.compiled and result.correctness, result
    assert result.runtime > 0 and result.ref_runtime > 0
    assert result.runtime_stats["min"] <= result.runtime <= result.runtime_stats["max"]
    verdict = result.metadata["verdict"]
    assert "seeds" not in verdict["evidence"] and verdict["evidence"]["labels"]["weights"] == "seed"
    wrong = eval_kernel_against_ref(corpus.CODE, corpus.TORCH_WRONG)
    assert wrong is not None and wrong.compiled and not wrong.correctness
    assert wrong.metadata["correctness_issue"] == "max_error:given" and wrong.runtime == -1
    broken = eval_kernel_against_ref(corpus.CODE, "class ModelNew:")
    assert (
        broken is not None
        and not broken.compiled
        and "expected an indented block" in broken.metadata["compilation_error"]
    )
    kernelbench._judge("cpu").bench_cache.close()


def test_what_the_function_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"^backend: "):
        eval_kernel_against_ref(corpus.CODE, corpus.TORCH_HONEST, backend="triton")
    with pytest.raises(UserError, match=r"^precision: "):
        eval_kernel_against_ref(corpus.CODE, corpus.TORCH_HONEST, precision=torch.float16)
    with pytest.raises(UserError, match=r"original_model_src: .*get_inputs"):
        eval_kernel_against_ref("class Model: pass", corpus.TORCH_HONEST)
