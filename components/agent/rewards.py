"""Compute the reward of a trajectory, which training maximises.

A trajectory is the record of one attempt of a policy at a task. The parameter `reward` names the function
that computes it by the function's import path. The function `components.agent.rewards.milestone` returns the
milestone of the final verdict, which is -1, 1, 2 or 3 and which judge/verdict.py defines. A user's own
function takes a finished trajectory, with all of its turns and verdicts, and returns a number. This number is
stored in the trajectory, and PPO, rejection fine-tuning and the critic learn from it.
"""

import math
import pkgutil
from collections.abc import Callable

from components.agent.trajectory import Trajectory
from components.core.errors import UserError
from components.judge import verdict

Reward = Callable[[Trajectory], float]


def milestone(trajectory: Trajectory) -> float:
    """Return the milestone of the final verdict of a trajectory (CUDA Agent paper, equation 1).

    It is -1 for a kernel that is not correct, 1 for a correct one, 2 if it is also faster than eager PyTorch,
    and 3 if it is also faster than torch.compile.
    """
    return float(verdict.milestone(trajectory.final))


def load_reward(path: str) -> Reward:
    """Import the function whose import path is `path`, the value of the parameter `reward`, and return it.

    The function takes a `Trajectory` and returns its reward. Raises UserError if the module cannot be
    imported or has no such function.
    """
    try:
        function: Reward = pkgutil.resolve_name(path)
    except Exception as error:  # the import of a module of the user may raise anything
        raise UserError(
            f"params.yaml: reward: {path} cannot be imported ({error}); give module.function, such as "
            "components.agent.rewards.milestone, with the module's folder in PYTHONPATH."
        ) from error
    if not callable(function):
        raise UserError(f"params.yaml: reward: {path} is no function; give one that takes a trajectory.")
    return function


def reward_of(trajectory: Trajectory, function: Reward) -> float | None:
    """Return the reward that `function` gives to a trajectory, or None if the judge failed on it.

    Raises UserError if the function returns anything but a finite number.
    """
    if not trajectory.is_judged:
        return None
    value = function(trajectory)
    if not isinstance(value, int | float) or not math.isfinite(value):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise UserError(
            f"params.yaml: reward: {function.__module__}.{name} returned {value!r} for a trajectory; "
            "let it return a finite number."
        )
    return float(value)
