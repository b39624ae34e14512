"""Claims about promotion under kills and in a crowd: one champion, a whole chain."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import FORKS
from promotion_fixtures import actions, aliases, apply_decision, make, promotion_of
from promotion_fixtures import home as home

from components.core.errors import UserError
from components.core.files import write_json
from components.registry.gates import Decision


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(6))
def test_what_a_kill_left_half_done_the_next_act_finishes(home: Path, at: int) -> None:
    """Die before the n-th write to the registry, right after the entry was written."""
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    writes = 0

    def mortal(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > at:
                raise Killed
            return method(*arguments)

        return call

    names = ("set_registered_model_alias", "set_model_version_tag", "set_registered_model_tag")
    kept = {name: getattr(promotion.client, name) for name in names}
    for name in names:
        setattr(promotion.client, name, mortal(kept[name]))
    with contextlib.suppress(Killed):
        apply_decision(
            promotion, "2", Decision(verdict="promoted", gates=(), reasons=()), champion="1", key="k"
        )
    again = promotion_of(home)
    reigning = aliases(again)["champion"]
    assert reigning in ("1", "2")
    apply_decision(again, "2", Decision(verdict="promoted", gates=(), reasons=()), champion="1", key="k")
    assert aliases(again) == {"champion": "2", "previous": "1"} and again.verify() == []
    assert actions(again) == ["promoted", "promoted"]


WORKERS, KILLED = 20, 6


def worker(home: Path, number: int) -> None:
    """Promotions and rollbacks without pause, as a process of its own."""
    chance = random.Random(number)
    promotion = promotion_of(home)
    for _ in range(3):
        try:
            if chance.random() < 0.6:
                promotion.promote(str(chance.randint(1, 4)), reason=f"worker {number}", override=True)
            else:
                promotion.rollback(who=f"worker {number}")
        except UserError as error:
            if "no previous champion" not in str(error):
                raise


def prepared(home: Path) -> None:
    make(home, 4)
    promotion_of(home).promote("1", override=True, reason="first")


def final(home: Path) -> None:
    promotion = promotion_of(home)
    promotion.promote("4", override=True, reason="last")
    problems = promotion.verify()
    champion = aliases(promotion)["champion"]
    write_json(
        home / "final.json",
        {"problems": problems, "champion": champion, "entries": len(promotion.chain.entries())},
    )


@pytest.mark.timeout(900)
def test_twenty_processes_with_kills_among_them_leave_one_champion_and_a_whole_chain(tmp_path: Path) -> None:
    def in_process(call: Callable[..., None], *arguments: Any) -> Any:
        process = FORKS.Process(target=call, args=arguments)
        process.start()
        return process

    first = in_process(prepared, tmp_path)
    first.join()
    assert first.exitcode == 0
    workers = [in_process(worker, tmp_path, number) for number in range(WORKERS)]
    chance = random.Random(0)
    killed = 0
    entries = tmp_path / "audit" / "policy"
    for victim in chance.sample(workers, KILLED):
        seen = len(list(entries.glob("*.json")))
        deadline = time.monotonic() + 120
        while len(list(entries.glob("*.json"))) == seen and time.monotonic() < deadline:
            time.sleep(0.002)
        if victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            killed += 1
    for process in workers:
        process.join()
    codes = [process.exitcode for process in workers]
    assert killed >= 1 and codes.count(-signal.SIGKILL) >= 1 and set(codes) <= {0, -signal.SIGKILL}, codes
    last = in_process(final, tmp_path)
    last.join()
    found = json.loads((tmp_path / "final.json").read_text())
    assert found["problems"] == [] and found["champion"] == "4"
    assert found["entries"] > WORKERS
