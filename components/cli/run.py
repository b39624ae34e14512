"""The command `cuda-agent run`, which runs the pipeline in this process."""

from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    print_line,
    stderr_console,
    with_common_options,
)


@with_common_options()
def run(
    options: CommonOptions,
    redo_from: Annotated[
        str, typer.Option("--from", metavar="STAGE", help="repeat this stage and all that follow")
    ] = "",
) -> Output:
    """Run the pipeline: data set, cold start, four training stages, evaluation, registration, gates.

    The cold start makes the first policy, and the gates decide on the promotion of the new version. The third
    stage, critic, is left out if agentic.advantages is not critic. If a run with the same parameters and code
    is finished, only its result is printed. An interrupted run continues where it stopped. The exit code is 4
    if the new version is neither promoted nor waits for approval.
    """
    from components.cli.progress_view import ProgressView, final_table
    from components.core.reaper import start_reaper
    from flows import run_context
    from flows.processes import prefect_server

    resolved, console = options.resolve(), stderr_console()
    pipeline_run = run_context.open_run(resolved, redo_from)
    record = run_context.finished(pipeline_run)
    if record is not None:
        print_line(f"This run is finished, nothing is left to do: {pipeline_run.folder}")
    else:
        run_context.check_training(pipeline_run.params)
        run_context.check_environment(pipeline_run)
        run_context.prepare_home(pipeline_run.home)
        with run_context.home_lock(pipeline_run.home):
            run_context.prepare_environment(pipeline_run.home)
            start_reaper()
            print_line(f"run {pipeline_run.run_id}, profile {resolved.profile}, home {pipeline_run.home}")
            for line in run_context.undecidable_gates(pipeline_run.params):
                print_line(f"warning: {line}")
            with prefect_server(pipeline_run.home) as server:
                from components.registry.tracking import import_store
                from flows.nightly import run_pipeline

                if server is not None:
                    import_store(pipeline_run.params.registry)
                    server.wait()
                    print_line(f"prefect {server.url.removesuffix('/api')} until the run ends")
                with ProgressView(console) as view:
                    record = run_pipeline(pipeline_run, view, server)
    final_table(record, run_context.interface_commands(pipeline_run, record), console)
    is_passed = record["gate"]["verdict"] in ("promoted", "waiting")
    return Output(record, ExitCode.DONE if is_passed else ExitCode.REFUSED)
