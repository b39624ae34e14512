"""Write demonstrations by rules, as training data of a policy that is made from scratch.

A demonstration is a conversation in which the assistant writes kernels for a task. Each of its kernels has a
random schedule (a choice of how the kernel computes), so nothing in the demonstrations says which schedules
are fast, and some of the kernels are wrong. After the cold start, which is the training on demonstrations,
the policy has a low entropy, so reinforcement learning can find only what the demonstrations contain.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.kernel_writer import draw_schedule, write_kernel
from components.bootstrap.nest_writer import draw_nest_schedule, write_program
from components.bootstrap.operator_chain import COLS, read_chain
from components.bootstrap.operator_code import LIBM
from components.bootstrap.tensor_operators import read_program
from components.bootstrap.tokenizer import Message
from components.core.records import Device
from components.core.stage_params import Coldstart
from components.core.task import KernelTask
from components.policy.prompts import IN_TURNS

# Probabilities with which a correct kernel gets milestone 1, 2 and 3 in the simulated measurement. Milestone
# 2 is faster than eager mode, and milestone 3 also faster than torch.compile.
MILESTONES = (0.4, 0.2, 0.4)
# Suffix of the kernel file, by device.
SUFFIX: dict[str, str] = {"cpu": "cpp", "cuda": "cu"}
# Shell command of the tool call MEASURE_CALL.
MEASURE = "bash utils/compile.sh && python3 -m utils.verification && python3 -m utils.profiling"
# Content of the last turn of an episode with several turns.
DONE = "Done."
# Reasons of the simulated verdicts on wrong kernels that build; one that stands twice is drawn twice as
# often.
WRONG_OUTPUT_REASONS = ("max_error:given", "max_error:given", "max_error:scaled", "finite_mask:wide")


def kernel_path(device: Device) -> str:
    """Return the path of the kernel file in the workspace, the folder in which the agent works."""
    return f"kernels/forward.{SUFFIX[device]}"


def write_call(kernel: str, device: Device) -> str:
    """Return the text of the tool call that writes the source `kernel` to the kernel file."""
    return (
        "<tool_call>\n<function=Write>\n<parameter=file_path>\n"
        f"{kernel_path(device)}\n</parameter>\n"
        f"<parameter=content>\n{kernel}</parameter>\n</function>\n</tool_call>"
    )


# Text of the tool call that builds the kernel, compares it with the reference, and measures its time.
MEASURE_CALL = (
    f"<tool_call>\n<function=Bash>\n<parameter=command>\n{MEASURE}\n</parameter>\n</function>\n</tool_call>"
)


# --- mistakes -----------------------------------------------------------------------------------------------

# Patterns of a line of a kernel that computes an operator, and of a constant in it without its suffix `f`.
OPERATOR_LINE = re.compile(r"^ +(?:for \([^)]*\) )?v = .*;$")
CONSTANT = re.compile(r"\d\.\d+(?=f)")
WRONG_CONSTANTS = ("0.1", "0.5", "1.5", "2.0")
# Function of vec.h that replaces each function in a wrong kernel; those of libm are added below.
WRONG_FUNCTIONS = {
    "vtanh": "verf",
    "verf": "vtanh",
    "vsigmoid": "vtanh",
    "vexp": "vtanh",
    "vmax": "vmin",
    "vabs": "vexp",
    "vsqrt": "vabs",
    "vlog1p": "vsqrt",
}
WRONG_FUNCTIONS |= {LIBM[right]: LIBM[wrong] for right, wrong in WRONG_FUNCTIONS.items() if right in LIBM}
FUNCTION = re.compile("|".join(re.escape(name) + r"(?=\()" for name in WRONG_FUNCTIONS))


@dataclass(frozen=True)
class Mistake:
    """A way to make the source of a kernel wrong.

    `applies` returns whether a line of the source can be changed, as a value that is true or false. `edit`
    returns the lines that replace this line, and may draw from the random generator.
    """

    applies: Callable[[str], object]
    edit: Callable[[str, random.Random], list[str]]


def _change_constant(line: str, rng: random.Random) -> list[str]:
    """Return a list of one line: `line` with another of `WRONG_CONSTANTS` as its first constant."""
    before, constant, after = re.split(f"({CONSTANT.pattern})", line, maxsplit=1)
    return [f"{before}{rng.choice([other for other in WRONG_CONSTANTS if other != constant])}{after}"]


def _lose_character(line: str, rng: random.Random) -> list[str]:
    """Return a list of one line: `line` without its last character or its last closing parenthesis."""
    if ")" not in line or rng.random() < 0.5:
        return [line[:-1]]
    return ["".join(line.rsplit(")", 1))]


OTHER_CONSTANT = Mistake(lambda line: OPERATOR_LINE.match(line) and CONSTANT.search(line), _change_constant)
DROPPED_LINE = Mistake(OPERATOR_LINE.match, lambda line, rng: [])
OTHER_FUNCTION = Mistake(
    lambda line: OPERATOR_LINE.match(line) and FUNCTION.search(line),
    lambda line, rng: [FUNCTION.sub(lambda match: WRONG_FUNCTIONS[match.group()], line, count=1)],
)
LOST_CHARACTER = Mistake(lambda line: line.endswith(";") and "v" in line, _lose_character)
# For kernels without a line of their own on elements, which only call libraries.
LOST_ANYWHERE = Mistake(lambda line: line.startswith(" ") and line.endswith(";"), _lose_character)


def mutate(kernel: str, rng: random.Random) -> str:
    """Return a wrong version of the source of a kernel.

    One line is changed: it has another constant or function, is missing, or lacks a character.
    """
    mistakes = [OTHER_CONSTANT, OTHER_CONSTANT, DROPPED_LINE, OTHER_FUNCTION]
    rng.shuffle(mistakes)
    if rng.random() < 0.3:
        mistakes.insert(0, LOST_CHARACTER)
    lines = kernel.splitlines()
    for mistake in [*mistakes, LOST_CHARACTER, LOST_ANYWHERE]:
        indices = [index for index, line in enumerate(lines) if mistake.applies(line)]
        if indices:
            index = rng.choice(indices)
            lines[index : index + 1] = mistake.edit(lines[index], rng)
            return "\n".join(lines) + "\n"
    raise AssertionError("every kernel has a line that can lose a character")


# --- observations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A simulated output of the tool calls that write and measure a kernel.

    `observation` is the text that the tool calls return. `milestone` is -1 for a wrong kernel, 1 for a
    correct one, 2 if it is also faster than eager mode, and 3 if it is also faster than torch.compile.
    `speedup` is that over eager mode, and 0 for a wrong kernel.
    """

    observation: str
    milestone: int
    speedup: float = 0.0


def simulate_outcome(kernel: str, right: bool, device: Device, rng: random.Random) -> Outcome:
    """Return a simulated outcome of writing and measuring a kernel.

    `kernel` is the source of the kernel, and `right` says whether it is right. For a right kernel, the times
    and the milestone (1, 2 if faster than eager mode, 3 if also faster than torch.compile) are drawn. A wrong
    kernel fails to build if its parentheses do not match or a line has a wrong end, and otherwise has wrong
    output.
    """
    path = kernel_path(device)
    written = f"Written {path}."
    if not right:
        if not _balanced(kernel):
            return Outcome(f"{written}\nBuild failed: {path}: error: expected ';' before '}}' token", -1)
        return Outcome(f"{written}\n[FAIL] wrong_output: {rng.choice(WRONG_OUTPUT_REASONS)}", -1)
    milestone = rng.choices((1, 2, 3), MILESTONES)[0]
    against_eager = {1: rng.uniform(0.3, 1.0), 2: rng.uniform(1.1, 2.0), 3: rng.uniform(1.3, 4.0)}[milestone]
    against_compile = {1: rng.uniform(0.1, 0.9), 2: rng.uniform(0.3, 1.0), 3: rng.uniform(1.1, 2.0)}[
        milestone
    ]
    microseconds = rng.uniform(50, 900)
    # The judge measures torch.compile only for candidates that are faster than eager mode.
    compile_time, compile_ratio = (
        (f"{microseconds * against_compile:.1f} us", f", {against_compile:.2f}x compile")
        if milestone > 1
        else ("not measured", "")
    )
    bandwidth = {"cpu": rng.uniform(8, 40), "cuda": rng.uniform(2000, 4500)}[device]
    attained = (
        bandwidth * {1: rng.uniform(0.02, 0.4), 2: rng.uniform(0.2, 0.7), 3: rng.uniform(0.3, 0.9)}[milestone]
    )
    observation = (
        f"{written}\n[PASS] verify success\n"
        f"Torch Baseline: {microseconds * against_eager:.1f} us, Torch Compile: {compile_time}, "
        f"CUDA Extension: {microseconds:.1f} us\n"
        f"Speed-up: {against_eager:.2f}x eager{compile_ratio}. Milestone: {milestone} of 3.\n"
        f"Memory: {attained:.1f} of {bandwidth:.1f} GB/s."
    )
    return Outcome(observation, milestone, against_eager)


def _balanced(kernel: str) -> bool:
    """Return whether a kernel has as many ")" as "(" and all lines of its body end with `;`, `{` or `}`.

    Lines with a pragma may end otherwise.
    """
    statements = [line for line in kernel.splitlines() if line.startswith(" ") and "#pragma" not in line]
    return kernel.count("(") == kernel.count(")") and all(
        line.endswith((";", "{", "}")) for line in statements
    )


# --- whole demonstrations -----------------------------------------------------------------------------------


def draw_kernel(code: str, device: Device, rng: random.Random) -> str:
    """Return a kernel with a random schedule, a choice of how it computes, for the task with source `code`.

    `write_kernel` writes the kernel of a chain of core operators (operator_chain.py) on inputs of two
    dimensions with one of the usual row lengths, and `write_program` the kernel of any other task that can be
    read as loop nests (`read_program`). Raises ValueError for other tasks.
    """
    chain, program = read_chain(code), read_program(code)
    if chain is not None and (program is None or program.shape[1:] in [(cols,) for cols in COLS]):
        return write_kernel(chain, draw_schedule(rng, device))
    if program is not None:
        return write_program(program, draw_nest_schedule(rng, device))
    raise ValueError("kernels are written for chains of the tensor operators only")


def _attempt(code: str, wrong_share: float, device: Device, rng: random.Random) -> tuple[str, bool]:
    """Return a kernel with a random schedule for the task with source `code`, and whether it is right.

    The kernel is made wrong with the probability `wrong_share`. Raises ValueError if no rule writes kernels
    for the task (`draw_kernel`).
    """
    kernel = draw_kernel(code, device, rng)
    right = rng.random() >= wrong_share
    return kernel if right else mutate(kernel, rng), right


def _turn(call: str, observation: str) -> list[Message]:
    """Return the assistant's message with tool calls (`call`), and the message with their output."""
    return [{"role": "assistant", "content": call}, {"role": "tool", "content": observation}]


def make_demonstration(
    task: KernelTask, rng: random.Random, coldstart: Coldstart, device: Device
) -> list[Message]:
    """Return the messages of one episode on a composed task, for the setting `policy.prompt: compact`.

    A composed task is a chain of operators in a fixed layout. Each message has a `role` and a `content`. In
    an episode with a single turn, the assistant writes one kernel. In an episode with several turns, the
    assistant writes a kernel and measures it, and writes and measures a second kernel unless the first
    reached milestone 3, which is faster than torch.compile. If the second kernel is no better, the assistant
    writes the first one again, or a third one if both are wrong, without measuring it. The last turn of such
    an episode has no tool call. Raises ValueError if no rule writes kernels for `task` (`draw_kernel`).
    """
    # The prompt of an episode on this task has the same source (`agent.episode.first_prompt`).
    code = canonicalize(task.code) or task.code
    kernel, right = _attempt(code, coldstart.wrong_share, device, rng)
    if rng.random() >= coldstart.multi_turn_share:
        return [
            {"role": "user", "content": code},
            {"role": "assistant", "content": write_call(kernel, device)},
        ]

    first = simulate_outcome(kernel, right, device, rng)
    messages = [{"role": "user", "content": code + IN_TURNS}]
    messages += _turn(f"{write_call(kernel, device)}\n{MEASURE_CALL}", first.observation)
    if first.milestone < 3:
        # Later attempts have other schedules and are wrong less often.
        later, later_right = _attempt(code, coldstart.wrong_share / 3, device, rng)
        second = simulate_outcome(later, later_right, device, rng)
        messages += _turn(f"{write_call(later, device)}\n{MEASURE_CALL}", second.observation)
        if (second.milestone, second.speedup) <= (first.milestone, first.speedup):
            if not right:
                kernel, _ = _attempt(code, coldstart.wrong_share / 3, device, rng)
            messages += _turn(write_call(kernel, device), f"Written {kernel_path(device)}.")
    return [*messages, {"role": "assistant", "content": DONE}]
