"""Text and exit code of the three utilities of a workspace (compile, verification, profiling) for a verdict.

Policies are trained on these exact lines, so their wording must not change.
"""

from typing import Literal

from components.judge.verdict import Verdict

Utility = Literal["compile", "verification", "profiling"]
# Names of the utilities, by the command line that runs each utility.
COMMANDS: dict[str, Utility] = {
    "bash utils/compile.sh": "compile",
    "python3 -m utils.verification": "verification",
    "python3 -m utils.profiling": "profiling",
}
BUILD_SUCCEEDED = "Build succeeded."


def utility_output(utility: Utility, verdict: Verdict) -> tuple[str, int]:
    """Return the text that the utility prints for `verdict`, and the exit code of the utility."""
    if verdict.status == "build_failed" or (verdict.status, verdict.reason) == ("timed_out", "build_limit"):
        lines = verdict.log.splitlines()
        errors = [line for line in lines if "error" in line] or lines
        return "Build failed: " + "\n".join(line[:200] for line in errors[:3]), 1
    if utility == "compile":
        return BUILD_SUCCEEDED, 0
    if verdict.status != "correct":
        return f"[FAIL] {verdict.status}: {verdict.reason}", 1
    return ("[PASS] verify success" if utility == "verification" else _times(verdict)), 0


def _times(verdict: Verdict) -> str:
    """Return two lines: the times of baselines and candidate, and the speed-ups with the milestone (-1 to 3).

    The first line has the format that the workspace of the CUDA Agent paper prints.
    """
    seconds = verdict.seconds
    ratios = [f"{ratio.estimate:.2f}x {name}" for name, ratio in verdict.speedup if ratio is not None]
    return (
        f"Torch Baseline: {_microseconds(seconds.eager)}, Torch Compile: {_microseconds(seconds.compile)}, "
        f"CUDA Extension: {_microseconds(seconds.candidate)}\n"
        f"Speed-up: {', '.join(ratios)}. Milestone: {verdict.milestone} of 3."
    )


def _microseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e6:.1f} us"
