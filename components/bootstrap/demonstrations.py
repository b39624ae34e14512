"""Demonstrations by a rule-based kernel writer: what a policy made from scratch learns to imitate.

They are mixed in quality on purpose. After the cold start the policy's entropy is low, so what reinforcement learning
can find is what the demonstrations hold: several styles per task, some slow, some wrong, and a fast one that the policy
knows but rarely uses (knowledge: tiny policy).
"""

from __future__ import annotations

import random
import re

from components.bootstrap import kernel_templates_cpu, kernel_templates_cuda
from components.bootstrap.chain_parser import read_chain
from components.bootstrap.kernel_templates_cpp import CUDA_MATH, LIBM
from components.core.config import Coldstart, Device
from components.core.task import KernelTask
from components.policy.prompts import IN_TURNS

MILESTONES: dict[Device, dict[str, tuple[float, float, float]]] = {
    "cpu": {"passes": (0.93, 0.07, 0.0), "fused": (0.9, 0.03, 0.07), "simd": (0.1, 0.1, 0.8)},
    "cuda": {"passes": (0.95, 0.05, 0.0), "fused": (0.4, 0.1, 0.5), "vector": (0.4, 0.1, 0.5)},
}
"""How often a right kernel of each style reaches milestone 1, 2 and 3, slowest style first. Close to what the judge measured: on cpu
over 24 tasks the fast style reached 3 on 19, the others 1 on 22; on an H200 fused kernels reached 3 on 7 of 14 and 1 on the rest."""
STYLES: dict[Device, tuple[str, ...]] = {device: tuple(table) for device, table in MILESTONES.items()}
FAST: dict[Device, tuple[str, ...]] = {"cpu": ("simd",), "cuda": ("fused", "vector")}
"""Styles worth finding: one thread of a core gains little from fusing alone, a GPU most of what there is."""
SUFFIX: dict[str, str] = {"cpu": "cpp", "cuda": "cu"}
MEASURE = "bash utils/compile.sh && python3 -m utils.verification && python3 -m utils.profiling"
DONE = "Done."
Message = dict[str, str]


def write_kernel(code: str, style: str, device: Device) -> str | None:
    """The text of kernels/forward.cpp (or .cu) for a composed task's source; None for a source of any other form."""
    chain = read_chain(code)
    if chain is None:
        return None
    return (
        kernel_templates_cpu.write(chain, style)
        if device == "cpu"
        else kernel_templates_cuda.write(chain, style)
    )


def write_call(kernel: str, device: Device) -> str:
    """The tool call that writes the kernel."""
    path = f"kernels/forward.{SUFFIX[device]}"
    return f"<tool_call>\n<function=Write>\n<parameter=file_path>\n{path}\n</parameter>\n<parameter=content>\n{kernel}</parameter>\n</function>\n</tool_call>"


def measure_call() -> str:
    """The tool call that builds, checks and times it."""
    return f"<tool_call>\n<function=Bash>\n<parameter=command>\n{MEASURE}\n</parameter>\n</function>\n</tool_call>"


# --- mistakes ----------------------------------------------------------------------------------------------------------

OPERATOR_LINE = re.compile(r"^ +(?:for \([^)]*\) )?v = .*;$")


def _other_constant(lines: list[str], rng: random.Random) -> bool:
    places = [i for i, line in enumerate(lines) if OPERATOR_LINE.match(line) and re.search(r"\d\.\d+f", line)]
    if not places:
        return False
    place = rng.choice(places)
    lines[place] = re.sub(
        r"\d\.\d+(?=f)",
        lambda match: rng.choice([c for c in ("0.1", "0.5", "1.5", "2.0") if c != match.group()]),
        lines[place],
        count=1,
    )
    return True


def _dropped_line(lines: list[str], rng: random.Random) -> bool:
    places = [i for i, line in enumerate(lines) if OPERATOR_LINE.match(line)]
    if not places:
        return False
    del lines[rng.choice(places)]
    return True


def _other_function(lines: list[str], rng: random.Random) -> bool:
    names = {
        "vtanh": "verf",
        "verf": "vtanh",
        "vsigmoid": "vtanh",
        "vexp": "vtanh",
        "vmax": "vmin",
        "vabs": "vexp",
        "vsqrt": "vabs",
        "vlog1p": "vsqrt",
    }
    names |= {table[a]: table[b] for table in (LIBM, CUDA_MATH) for a, b in names.items() if a in table}
    found = re.compile("|".join(re.escape(name) + r"(?=\()" for name in names))
    places = [i for i, line in enumerate(lines) if OPERATOR_LINE.match(line) and found.search(line)]
    if not places:
        return False
    place = rng.choice(places)
    lines[place] = found.sub(lambda match: names[match.group()], lines[place], count=1)
    return True


def _lost_character(lines: list[str], rng: random.Random) -> bool:
    places = [i for i, line in enumerate(lines) if line.endswith(";") and "v" in line]
    place = rng.choice(places)
    lines[place] = (
        lines[place][:-1]
        if ")" not in lines[place] or rng.random() < 0.5
        else "".join(lines[place].rsplit(")", 1))
    )
    return True


def mutate(kernel: str, rng: random.Random) -> str:
    """A kernel that is wrong in the way a language model errs: another constant or function, a line left out, or a lost
    character that does not compile."""
    mistakes = [_other_constant, _other_constant, _dropped_line, _other_function]
    rng.shuffle(mistakes)
    if rng.random() < 0.3:
        mistakes.insert(0, _lost_character)
    for mistake in [*mistakes, _lost_character]:
        lines = kernel.splitlines()
        if mistake(lines, rng):
            return "\n".join(lines) + "\n"
    raise AssertionError("a lost character always applies")


# --- observations ------------------------------------------------------------------------------------------------------


def observe(kernel: str, quality: str, device: Device, rng: random.Random) -> tuple[str, int]:
    """What the judge would plausibly say of a kernel of this quality (a style, or `wrong`), and the milestone."""
    written = f"Written kernels/forward.{SUFFIX[device]}."
    if quality == "wrong":
        if not _balanced(kernel):
            return (
                f"{written}\nBuild failed: kernels/forward.{SUFFIX[device]}: error: expected ';' before '}}' token",
                -1,
            )
        return (
            f"{written}\n[FAIL] wrong_output: {rng.choice(('max_error:given', 'max_error:given', 'max_error:scaled', 'finite_mask:wide'))}",
            -1,
        )
    milestone = rng.choices((1, 2, 3), MILESTONES[device][quality])[0]
    against_eager = {1: rng.uniform(0.3, 1.0), 2: rng.uniform(1.1, 2.0), 3: rng.uniform(1.3, 4.0)}[milestone]
    against_compile = {1: rng.uniform(0.1, 0.9), 2: rng.uniform(0.3, 1.0), 3: rng.uniform(1.1, 2.0)}[
        milestone
    ]
    own = rng.uniform(50, 900)
    # The judge measures torch.compile only for candidates that beat eager.
    compile_time, compile_ratio = (
        (f"{own * against_compile:.1f} us", f", {against_compile:.2f}x compile")
        if milestone > 1
        else ("not measured", "")
    )
    return (
        f"{written}\n[PASS] verify success\n"
        f"Torch Baseline: {own * against_eager:.1f} us, Torch Compile: {compile_time}, CUDA Extension: {own:.1f} us\n"
        f"Speed-up: {against_eager:.2f}x eager{compile_ratio}. Milestone: {milestone} of 3."
    ), milestone


def _balanced(kernel: str) -> bool:
    statements = [line for line in kernel.splitlines() if line.startswith(" ") and "#pragma" not in line]
    return kernel.count("(") == kernel.count(")") and all(
        line.endswith((";", "{", "}")) for line in statements
    )


# --- whole demonstrations ----------------------------------------------------------------------------------------------


def _attempt(code: str, fast: float, wrong: float, device: Device, rng: random.Random) -> tuple[str, str]:
    """One kernel and its quality: the style, or `wrong`."""
    slow = tuple(style for style in STYLES[device] if style not in FAST[device])
    styles = FAST[device] if rng.random() < fast else slow
    style = rng.choice(styles) if len(styles) > 1 else styles[0]
    kernel = write_kernel(code, style, device)
    if kernel is None:
        raise ValueError("demonstrations are written for composed tasks only")
    if rng.random() < wrong:
        return mutate(kernel, rng), "wrong"
    return kernel, style


def make_demonstration(
    task: KernelTask, rng: random.Random, coldstart: Coldstart, device: Device
) -> list[Message]:
    """Chat messages of one episode on a composed task, for `policy.prompt: compact`.

    Single-turn episodes write one kernel. Multi-turn ones measure it, repair it or make it faster when the observation
    asks for that, and end with a turn that calls no tool.
    """
    kernel, quality = _attempt(task.code, coldstart.fast_share, coldstart.wrong_share, device, rng)
    if rng.random() >= coldstart.multi_turn_share:
        return [
            {"role": "user", "content": task.code},
            {"role": "assistant", "content": write_call(kernel, device)},
        ]
    messages = [{"role": "user", "content": task.code + IN_TURNS}]
    for again in (True, False):
        content, milestone = observe(kernel, quality, device, rng)
        messages.append({"role": "assistant", "content": f"{write_call(kernel, device)}\n{measure_call()}"})
        messages.append({"role": "tool", "content": content})
        if milestone == 3 or not again:
            break
        # The second attempt is the better one: seldom wrong, and as often fast as the parameters say.
        kernel, quality = _attempt(
            task.code, coldstart.second_fast_share, coldstart.wrong_share / 3, device, rng
        )
    return [*messages, {"role": "assistant", "content": DONE}]
