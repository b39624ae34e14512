"""Compute how many tasks of each split and kind a data set is to have.

The split of a task is `train` or `held_out`. Its kind is its `data_source`, such as torch#2 for a chain of
two operators of torch, or transformers for a module of that library.
"""

from collections import Counter

from components.core.params import Data

# Type of a pair (split, kind). For each pair, the parameters determine a number of tasks.
Quota = tuple[str, str]


def task_quotas(data: Data) -> Counter[Quota]:
    """Return how many tasks of each split and kind a data set with these parameters is to have.

    For tasks of the core operators, the empty kind "" stands for all kinds, because the number of operators
    of each task is drawn at random.
    """
    wanted: Counter[Quota] = Counter()
    for split, count in (("train", data.tasks), ("held_out", data.held_out)):
        exact = {kind: count * share for kind, share in source_shares(data).items()}
        # The numbers with the largest remainders are rounded up, so that the sum is correct.
        by_remainder = sorted(exact, key=lambda kind: (int(exact[kind]) - exact[kind], kind))
        rounded_up = by_remainder[: count - sum(map(int, exact.values()))]
        wanted.update({(split, kind): int(number) + (kind in rounded_up) for kind, number in exact.items()})
    return wanted


def source_shares(data: Data) -> dict[str, float]:
    """Return the share of the data set's tasks for each kind of task.

    A kind is a value of the column data_source, such as torch#2 or transformers. For the core operators, the
    result is {"": 1.0}.
    """
    if data.operators == "core":
        return {"": 1.0}
    modules = data.transformers_share if data.operators == "all" and not data.composer else 0.0
    shares = {f"torch#{count}": share * (1 - modules) for count, share in data.operator_mix.items()}
    return shares | ({"transformers": modules} if modules else {})
