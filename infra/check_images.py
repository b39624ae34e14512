"""Check the start command of every image, as far as a machine without containers and GPUs can.

    python infra/check_images.py

The commands are those of the Containerfiles, of compose.yaml and, where kubectl is installed, of the rendered
overlays. Files that an image copies must exist, and a start command must name a program of this environment
that accepts its subcommands and options. For an option that names a class, the class is imported from only
the files that the image copies. Programs that are not installed here, such as vllm, are listed as not
checked. The exit code is 1 if something is wrong.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
INFRA = PROJECT / "infra"
OVERLAYS = ("cpu", "h20")
# An option whose value is a class in the image's own files.
CLASS_OPTION = "--worker-extension-cls"


@dataclass(frozen=True)
class Start:
    """A start command of an image, as words.

    `where` names the file or the Kubernetes object in which the command is written.
    """

    image: str
    where: str
    words: tuple[str, ...]


def instructions(text: str, name: str) -> list[str]:
    """Return the arguments of each instruction with this name in a Containerfile."""
    joined = re.sub(r"\\\n\s*", "", text)
    return re.findall(rf"^{name} (.+)$", joined, re.MULTILINE)


def containerfiles() -> dict[str, str]:
    """Return the text of each Containerfile by the name of its image."""
    return {
        f"cuda-agent/{path.stem}": path.read_text()
        for path in sorted((INFRA / "containers").glob("*.Containerfile"))
    }


def entrypoint(image: str) -> tuple[str, ...]:
    found = instructions(containerfiles()[image], "ENTRYPOINT")
    return tuple(json.loads(found[-1])) if found else ()


def starts() -> Iterator[Start]:
    """Yield every start command of the project's images."""
    files = containerfiles()
    for image, text in files.items():
        for command in instructions(text, "CMD"):
            if command.startswith("["):  # the CMD of a HEALTHCHECK is on its line
                yield Start(image, "Containerfile", (*entrypoint(image), *json.loads(command)))
    for name, service in yaml.safe_load((INFRA / "compose.yaml").read_text())["services"].items():
        if service["image"] in files and "command" in service:
            words = (*entrypoint(service["image"]), *service["command"])
            yield Start(service["image"], f"compose {name}", words)
    if shutil.which("kubectl") is None:
        return
    for overlay in OVERLAYS:
        command = ["kubectl", "kustomize", str(INFRA / "kustomize" / "overlays" / overlay)]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for document in yaml.safe_load_all(rendered):
            template = document.get("spec", {}).get("template", {})
            for container in template.get("spec", {}).get("containers", ()):
                image = container["image"].partition(":")[0]
                where = f"{overlay} {document['kind']} {document['metadata']['name']}"
                yield Start(image, where, (*entrypoint(image), *container.get("args", ())))


@functools.cache
def help_text(words: tuple[str, ...]) -> str | None:
    """Return what a program prints for --help, or None if it does not accept the subcommands."""
    done = subprocess.run([*words, "--help"], cwd=PROJECT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode == 0 else None


def check(start: Start) -> tuple[str, str]:
    """Check a start command, and return `ok`, `not checked` or `wrong`, and a text with details."""
    words = list(start.words)
    if words[:2] == ["tini", "--"]:
        if "tini" not in " ".join(instructions(containerfiles()[start.image], "RUN")):
            return "wrong", "the image does not install tini"
        del words[:2]
    options = dict(
        option.partition("=")[::2] if "=" in option else (option, following)
        for option, following in zip(words, [*words[1:], ""], strict=True)
        if option.startswith("--")
    )
    if (name := options.get(CLASS_OPTION)) and (problem := import_problem(start.image, name)):
        return "wrong", problem
    # A path names a script of the project.
    beside = PROJECT / words[0] if "/" in words[0] else Path(sys.executable).with_name(words[0])
    program = sys.executable if words[0] == "python" else str(beside) if beside.exists() else ""
    if not program:
        return "not checked", f"{words[0]} is not installed here"
    commands = [word for word in words[1:3] if re.fullmatch(r"[\w./-]+", word) and not word.startswith("-")]
    if words[0] in ("python", "cuda-agent", "mlflow"):  # with one subcommand, or a script
        commands = commands[:1]
    text = help_text((program, *commands))
    if text is None:
        return "wrong", f"{' '.join([words[0], *commands])} --help fails"
    unknown = [option for option in options if option not in text]
    return ("wrong", f"no option {', '.join(unknown)}") if unknown else ("ok", " ".join(words[:3]))


def import_problem(image: str, name: str) -> str:
    """Return why the class `name` cannot be imported from the files that the image copies, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        for sources in instructions(containerfiles()[image], "COPY"):
            *paths, target = sources.split()
            for path in paths:
                into = Path(folder, Path(target).relative_to("/opt/cuda-agent"))
                if (PROJECT / path).is_dir():
                    shutil.copytree(PROJECT / path, into, dirs_exist_ok=True)
                else:
                    into.mkdir(parents=True, exist_ok=True)
                    shutil.copy(PROJECT / path, into)
        module, _, attribute = name.rpartition(".")
        program = (
            f"import sys; sys.path[:] = [{folder!r}] + [p for p in sys.path if p and p != {str(PROJECT)!r}]; "
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
            f"import {module} as m; assert m.__file__.startswith({folder!r}); m.{attribute}"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"{name}: {done.stderr.strip().splitlines()[-1]}"


def missing_files() -> list[str]:
    """Return the files that a Containerfile copies and that do not exist."""
    return [
        f"{image}: COPY {path}: no such file"
        for image, text in containerfiles().items()
        for sources in instructions(text, "COPY")
        for path in sources.split()[:-1]
        if not (PROJECT / path).exists()
    ]


def main() -> int:
    problems = missing_files()
    for start in starts():
        result, why = check(start)
        print(f"{result:11}  {start.image:26}  {start.where:32}  {why}")
        problems += [f"{start.where}: {why}"] if result == "wrong" else []
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
