"""Running untrusted processes: isolation with bubblewrap and seccomp, the zygote, runners, and builds.

Imports `core`. Other packages use `runner_factory.RunnerFactory`, `build.Builder`, `isolation` and
`preflight.check_isolation`. Everything from `zygote.py` to `runner_roles.py` runs inside the sandbox. Start
with `runner_factory.py`.
"""
