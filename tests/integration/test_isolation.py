"""What untrusted code sees and reaches inside a runner, as it reports through an exception's text."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import judge_fixtures as corpus
import pytest

from components.core.config import PROJECT
from components.core.errors import InfrastructureError
from components.judge import candidate, compile_cache
from components.judge.baselines import COMPILE
from components.judge.judge import Judge
from components.sandbox import seccomp_filter
from components.sandbox.runner_process import RunnerError

REPORT = """
import ctypes, fcntl, json, os, socket

def attempt(action):
    try:
        return repr(action())[:80]
    except BaseException as error:
        return type(error).__name__

def write(path):
    with open(path, "w") as file:
        file.write("left behind")
    return "written"

def status():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    names = ("Uid", "Gid", "CapEff", "CapBnd", "CapPrm", "NoNewPrivs", "Seccomp")
    return {name: fields[name].strip() for name in names}

def reach(family):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(("127.0.0.1", 22) if family == socket.AF_INET else "/run/dbus/system_bus_socket")

"""
PLACES = (
    "/workspace/mark",
    "/tmp/mark",
    "/dev/shm/mark",
    "/dev/mark",
    "/cache/mark",
    "/mark",
    "/usr/mark",
    "/etc/mark",
    "/proc/sys/kernel/hostname",
)


def ask(judge: Judge, expression: str) -> Any:
    """Return the value of `expression` in a candidate's runner, with the source screens off."""
    code = REPORT + "raise RuntimeError('<<' + json.dumps(" + expression + ") + '>>')\n"
    verdict = judge.verdict(corpus.TASK, corpus.files("honest", "simd") | {"model_new.py": code})
    assert verdict.status == "load_failed", (verdict.status, verdict.reason, verdict.log)
    return json.loads(verdict.log.rpartition("RuntimeError: <<")[2].rpartition(">>")[0])


@pytest.fixture(autouse=True)
def no_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "screen_python", lambda code: None)


def test_candidate_is_nobody_without_any_privilege(judge: Judge) -> None:
    seen = ask(judge, "status()")
    assert set(seen["Uid"].split()) == set(seen["Gid"].split()) == {"65534"}
    assert int(seen["CapEff"], 16) == int(seen["CapPrm"], 16) == int(seen["CapBnd"], 16) == 0
    assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")


def test_candidate_sees_its_own_processes_only(judge: Judge) -> None:
    assert ask(judge, "[name for name in os.listdir('/proc') if name.isdigit()]") == ["1"]
    assert ask(judge, "os.getpid()") == 1
    assert ask(judge, "attempt(lambda: os.kill(2, 0))") == "ProcessLookupError"
    assert (
        ask(
            judge,
            "[attempt(os.fork), attempt(lambda: os.execv('/usr/bin/true', ['true'])), attempt(lambda:"
            " os.posix_spawn('/usr/bin/true', ['true'], {}))]",
        )
        == ["PermissionError"] * 3
    )


def test_a_candidate_that_ends_at_once_is_judged_however_busy_the_machine_is(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: time.sleep(0.5) or opened(pid))
    assert ask(judge, "1") == 1


def test_candidate_has_no_network(judge: Judge) -> None:
    assert (
        ask(
            judge, "[attempt(lambda: reach(f)) for f in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)]"
        )
        == ["PermissionError"] * 3
    )
    interfaces = ask(
        judge,
        "attempt(lambda: [line.split(':')[0].strip() for line in"
        " open('/proc/net/dev').read().splitlines()[2:]])",
    )
    assert interfaces in ("['lo']", "[]")


def test_candidate_writes_to_its_workspace_only_and_finds_nothing_of_its_predecessor(judge: Judge) -> None:
    for _ in range(2):
        assert ask(judge, f"[os.path.exists(p) for p in {PLACES[:-1]!r}]") == [False] * (len(PLACES) - 1)
        written = ask(judge, f"[attempt(lambda: write(p)) for p in {PLACES!r}]")
        assert written[0] == "'written'"
        refused = dict(zip(PLACES, written, strict=True))
        assert refused.pop("/cache/mark") == "FileNotFoundError"  # it is the compile baselines' alone
        del refused[PLACES[0]]
        assert set(refused.values()) <= {"PermissionError", "OSError"}, refused


def test_candidate_sees_nothing_of_the_compile_baseline_and_cannot_change_its_archive(
    cold_judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = cold_judge
    monkeypatch.setattr(compile_cache, "user_cache", lambda name: tmp_path)
    with judge.bench(corpus.TASK) as bench:
        bench.baselines.get(COMPILE)
        (entry,) = tmp_path.iterdir()
        before = entry.read_bytes()
        places = [str(entry), str(tmp_path), "/warm", "/cache", "/workspace/inductor"]
        assert ask(judge, f"[p for p in {places!r} if os.path.exists(p)]") == []
        written = ask(judge, f"[attempt(lambda: write(p + '/mark')) for p in {places!r}]")
        assert set(written) <= {"PermissionError", "OSError", "FileNotFoundError"}, written
        links = "[attempt(lambda: os.readlink(f'/proc/self/fd/{n}')) for n in os.listdir('/proc/self/fd')]"
        descriptors = ask(judge, links)
        assert descriptors and not [name for name in descriptors if "artefacts" in name]
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


OVERWRITE = """
import os
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        library = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
        if os.pread(library, 4, 0) == bytes([127]) + b"ELF":
            os.pwrite(library, bytes(65536), 0)
            os.ftruncate(library, 0)
    except OSError:
        pass
"""


def test_a_candidate_cannot_change_the_library_that_the_next_one_with_its_kernels_gets(judge: Judge) -> None:
    """An ordinary account's runners have its uid outside, so that they could open its files for writing."""
    files = corpus.files("honest", "simd")
    for model in (files["model_new.py"] + OVERWRITE, files["model_new.py"]):
        verdict = judge.verdict(corpus.TASK, files | {"model_new.py": model}, compare_compile=None)
        assert verdict.status == "correct", (verdict.reason, verdict.log)
    opened = "os.open(f'/proc/self/fd/{number}', os.O_RDWR)"
    written = "attempt(lambda: os.pwrite(" + opened + ", b'x', 0))"
    header = "os.pread(number, 4, 0) == bytes([127]) + b'ELF'"
    names = "[int(name) for name in os.listdir('/proc/self/fd')]"
    libraries = f"[number for number in {names} if attempt(lambda: {header}) == 'True']"
    assert ask(judge, f"[{written} for number in {libraries}]") == ["PermissionError"]


def test_what_a_candidate_prints_is_not_there_for_the_next(judge: Judge) -> None:
    ask(
        judge,
        "attempt(lambda: os.write(1, b'an answer for the next') and os.write(2, b'an answer for the next'))",
    )
    assert (
        ask(judge, "[attempt(lambda: open(f'/proc/self/fd/{n}', 'rb').read(64)) for n in range(3)]")
        == ["b''"] * 3
    )


SEARCH = r"""
#include <cstring>
#include <stdexcept>
#include <string>

#include "raw.h"

// Finds the rest of a text in this process's own memory; the text is written one letter too large here.
KERNEL(forward) {
  char key[] = "B`TFDSFU`PG`UIF`GJSTU";
  for (char* c = key; *c; ++c) --*c;
  static char maps[1 << 20];
  long file = raw(OPEN, (long)"/proc/self/maps"), size = 0, got;
  while ((got = raw(READ, file, (long)maps + size, sizeof maps - 1 - size)) > 0) size += got;
  for (char* line = maps; *line; line = strchr(line, '\n') + 1) {
    char* p = line;
    auto hexadecimal = [&] {
      unsigned long value = 0;
      for (; *p != '-' && *p != ' '; ++p) value = 16 * value + (*p <= '9' ? *p - '0' : *p - 'a' + 10);
      return value;
    };
    const unsigned long low = hexadecimal(), high = (++p, hexadecimal());
    if (p[2] != 'w' || p[4] != 'p') continue;
    for (char* at = (char*)low; (at = (char*)memchr(at, key[0], (char*)high - at - 32)); ++at)
      if (at != key && !memcmp(at, key, sizeof key - 1) && at[sizeof key - 1] == ':')
        throw std::runtime_error("found " + std::string(at, 32));
  }
  throw std::runtime_error("nothing");
}
"""


def test_no_memory_holds_the_sources_of_another_candidate(judge: Judge) -> None:
    """All candidates' processes are forked from one zygote, and inherit its memory."""
    first = corpus.files("honest", "simd")
    first["model_new.py"] += "\n# A_SECRET_OF_THE_FIRST: 4711\n"
    assert judge.verdict(corpus.TASK, first, compare_compile=None).status == "correct"
    raw = (corpus.HERE / "exploits" / "raw.h").read_text()
    second = {"model_new.py": corpus.MODEL_NEW, "kernels/raw.h": raw, "kernels/forward.cpp": SEARCH}
    verdict = judge.verdict(corpus.TASK, second)
    assert verdict.log.strip().endswith("RuntimeError: nothing"), verdict.log


def test_candidate_cannot_see_the_machine(judge: Judge) -> None:
    hidden = [
        "/etc/shadow",
        "/etc/passwd",
        "/home",
        "/run",
        "/var",
        str(PROJECT / "README.md"),
        str(PROJECT / "params.yaml"),
        str(judge.builder.cache),
    ]
    assert ask(judge, f"[p for p in {hidden!r} if os.path.exists(p)]") == []
    environment = ask(judge, "sorted(os.environ)")
    assert not [name for name in environment if "TOKEN" in name or "KEY" in name or "SECRET" in name]


def test_shared_buffers_cannot_be_resized(judge: Judge) -> None:
    shared = (
        "[int(n) for n in os.listdir('/proc/self/fd') if 'memfd' in attempt(lambda:"
        " os.readlink(f'/proc/self/fd/{n}'))]"
    )
    refused = ask(
        judge, f"[attempt(lambda: os.ftruncate(fd, size)) for fd in {shared} for size in (0, 1 << 40)]"
    )
    assert len(refused) >= 6 and set(refused) <= {"PermissionError", "OSError"}


def test_memory_that_no_limit_counts_is_refused(judge: Judge) -> None:
    assert ask(judge, "attempt(lambda: os.memfd_create('m'))") == "PermissionError"
    assert ask(judge, "attempt(lambda: bytearray(1 << 36))") == "MemoryError"


def test_no_lock_on_a_common_file_carries_a_message(judge: Judge) -> None:
    lock = (
        "[attempt(lambda: f(os.open('/usr/bin/env', os.O_RDONLY), fcntl.LOCK_SH)) for f in (fcntl.flock,"
        " fcntl.lockf)]"
    )
    assert ask(judge, lock) == ["PermissionError"] * 2


ALLOWED_IN_BOTH = """
import ctypes, fcntl, json, os, sys
folder, code = sys.argv[1], bytes.fromhex(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
program = ctypes.create_string_buffer(code, len(code))
import struct
libc.prctl(38, 1, 0, 0, 0)
held = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
file, (reading, writing) = folder + "/file", os.pipe()
open(file, "w").close()
assert libc.prctl(22, 2, ctypes.create_string_buffer(held, len(held)), 0, 0) == 0

def refused(action):
    try:
        return action() == -1
    except OSError:
        return True

print(json.dumps([name for name, action in {
    "setuid": lambda: os.chmod(file, 0o4755),
    "setgid": lambda: os.chmod(file, 0o2755),
    "setuid by descriptor": lambda: os.fchmod(os.open(file, os.O_RDONLY), 0o6755),
    "setuid as it is made": lambda: os.open(folder + "/new", os.O_CREAT | os.O_WRONLY, 0o4755),
    "setuid without a name": lambda: os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o4755),
    "setuid as a node": lambda: os.mknod(folder + "/node", 0o104755),
    "fchmodat2": lambda: libc.syscall(452, -100, file.encode(), 0o4755, 0),
    "openat2": lambda: libc.syscall(437, -100, file.encode(), bytes(24), 24),
    "lease": lambda: fcntl.fcntl(os.open(file, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "watch": lambda: libc.inotify_init1(0),
    "pipe": lambda: fcntl.fcntl(writing, 1031, 1 << 20),
    "death signal": lambda: libc.prctl(1, 0, 0, 0, 0),
    "mode": lambda: os.chmod(file, 0o755),
    "file": lambda: os.open(folder + "/other", os.O_CREAT | os.O_WRONLY, 0o600),
}.items() if not refused(action)]))
"""


THREADS = """
#include <chrono>
#include <future>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

static int slow() {
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return 1;
}
static int once() {
  static const int value = slow();
  return value;
}
extern "C" int wake(int operation) {
  int word = 0;
  return syscall(SYS_futex, &word, operation, 1);
}
extern "C" int threads() {
  int first = 0, second = 0;
  std::promise<int> promise;
  std::thread a([&] { first = once(); }), b([&] { second = once(); });
  std::thread c([&] { promise.set_value(slow()); });
  const int third = promise.get_future().get();
  a.join(); b.join(); c.join();
  return first + second + third;
}
"""
WOKEN = """
import ctypes, json, struct, sys
code = bytes.fromhex(sys.stdin.read())
libc, library = ctypes.CDLL(None), ctypes.CDLL(sys.argv[1])
program = ctypes.create_string_buffer(code, len(code))
libc.prctl(38, 1, 0, 0, 0)
held = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
assert libc.prctl(22, 2, ctypes.create_string_buffer(held, len(held)), 0, 0) == 0
print(json.dumps([library.wake(1), library.wake(129), library.threads()]))
"""


@pytest.mark.parametrize("role", ["candidate", "task", "command"])
def test_no_role_may_do_what_outlives_it_or_is_counted_for_the_whole_account(
    role: str, tmp_path: Path
) -> None:
    program = seccomp_filter.seccomp_program(role).hex()
    done = subprocess.run(
        [sys.executable, "-c", ALLOWED_IN_BOTH, str(tmp_path)],
        input=program,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["mode", "file"]


def test_only_candidates_on_cpu_are_denied_to_wake_threads_at_a_shared_address(tmp_path: Path) -> None:
    """Threads that wait for a static variable or a promise, which libstdc++ would wake, go on."""
    source, library = tmp_path / "threads.cpp", tmp_path / "threads.so"
    source.write_text(THREADS)
    subprocess.run(["g++", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    for role, device, expected in (
        ("candidate", "cpu", [-1, 0, 3]),
        ("candidate", "cuda", [0, 0, 3]),
        ("task", "cpu", [0, 0, 3]),
    ):
        program = seccomp_filter.seccomp_program(role, device).hex()
        command = [sys.executable, "-c", WOKEN, str(library)]
        done = subprocess.run(command, input=program, capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout) == expected, (role, device)


def test_a_thread_has_the_descriptors_of_its_process(judge: Judge) -> None:
    """A thread cannot have its own descriptor table, whose open files no process limit would count."""
    clone, close_range = (
        "ctypes.CDLL(None).syscall(56, 0x50b00, 0, 0, 0, 0)",
        "ctypes.CDLL(None).syscall(436, 9000, 9001, 2)",
    )
    assert ask(judge, f"[{clone}, {close_range}, ctypes.CDLL(None).syscall(436, 9000, 9001, 0)]") == [
        -1,
        -1,
        0,
    ]


def test_a_runner_that_the_judge_cannot_watch_never_begins(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = corpus.census()
    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    with pytest.raises(InfrastructureError):
        judge.runner_factory.spawn(
            {"role": "describe", "code": "while True: pass", "precision": "strict-fp32"}, seconds=30
        )
    deadline = time.monotonic() + 20
    while corpus.census() - before:
        assert time.monotonic() < deadline, "it runs without a descriptor that could end it"
        time.sleep(0.05)


def test_no_lock_that_a_zygote_needs_is_there_to_be_held(judge: Judge) -> None:
    look = (
        "import os\nraise RuntimeError(sorted(n for p, _, names in os.walk('/warm') for n in names if"
        " n.endswith('.lock')), os.listdir('/warm'))"
    )
    header = {
        "role": "describe",
        "code": look,
        "precision": "strict-fp32",
        "zygote": "compile",
    }
    runner = judge.runner_factory.spawn(header, seconds=60)
    try:
        with pytest.raises(RunnerError) as caught:
            runner.receive()
    finally:
        runner.close()
    assert "RuntimeError: ([], ['" in caught.value.text, "no lock is seen, and the precompiled headers are"


def test_what_a_task_leaves_is_for_no_other_user(judge: Judge) -> None:
    assert judge.runner_factory.folder.stat().st_mode & 0o077 == 0


def test_candidate_goes_first_when_memory_runs_out(judge: Judge) -> None:
    assert ask(judge, "open('/proc/self/oom_score_adj').read().strip()") == "1000"


def test_sentinel_is_correct_after_all_this(judge: Judge, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("monkeypatch").undo()
    request.getfixturevalue("no_compile_baseline")
    assert judge.verdict(corpus.TASK, corpus.files("honest", "simd")).status == "correct"
