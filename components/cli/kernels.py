"""The commands `cuda-agent judge` and `cuda-agent optimize`: judge one kernel, or search for a faster one."""

from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Device,
    ExitCode,
    Output,
    Policy,
    ServerModel,
    home_of,
    judge_session,
    print_line,
    with_common_options,
)
from components.core.errors import refuse

# Parameters that are set unless `--precise` is given. Intervals are about twice as wide with them as with the
# numbers of rounds in the base section of params.yaml.
QUICK = ("sandbox.rounds=5", "sandbox.most_rounds=20")


@with_common_options("")
def judge(
    options: CommonOptions,
    workdir: Annotated[
        Path, typer.Argument(help="workspace with model_new.py and kernels/, or one Python file")
    ],
    task: Annotated[
        Path | None, typer.Option("--task", help="task file; by default model.py of the workspace")
    ] = None,
    device: Device = "",
    precision: Annotated[str, typer.Option("--precision", help="strict-fp32 or tf32")] = "",
    rules: Annotated[
        str, typer.Option("--rules", help="kernel-only, or any: torch may compute, and nothing is screened")
    ] = "",
    weights: Annotated[
        str, typer.Option("--weights", help="state_dict, or seed: equal secret seeds of both constructors")
    ] = "",
    tolerance: Annotated[str, typer.Option("--tolerance", help="strict, or KernelBench's: kernelbench")] = "",
    against: Annotated[
        Path | None,
        typer.Option("--against", help="another workspace or file, to compare with instead of torch.compile"),
    ] = None,
    cold_cache: Annotated[
        bool, typer.Option("--cold-cache", help="on a GPU: no input is in the L2 cache when calls begin")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="on a GPU: also what its hardware counts in a call, by ncu")
    ] = False,
    precise: Annotated[
        bool, typer.Option("--precise", help="measure in more rounds, for narrower intervals")
    ] = False,
) -> Output:
    """Build one candidate (a module with its kernels), check its outputs, and measure it against baselines.

    The baselines are the task in eager mode and under torch.compile; with `--against`, another candidate
    takes the place of the latter. The exit code is 0 even if the candidate fails, and 1 if the judge itself
    fails.
    """
    chosen = {
        "precision": precision,
        "sandbox.rules": rules,
        "sandbox.weights": weights,
        "sandbox.tolerance": tolerance,
        "sandbox.input_cache": "cold" if cold_cache else "",
        "sandbox.counters": "true" if counters else "",
    }
    overrides = [f"{name}={value}" for name, value in chosen.items() if value]
    # A service judges with its own number of rounds.
    is_remote = bool(options.resolve(*overrides, device=device).params.pool.service)
    refuse(
        (
            counters and is_remote,
            "--counters: pool.service judges with its own parameters; set sandbox.counters there.",
        )
    )
    resolved = options.resolve_for_judging(
        *overrides, defaults=() if precise or is_remote else QUICK, device=device
    )
    refuse(
        *(
            (
                is_chosen and resolved.params.device == "cpu",
                f"{option}: the device is cpu, and the option is for a GPU; add --device cuda.",
            )
            for option, is_chosen in (("--cold-cache", cold_cache), ("--counters", counters))
        )
    )
    from components.judge.pool.open_pool import judge_workdir
    from components.judge.verdict import Labels, counter_lines, rates_line

    verdict = judge_workdir(
        resolved.params, workdir, task, home_of(resolved) / "judge", print_line, against=against
    )
    reason = f" ({verdict.reason})" if verdict.reason else ""
    print_line(f"{verdict.status}{reason}, milestone {verdict.milestone}")
    if (labels := Labels.of(resolved.params.sandbox)) != Labels():
        print_line(f"  judged with {labels}")
    names = {"eager": "eager", "compile": "torch.compile", "against": str(against)}
    for name, ratio in verdict.speedup:
        if ratio is not None:
            interval = f"(95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
            print_line(f"  {ratio.estimate:.3f}x {names[name]} {interval}")
    limit, seconds = verdict.seconds.limit, verdict.seconds.candidate
    if limit and seconds:
        allowed = f"{limit / seconds:.0%} of what the device allows, {limit * 1e6:.1f} us a call"
        print_line(f"  {allowed}. {rates_line(verdict)}".rstrip())
    for line in (*(f"  {line}" for line in counter_lines(verdict)), *filter(None, [verdict.log])):
        print_line(line)
    return Output(
        verdict.model_dump(mode="json"),
        ExitCode.FAILED if verdict.status == "infrastructure" else ExitCode.DONE,
    )


@with_common_options()
def optimize(
    options: CommonOptions,
    module: Annotated[
        Path,
        typer.Argument(help="file with the class Model, get_inputs and get_init_inputs"),
    ],
    policy: Policy = "champion",
    model: ServerModel = "",
    device: Device = "",
    attempts: Annotated[
        int, typer.Option("--attempts", min=0, max=100_000, help="trajectories; 0 is the policy's default")
    ] = 0,
    turns: Annotated[
        int,
        typer.Option(
            "--turns", min=0, max=100_000, help="turns of one trajectory; 0 is the policy's default"
        ),
    ] = 0,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="seconds after which no turn begins; 0 is no limit")
    ] = 0,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="folder to write; by default optimized-NAME in the current folder"),
    ] = None,
) -> Output:
    """Search for a kernel that makes a PyTorch module faster, and write it with its measurements to a folder.

    If no faster kernel is found, the report says so. The exit code is 0 in both cases.
    """
    resolved = options.resolve_for_judging(device=device)
    from components.agent.optimize.export import FILES, export, headline
    from components.agent.optimize.search import find_kernel
    from components.cli.models import find_policy
    from components.core.files import check_replaceable
    from components.core.task import load_task
    from components.judge.pool.local_pool import with_any_duration

    task = load_task(module)
    folder = out_folder or Path(f"optimized-{module.stem}")
    check_replaceable(folder, "the output of an optimisation", FILES)
    chosen = find_policy(policy, model, resolved)
    params, home = with_any_duration(chosen.params), home_of(resolved)
    with judge_session(params, home, use_service=True) as (pool, view):
        pool.prepare()
        outcome = find_kernel(
            chosen,
            task,
            pool,
            attempts=attempts,
            turns=turns,
            seconds=budget,
            origin=str(module),
            progress=view,
        )
    record = export(outcome, params, folder, home / "judge" / "builds", f"{policy} ({chosen.version})")
    for line in (headline(outcome), *(f"  {note}" for note in outcome.notes), f"{folder}/report.md"):
        print_line(line)
    return Output(record)
