"""Compositions per minute of the mined composer before anything is executed, and where their time goes.

    python tests/bench/bench_compose.py [--seconds 20] [--processes 2] [--seeds FOLDER]

Prints three lines: the rate of all processes together, composer and first look of the task_filter; the
shares of the parts in one of them; and the named alternative, asking real tensors of the task's size what
meta tensors are asked here.
"""

import argparse
import multiprocessing
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from components.core.config import resolve
from components.core.params import Params
from components.core.progress import Quiet
from components.synthesis import operator_table, torch_composer
from components.synthesis.mined_operators import apply_template
from components.synthesis.task_filter import TaskFilter

PARTS = {
    "every_operator_matters": "probe on small real tensors",
    "operator_cost": "fit and cost on meta tensors",
}


def timed(spent: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its own time added under its name; what it calls among PARTS is not counted twice."""

    def call(*arguments: Any) -> Any:
        before, inner = time.process_time(), spent.total()
        try:
            return function(*arguments)
        finally:
            spent[name] += time.process_time() - before - (spent.total() - inner)

    return call


def compose(
    params: Params, seeds: Path, seed: int, seconds: float, answer: Any = None
) -> tuple[int, Counter[str]]:
    """Count the tasks that one process composes in `seconds` of CPU time, and what it spent them on."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spent: Counter[str] = Counter()
    for name in PARTS:
        setattr(torch_composer, name, timed(spent, name, getattr(torch_composer, name)))
    data = params.data.model_copy(update={"seed": seed})
    composer, task_filter = (
        torch_composer.TorchComposer(
            operator_table.load_operator_table(seeds, Quiet()), data, params.device, modules=True
        ),
        TaskFilter(data),
    )
    look = timed(spent, "look", task_filter.check_source)
    composer.compose()  # torch imports much at its first use
    spent.clear()
    started, count = time.process_time(), 0
    while time.process_time() - started < seconds:
        look(composer.compose())
        count += 1
    spent["else"] = time.process_time() - started - spent.total()
    if answer is not None:
        answer.put(count)
    return count, spent


def asked(params: Params, seeds: Path, count: int) -> tuple[float, float]:
    """Return CPU milliseconds to find whether a form fits a size, with a meta and with a real tensor."""
    composer = torch_composer.TorchComposer(
        operator_table.load_operator_table(seeds, Quiet()), params.data, "cpu", modules=False
    )
    with mock.patch.object(composer, "_write_chain", wraps=composer._write_chain) as write:
        for _ in range(count):
            composer.compose()
    written = [call.args for call in write.call_args_list]
    totals = []
    for device in ("meta", "cpu"):
        before = time.process_time()
        for chain, shape in written:
            x = torch.empty(shape, device="meta") if device == "meta" else torch.randn(shape)
            with torch.no_grad():
                apply_template(chain[0], x, x)
        totals.append((time.process_time() - before) / count * 1e3)
    return totals[0], totals[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seeds",
        type=Path,
        default=Path(tempfile.gettempdir()) / "cuda-agent-seeds",
        help="where the mined table is kept",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    operator_table.load_operator_table(options.seeds, Quiet())
    params = resolve("smoke", ("data.operators=all",)).params
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    others = [
        context.Process(target=compose, args=(params, options.seeds, seed, options.seconds, answers))
        for seed in range(1, options.processes)
    ]
    for process in others:
        process.start()
    count, spent = compose(params, options.seeds, 0, options.seconds)
    counts = [count, *(answers.get() for _ in others)]
    print(
        f"{sum(counts) * 60 / options.seconds:.0f} compositions a minute of CPU time on {options.processes}"
        f" cores ({counts})"
    )
    names = PARTS | {"look": "first look of the task_filter", "else": "everything else"}
    print(", ".join(f"{names[name]} {seconds / spent.total():.0%}" for name, seconds in spent.most_common()))
    meta, real = asked(params, options.seeds, 40)
    print(
        f"whether an operator fits: {meta:.2f} ms of a meta tensor, {real:.2f} ms of a real one of the task's"
        " size"
    )


if __name__ == "__main__":
    main()
