"""Build and run untrusted code in sandboxes, which are made with bubblewrap and seccomp.

Untrusted are the sources of tasks (PyTorch modules that are to be made faster) and of candidates
(implementations of a task's module that are to be judged). Their code runs in runners, which are sandboxed
processes. A zygote, a process that has loaded torch already, forks runners on demand.

Of the project, this package imports only `core`. Other packages mainly use `runner_factory.RunnerFactory`,
`runner_process.Runner`, `build.Builder` and `preflight.check_isolation`. The code that runs inside the
sandbox is in `inside/`. Start reading with `runner_factory.py`.
"""
