"""The correctness criterion: the exact answer and eager's are right, and what is far from both is wrong."""

import math

import exactness
import pytest
import torch

from components.core.params import Params
from components.judge.baselines import COMPILED_TOLERANCE
from components.judge.correctness import ReferenceOutput
from components.judge.error_measures import FLOAT32_FLOOR, smallest_limits
from components.judge.input_mixing import InputBank, InputMix
from components.judge.timed_output_check import TIMED_MULTIPLE, departures, suspicious_calls
from components.sandbox.inside.operator_modes import computing_in_float64

INF, NAN = math.inf, math.nan


def reference(single: torch.Tensor, expected: torch.Tensor, params: Params) -> ReferenceOutput:
    return ReferenceOutput(single, expected, params.sandbox, "strict-fp32")


@pytest.mark.parametrize("name", exactness.FORMS)
def test_an_exact_answer_and_eagers_are_never_wrong(
    name: str, ci_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each form is one on which exact answers were refused; twice the allowed error is refused on each."""
    monkeypatch.setattr(exactness, "FORMS", {name: exactness.FORMS[name]})
    tally = exactness.checked_forms(ci_params, calls=2, seed=torch.seed() % 2**31)
    assert tally.calls >= 12 and tally.wrong == []


def test_reductions_of_any_length_accept_exact_answers_only(ci_params: Params) -> None:
    tally = exactness.checked_reductions(ci_params, (1 << 8, 1 << 13), seed=torch.seed() % 2**31)
    assert tally.calls == 12 * 2 * 6 and tally.wrong == []


def test_a_call_that_is_not_flagged_is_within_the_stated_multiple(ci_params: Params) -> None:
    """The candidate goes as far from the exact answer as an unflagged call can, on the side of eager."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for size in torch.logspace(-9, -4.05, 60).tolist():
        expected = torch.randn(4096, dtype=torch.float64, generator=generator)
        scale = expected.abs().max().item()
        side = torch.where(torch.rand(4096, generator=generator) < 0.5, -1.0, 1.0).double()
        single = (expected + side * size * scale).float()
        exact = reference(single, expected, ci_params)
        for limit, changed in zip(smallest_limits(torch.float32), (1, 4096), strict=True):
            step = torch.zeros(4096, dtype=torch.float64)
            step[:changed] = 0.98 * (TIMED_MULTIPLE - 1) * limit * scale
            for farther in (side * step, -side * step):
                output = (single.double() + farther).float()
                if departures(output[None], single[None]).item() > 1:
                    continue
                error = (output.double() - expected).abs().max().item()
                rms = (output.double() - expected).square().mean().sqrt().item()
                worst = max(worst, error / exact.limits[0], rms / exact.limits[1])
                assert exact.mismatch(output, multiple=TIMED_MULTIPLE) is None
    assert 1.15 < worst < TIMED_MULTIPLE - 1 + 1.05 / ci_params.sandbox.error_multiple


def test_an_error_whose_square_overflows_or_vanishes_is_measured(ci_params: Params) -> None:
    for scale in (1e-36, 1e-20, 1.0, 1e20, 1e33, 3e38):
        expected = torch.linspace(-1, 1, 999, dtype=torch.float64) * scale
        exact = reference((expected * (1 + 1e-6)).float(), expected, ci_params)
        assert exact.errors[1] / scale == pytest.approx(1e-6 / math.sqrt(3), rel=0.2)
        assert exact.mismatch(expected.float()) is None
        assert exact.mismatch((expected * 0.99).float()) == "max_error"
        assert departures((expected * 0.99).float()[None], expected.float()[None]).item() > 100


def test_an_answer_too_small_to_be_represented_is_right(ci_params: Params) -> None:
    expected = torch.tensor([3.3e-45, 1e-45], dtype=torch.float64)
    assert reference(expected.float(), expected, ci_params).mismatch(expected.float()) is None


@pytest.mark.parametrize(
    ("single", "expected", "right", "wrong"),
    [
        (INF, INF, (INF,), (-INF, NAN, 1.0, 3e38)),
        (NAN, NAN, (NAN,), (INF, 0.0)),
        (INF, NAN, (INF, NAN), (-INF, 0.0)),
        (INF, 2.5, (INF, 2.5), (-INF, NAN, 2.6)),  # eager overflows on its way
        (NAN, 2.5, (NAN, 2.5), (INF, 2.6)),
        (2.5, INF, (2.5, INF), (-INF, NAN, 2.6)),
        (2.5, NAN, (2.5, NAN), (INF, 2.6)),
        (3.402823e38, 3.41e38, (3.402823e38, INF, 3.402822e38), (-INF, NAN, 3e38)),
        (INF, 1e300, (INF,), (NAN, 1e38)),
        (INF, 3.40282357e38, (INF,), (1e38,)),
    ],
)
def test_a_special_value_is_right_where_eager_or_the_exact_answer_has_it(
    single: float, expected: float, right: tuple[float, ...], wrong: tuple[float, ...], ci_params: Params
) -> None:
    rest = torch.linspace(-3, 3, 50, dtype=torch.float64)

    def output(value: float) -> torch.Tensor:
        return torch.cat([rest, torch.tensor([value], dtype=torch.float64)])

    exact = reference(output(single).float(), output(expected), ci_params)
    for value in right:
        assert exact.mismatch(output(value).float()) is None, value
    for value in wrong:
        if exact.limits[0] < 1:  # a scale of 1e38 makes an error of 0.1 too small to see
            assert exact.mismatch(output(value).float()) in ("max_error", "finite_mask"), value
        assert departures(output(value).float()[None], output(single).float()[None]).item() > 1
    rest[7] += 0.001
    if exact.limits[0] < 1:
        assert exact.mismatch(output(single).float()) == "max_error", "the others are still compared"


def test_a_value_that_nearly_overflows_may_be_finite_or_infinite(ci_params: Params) -> None:
    expected = torch.tensor([3e38, 3.40282357e38], dtype=torch.float64)
    exact = reference(expected.float(), expected, ci_params)
    assert exact.mismatch(torch.tensor([3e38, INF])) is None
    assert exact.mismatch(torch.tensor([3e38, 3.4028234e38])) is None
    assert exact.mismatch(torch.tensor([3e38, 3.3e38])) == "max_error"


def test_half_precision_allows_for_the_error_of_terms_that_overflow(ci_params: Params) -> None:
    expected = torch.tensor([[4e7, -3e7, 2151.0, 65515.0]], dtype=torch.float64)
    single = torch.tensor([[INF, -INF, 2136.0, 65504.0]], dtype=torch.float16)
    exact = reference(single, expected, ci_params)
    for right in ([INF, -INF, 2110.0, 65504.0], [INF, -INF, 2150.0, INF]):
        assert exact.mismatch(torch.tensor([right], dtype=torch.float16)) is None
    for wrong in ([INF, INF, 2150.0, INF], [INF, -INF, INF, INF], [INF, -INF, 1900.0, INF]):
        assert exact.mismatch(torch.tensor([wrong], dtype=torch.float16)) in ("max_error", "finite_mask")


def test_eager_is_right_even_beyond_the_absolute_tolerance_which_is_told(ci_params: Params) -> None:
    expected = torch.randn(1000, dtype=torch.float64)
    single = (expected + 0.01).float()
    exact = reference(single, expected, ci_params)
    assert exact.exceeds_tolerance
    assert exact.mismatch(single) is None and exact.mismatch(expected.float()) is None
    assert exact.mismatch((expected - 0.02).float()) == "max_error"
    assert not reference(expected.float(), expected, ci_params).exceeds_tolerance


def test_an_index_is_right_if_it_is_eagers_or_that_of_float64(ci_params: Params) -> None:
    single, expected = torch.tensor([3, 7, 5]), torch.tensor([3, 8, 5])
    exact = reference(single, expected, ci_params)
    assert exact.mismatch(single) is None and exact.mismatch(expected) is None
    assert exact.mismatch(torch.tensor([3, 9, 5])) == "wrong_values"
    assert departures(torch.stack([single, expected]), torch.stack([single, single])).tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_output_in_half_precision_may_be_rounded_once(dtype: torch.dtype, ci_params: Params) -> None:
    expected = torch.randn(5000, dtype=torch.float64)
    rounded = expected.to(dtype)
    exact = reference(rounded, expected, ci_params)
    assert exact.mismatch(rounded) is None and not exact.exceeds_tolerance
    assert exact.mismatch((expected * 1.1).to(dtype)) == "max_error"
    assert departures((expected * 1.1).to(dtype)[None], rounded[None]).item() > 1


@pytest.mark.parametrize("name", ["gelu", "sum", "matmul", "softmax_chain"])
def test_half_precision_accepts_float32_sums_and_refuses_near_misses(
    name: str, ci_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "HALF_FORMS", {name: exactness.HALF_FORMS[name]})
    tally = exactness.checked_half(ci_params, calls=1, seed=torch.seed() % 2**31)
    assert tally.calls == 2 * 4 * 6 and tally.wrong == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_few_quiet_rows_in_float8_are_wrong(dtype: torch.dtype, ci_params: Params) -> None:
    expected = torch.randn(1024, 1024, dtype=torch.float64)
    expected[::200] *= 2.0**-10
    single = expected.to(dtype)
    coarse = single.clone()
    coarse[::200] = exactness.in_float8(expected[::200]).to(dtype)
    assert reference(single, expected, ci_params).mismatch(coarse) == "block_error"
    assert departure(coarse, single) > 1


def test_subnormal_bfloat16_may_be_flushed_to_zero(ci_params: Params) -> None:
    """A kernel with -ftz or -ffast-math flushes them, as it may for float32."""
    expected = torch.randn(64, 256, dtype=torch.float64)
    expected[:, ::2] *= 1e-39
    single = expected.to(torch.bfloat16)
    flushed = single.masked_fill(single.abs() < torch.finfo(torch.bfloat16).smallest_normal, 0.0)
    assert reference(single, expected, ci_params).mismatch(flushed) is None


def test_a_complex_output_is_compared_by_its_parts(ci_params: Params) -> None:
    expected = torch.randn(500, dtype=torch.complex128)
    single = expected.to(torch.complex64)
    exact = reference(single, expected, ci_params)
    assert exact.mismatch(single) is None and exact.mismatch(single * 1.001) == "max_error"
    assert departures(single[None] * 1.001, single[None]).item() > 1


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_each_call_is_held_to_its_own_scale(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.tensor([1.0, 100.0, 1e-3, 1.0, 5.0, 1.0, 0.0])[:, None]
    single = torch.randn(7, 500, generator=torch.Generator().manual_seed(0)).clamp_(-3, 3) * scales
    planted = single + 1e-7 * scales
    planted[2, 7] += 1e-7
    planted[3, 7] = NAN
    planted[6, 7] = 1e-30
    monkeypatch.setattr("components.judge.timed_output_check.COMPARED_BYTES", at_once * single[0].nbytes)
    found = departures(planted.view(7, 20, 25), single.view(7, 20, 25)) > 1
    assert found.tolist() == [False, False, True, True, False, False, True]


def test_the_worst_flagged_call_of_each_kind_and_a_random_one_are_compared() -> None:
    mixes = [
        InputMix(0, 1, (), (), 0.5, name) for name in ("given", "given", "wide", "given", "given", "given")
    ]
    assert suspicious_calls([0.0, 1.0, 0.5, 0.9, 1.0, 0.0], mixes) == []
    assert suspicious_calls([0.0, 1.0, 1.5, 0.9, 3.0, 0.0], mixes) == [4, 2]
    chosen = {tuple(suspicious_calls([0.0, 2.0, 5.0, 4.0, INF, 1.1], mixes)) for _ in range(200)}
    assert chosen == {(4, 1, 2), (4, 3, 2), (4, 5, 2)}


def test_timed_rounds_use_every_distribution_whatever_the_correctness_sets_are() -> None:
    bank = InputBank([[torch.randn(64)] for _ in range(4)], ["given"], "cpu")
    used = [[mix.distribution for mix in bank.fresh(4, number)] for number in range(5)]
    assert all(len(set(names) - {"given"}) == 1 for names in used)
    assert [next(name for name in names if name != "given") for names in used] == [
        "wide",
        "integers",
        "flipped",
        "shifted",
        "scaled",
    ]
    assert {mix.distribution for mix in bank.fresh(4)} == {"given"}


CONSTANT = torch.full((3, 3), 0.1)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x @ torch.full((3, 3), 0.1, dtype=torch.float32),
        lambda x: x.float() @ torch.full((3, 3), 0.1),
        lambda x: x.to(torch.float32).matmul(torch.zeros(3, 3, dtype=torch.float32).add_(0.1)),
        lambda x: torch.einsum("ij,jk->ik", x.type(torch.float32), torch.ones(3, 3).to(x) * 0.1),
        lambda x: torch.cumsum(x * 0.1, -1, dtype=torch.float32)[:, -1:].expand(-1, 3),
    ],
)
def test_a_source_that_names_float32_is_computed_in_float64(forward: exactness.Function) -> None:
    x = torch.randn(4, 3)
    with computing_in_float64():
        found = forward(x.double())
    assert torch.allclose(found, (x.double() * 0.1).sum(-1, keepdim=True).expand(-1, 3), rtol=1e-12)
    assert torch.get_default_dtype() == torch.float32 and torch.finfo(torch.float64).eps < 1e-15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_source_that_names_its_half_precision_is_computed_in_float64(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 64).to(dtype), torch.randn(64, 3).to(dtype)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.float() / (x.float().norm() + torch.finfo(x.dtype).eps)
        return y.to(dtype).half().bfloat16() @ w

    with computing_in_float64(dtype):
        found = forward(x.double())
    exact = x.double() / (x.double().norm() + torch.finfo(dtype).eps) @ w.double()
    assert torch.allclose(found, exact, rtol=1e-12)
    with computing_in_float64():
        rounded = (x.double() / 3).to(dtype).float()
    assert torch.equal(rounded, (x.double() / 3).to(dtype).double()), "float32 code rounds on purpose"


def test_a_constant_of_the_module_in_float32_is_widened_and_may_not_be_changed() -> None:
    x = torch.randn(4, 3).double()
    with computing_in_float64():
        assert torch.equal(x @ CONSTANT, x @ CONSTANT.to(torch.float64))
        with pytest.raises(RuntimeError, match="in place"):
            CONSTANT.mul_(2)
        with pytest.raises(RuntimeError, match="bits"):
            x.view(torch.int32)


def test_constants_of_the_dtype_are_those_of_float32() -> None:
    x = torch.randn(4, 64, dtype=torch.float64) * 1e-4
    eps = torch.finfo(torch.float32).eps
    with computing_in_float64():
        found = torch.nn.functional.rms_norm(x, (64,)), torch.finfo(x.dtype).eps
    assert torch.allclose(found[0], x / (x.square().mean(-1, keepdim=True) + eps).sqrt(), rtol=1e-12)
    assert found[1] == eps


def test_half_precision_and_crude_exponentials_are_wrong(ci_params: Params) -> None:
    x = torch.randn(256, 1024)
    expected = torch.softmax(x.double(), -1)
    exact = reference(torch.softmax(x, -1), expected, ci_params)
    crude = 1 + x.double() / 1024
    for answer in (
        torch.softmax(x.half(), -1).float(),
        torch.softmax(x.bfloat16(), -1).float(),
        expected.half().float(),
        torch.nn.functional.normalize(crude**1024, p=1, dim=-1).float(),
        torch.full_like(x, 1 / 1024),
        torch.zeros_like(x),
        (x.double().exp() / (2 * x[:, ::2].double().exp().sum(-1, keepdim=True))).float(),
    ):
        assert exact.mismatch(answer, multiple=TIMED_MULTIPLE) in ("max_error", "rms_error")
        assert departures(answer[None], exact.single[None]).item() > 1
    assert exact.limits[0] >= FLOAT32_FLOOR * expected.max().item()


def scaled_output(quiet: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output whose rows, columns or elements span many decades, and a mask of the quiet ones."""
    decades = {"rows": (512, 1), "columns": (1, 256), "elements": (512, 256)}[quiet]
    gain = 10.0 ** -(12 * torch.rand(decades, dtype=torch.float64))
    exact = torch.randn(512, 256, dtype=torch.float64) * gain
    return exact, (gain < 1e-8).expand(512, 256)


def departure(output: torch.Tensor, single: torch.Tensor) -> float:
    """Return the largest departure in eight calls, because each samples other blocks and may miss one."""
    return max(departures(output[None], single[None]).item() for _ in range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("quiet", ["rows", "columns", "elements"])
def test_small_values_that_are_left_out_are_wrong(quiet: str, dtype: torch.dtype, ci_params: Params) -> None:
    exact, mask = scaled_output(quiet, dtype)
    single = exact.to(dtype)
    reference = ReferenceOutput(single, exact, ci_params.sandbox, ci_params.precision)
    assert reference.mismatch(single) is None
    without = single.masked_fill(mask, 0.0)
    assert reference.mismatch(without, multiple=TIMED_MULTIPLE) is not None
    assert departure(without, single) > 1


@pytest.mark.parametrize(
    ("dtype", "coarse"), [(torch.float32, torch.float16), (torch.float64, torch.float32)]
)
def test_quiet_rows_in_lower_precision_are_wrong(
    dtype: torch.dtype, coarse: torch.dtype, ci_params: Params
) -> None:
    exact, mask = scaled_output("rows", dtype)
    single, size = exact.to(dtype), exact.abs().amax(-1, keepdim=True).to(dtype)
    rounded = torch.where(mask, (single / size).to(coarse).to(dtype) * size, single)
    reference = ReferenceOutput(single, exact, ci_params.sandbox, ci_params.precision)
    assert reference.mismatch(rounded, multiple=TIMED_MULTIPLE) == "block_error"
    assert departure(rounded, single) > 1


def test_another_order_of_a_sum_is_right_where_much_cancels(ci_params: Params) -> None:
    for width in (1, 4, 64):
        terms = torch.randn(4096, 4096 // width, width)
        single, exact = terms.sum(1), terms.double().sum(1)
        other = terms.flip(1).cumsum(1)[:, -1]
        reference = ReferenceOutput(single, exact, ci_params.sandbox, ci_params.precision)
        assert reference.mismatch(other, multiple=4.0) is None


def test_a_baseline_may_add_in_another_order_but_not_be_wrong(ci_params: Params) -> None:
    expected = torch.linspace(-1, 1, 4096, dtype=torch.float64)
    exact = reference(expected.float(), expected, ci_params)

    def verdicts(error: float) -> list[str | None]:
        output = (expected + error).float()
        return [exact.mismatch(output, loose=loose) for loose in (0.0, 1.0, COMPILED_TOLERANCE)]

    assert verdicts(1e-7) == [None, None, None]
    assert verdicts(5e-5) == ["max_error", None, None]
    assert verdicts(2e-3) == ["max_error", "max_error", None]
    assert verdicts(2e-2) == ["max_error", "max_error", "max_error"]
