"""Environment for Harbor on a machine without containers: bubblewrap on a folder, with the system's /usr.

    PYTHONPATH=tests/environments harbor run -p tasks -a oracle --env harbor_bubblewrap:Bubblewrap

The root is a folder that lasts as long as the environment, so /app, /tests and /logs are where tasks expect
them. The task's image is not used: its Python is the system's. It has the machine's network.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

LINKS = ("bin", "sbin", "lib", "lib64")


class Bubblewrap(BaseEnvironment):
    """One environment, whose root is a temporary folder."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None:
        if shutil.which("bwrap") is None:
            raise FileNotFoundError("bwrap is missing; install bubblewrap.")

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        self.workdir = self.task_env_config.workdir or "/"
        for folder in (self.workdir, "/tmp", "/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests"):
            self._host(folder).mkdir(parents=True, exist_ok=True)
        for name in LINKS:
            (self.root / name).symlink_to(f"usr/{name}")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root)

    def _host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._host(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._host(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._host(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._host(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._host(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        values = {"PATH": "/usr/bin:/bin"} | (self._merge_env(env) or {})
        options = f"--bind {self.root} / --ro-bind /usr /usr --ro-bind /etc /etc --proc /proc --dev /dev"
        variables = [word for name, value in values.items() for word in ("--setenv", name, value)]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", "--die-with-parent", "--unshare-pid", *options.split(), "--clearenv", *variables),
            *("--chdir", cwd or self.workdir, "bash", "-c", command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)
