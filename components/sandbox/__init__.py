"""Running untrusted processes: isolation with bubblewrap and seccomp, the zygote, runners, and builds.

This package imports only `core`. Other packages use `runner_factory.RunnerFactory`, `build.Builder`,
`isolation` and `preflight.check_isolation`. The code that runs inside the sandbox is in `zygote.py`,
`runner.py`, `runner_roles.py` and the modules that they import. Start reading with `runner_factory.py`.
"""
