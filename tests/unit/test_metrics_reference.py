"""Evaluation metrics against a second implementation without common code, on random tables."""

import math
import random
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import pytest

from components.evaluation.metrics import FAST_P, summarise
from components.evaluation.results import TaskResult

P = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
STATUSES = [
    "build_failed",
    "load_failed",
    "crashed",
    "timed_out",
    "out_of_memory",
    "wrong_output",
    "forbidden",
    "infrastructure",
]
TABLES = 1000


def random_table(chance: random.Random, kind: str) -> list[dict[str, Any]]:
    """Draw rows of results.json; ratios may be missing, zero, infinite, NaN, or equal to a threshold."""
    size = 0 if kind == "empty" else chance.choice([1, 2, 3, 7, 20, 60])

    def ratio() -> float | None:
        draw = chance.random()
        if kind == "infinite" and draw < 0.4:
            return chance.choice([math.inf, -math.inf, math.nan, 0.0, -1.0, 1e300, 1e-300])
        if kind == "tied":
            return chance.choice([0.5, 0.8, 1.0, 1.05, 1.5, 2.0])
        return None if draw < 0.1 else math.exp(chance.gauss(0, 1))

    rows = []
    for index in range(size):
        failed = kind == "all failed" or chance.random() < 0.3
        ratios = {name: ratio() for name in ("eager", "compile")}
        speedup = {
            name: None if value is None else {"estimate": value, "low": value, "high": value}
            for name, value in ratios.items()
        }
        rows.append(
            {
                "task_id": f"t{index}",
                "level": chance.choice([1, 2, 3]),
                "status": chance.choice(STATUSES) if failed else "correct",
                "speedup": speedup,
            }
        )
    return rows


def counted(row: dict[str, Any], baseline: str) -> float | None:
    ratio = row["speedup"][baseline]
    if row["status"] != "correct" or ratio is None or not 0 < ratio["estimate"] < math.inf:
        return None
    return float(ratio["estimate"])


def expected(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Compute the metrics directly from their definitions, with exact fractions for the shares."""
    total, found = len(rows), {}
    found["pass_rate"] = (
        float(Fraction(sum(row["status"] == "correct" for row in rows), total)) if total else None
    )
    for baseline in ("eager", "compile"):
        ratios = [counted(row, baseline) for row in rows]
        known = sorted(ratio for ratio in ratios if ratio is not None)
        found[f"faster_rate.{baseline}"] = (
            float(Fraction(sum(ratio > 1 for ratio in known), total)) if total else None
        )
        found[f"geomean.{baseline}"] = (
            2 ** (math.fsum(math.log2(ratio) for ratio in known) / len(known)) if known else None
        )
        for p in P:
            hits = (
                sum(row["status"] == "correct" for row in rows)
                if p == 0
                else sum(ratio > p for ratio in known)
            )
            found[f"fast_p.{baseline}.{p:g}"] = float(Fraction(hits, total)) if total else None
    rewards = []
    for row in rows:
        if row["status"] == "infrastructure":
            continue
        beats = {
            baseline: row["speedup"][baseline] is not None and row["speedup"][baseline]["estimate"] > 1.05
            for baseline in ("eager", "compile")
        }
        rewards.append(
            -1 if row["status"] != "correct" else 1 + beats["eager"] + (beats["eager"] and beats["compile"])
        )
    found["mean_reward"] = float(Fraction(sum(rewards), len(rewards))) if rewards else None
    return found


def actual(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    summary = summarise([TaskResult.model_validate(row) for row in rows])
    found = {"pass_rate": summary.pass_rate, "mean_reward": summary.mean_reward}
    for baseline in ("eager", "compile"):
        found[f"faster_rate.{baseline}"] = getattr(summary.faster_rate, baseline)
        found[f"geomean.{baseline}"] = getattr(summary.geomean, baseline)
        for p, share in zip(summary.fast_p.p, getattr(summary.fast_p, baseline), strict=True):
            found[f"fast_p.{baseline}.{p:g}"] = share if rows else None
    return found


@pytest.mark.parametrize("kind", ["empty", "all failed", "infinite", "tied", "plain"])
def test_figures_agree_with_a_second_implementation(kind: str) -> None:
    assert FAST_P == P
    chance = random.Random(kind)
    for _ in range(TABLES // 5):
        rows = random_table(chance, kind)
        want, got = expected(rows), actual(rows)
        assert set(want) == set(got)
        for name, value in want.items():
            if value is None:
                assert got[name] is None, (name, rows)
            else:
                assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, rows)


def test_a_share_grows_no_smaller_as_p_grows_smaller() -> None:
    chance = random.Random("order")
    for _ in range(50):
        summary = summarise([TaskResult.model_validate(row) for row in random_table(chance, "plain")])
        for curve in (summary.fast_p.eager, summary.fast_p.compile):
            assert list(curve) == sorted(curve, reverse=True)


def test_intervals_of_shares_cover_what_they_should() -> None:
    """The 95 % interval holds a known share about as often as the normal theory says."""
    chance, share, size = random.Random(7), 0.7, 60
    held = 0
    for _ in range(200):
        rows = [
            {"task_id": f"t{i}", "status": "correct" if chance.random() < share else "crashed"}
            for i in range(size)
        ]
        interval = summarise([TaskResult.model_validate(row) for row in rows]).intervals["pass_rate"]
        held += (
            interval.low is not None and interval.high is not None and interval.low <= share <= interval.high
        )
        width = 2 * NormalDist().inv_cdf(0.975) * math.sqrt(share * (1 - share) / size)
        assert (
            interval.high is not None
            and interval.low is not None
            and 0.5 * width < interval.high - interval.low < 1.6 * width
        )
    assert 0.88 < held / 200 < 0.99
