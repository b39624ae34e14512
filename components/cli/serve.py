"""The command `cuda-agent serve`: keep a judge ready for the commands that measure."""

from components.cli.common import (
    CommonOptions,
    Device,
    default_device,
    home_of,
    print_line,
    with_common_options,
)


@with_common_options("", prints_output=False)
def serve(options: CommonOptions, device: Device = "") -> None:
    """Keep a judge with its processes and baselines ready, until Ctrl-C or SIGTERM.

    `cuda-agent judge`, `cuda-agent optimize` and the utilities of a workspace use it if they have the same
    home folder and device.
    """
    resolved = options.resolve_for_judging(f"device={device or default_device()}")
    from components.judge.resident import serve as serve_judge

    def started(path: object) -> None:
        print_line(f"judging on {resolved.params.device} at {path}; Ctrl-C ends it")

    serve_judge(resolved.params, home_of(resolved) / "judge", started)
