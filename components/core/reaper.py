"""The reaper: a process that kills all descendants of another process after that process has ended.

A killed process cannot stop its children (DVC and the programs that DVC runs, Prefect's server, vLLM servers,
compile workers). They would continue, hold locks and memory, and write files that the resumed run uses. A
signal at the parent's death (`PR_SET_PDEATHSIG`) reaches only children and not their children, so a run first
starts a reaper.
"""

import os
import secrets
import subprocess

# Environment variable with the mark of a run, which all processes that the run starts inherit.
VARIABLE = "CUDA_AGENT_LEASH"
# Program of the reaper. Its `cat` ends when the run's end of the pipe closes. A process may start another
# one after the list was made and before it is killed, so the list is made until it is empty. `kill` is the
# shell's own, because small images have no such program.
REAPER = """
cat
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    found=$(grep -lszxF "$1" /proc/[0-9]*/environ)
    [ -n "$found" ] || exit
    for file in $found; do file=${file#/proc/}; kill -KILL "${file%/environ}"; done
done
"""


def start_reaper() -> None:
    """Start a reaper, which kills all later descendants of the current process after that process has ended.

    The standard input of the reaper is a pipe whose other end only the current process holds. The pipe closes
    when this process ends. Then the reaper kills every process whose environment variable VARIABLE has the
    mark that this call sets in the current process and that processes started later inherit. A second call in
    the same process does nothing.
    """
    if os.environ.get(VARIABLE, "").startswith(f"{os.getpid()}-"):
        return
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    read_end, write_end = os.pipe()
    # The reaper gets a session of its own, so that Ctrl-C in the terminal does not end it.
    subprocess.Popen(
        ["sh", "-c", REAPER, "reaper", f"{VARIABLE}={mark}"],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)
    # `write_end` is never closed and never inherited, so the pipe closes exactly when this process ends.
    assert not os.get_inheritable(write_end)
    os.environ[VARIABLE] = mark
    # Otherwise setproctitle, with which vLLM names its engine's process, overwrites the environment that the
    # reaper reads.
    os.environ["SPT_NOENV"] = "1"
