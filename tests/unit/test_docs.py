"""The documents are true: every command, option, parameter, file and link that they name exists."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from components.cli.main import app
from components.core.config import KNOWN, PROJECT, resolve

PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
IDS = [page.relative_to(PROJECT).as_posix() for page in PAGES]
CODE = re.compile(r"```(?:\w*)\n(.*?)```|`([^`\n]+)`", re.DOTALL)
ROOTS = {path.name for path in PROJECT.iterdir()} - {".git", ".venv", "models"}


def code_of(page: Path) -> list[str]:
    """Every code span, and every line of every code block, without its prompt and trailing comment."""
    found = []
    for block, span in CODE.findall(page.read_text()):
        found += [
            line.removeprefix("$ ").partition("  #")[0].strip() for line in (block or span).splitlines()
        ]
    return found


def commands(page: Path, program: str) -> list[list[str]]:
    words = [shlex.split(text) for text in code_of(page) if re.match(rf"(\S*/)?{program}\b", text)]
    return [line[1:] for line in words]


def follow(words: list[str]) -> tuple[Any, list[str]]:
    """The subcommand that the words lead to, and what is left of them; fails where there is none.

    Typer carries a click of its own in some versions, so groups and arguments are known by what they have.
    """
    command: Any = typer.main.get_command(app)
    while "commands" in vars(command) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"cuda-agent has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_named_exists_with_its_options(page: Path) -> None:
    for words in commands(page, "cuda-agent"):
        command, rest = follow(words)
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        flags = {name for option in options if option.is_flag for name in option.opts}
        valued = {name for option in options if not option.is_flag for name in option.opts}
        given, after_option = 0, False
        for word in rest:
            if word.startswith("-"):
                assert word in flags | valued, f"cuda-agent {' '.join(words)}: no option {word}"
            else:
                given += not after_option
            after_option = word in valued
        assert given <= len(command.params) - len(options), (
            f"cuda-agent {' '.join(words)}: too many arguments"
        )


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_parameter_set_in_a_command_is_accepted(page: Path) -> None:
    for words in commands(page, "cuda-agent"):
        profile = words[words.index("--profile") + 1] if "--profile" in words else ""
        sets = [
            value for option, value in itertools.pairwise(words) if option == "--set" and value != "KEY=VALUE"
        ]
        resolve(profile, tuple(sets))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_parameter_named_exists(page: Path) -> None:
    sections = {key.partition(".")[0] for key in KNOWN if "." in key}
    for text in code_of(page):
        if (
            re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text)
            and text.partition(".")[0] in sections
            and not (PROJECT / text).exists()
        ):
            assert text in KNOWN, f"no parameter {text}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_make_target_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page, "make"):
        assert {word for word in words if "=" not in word} <= targets, words


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_of_the_repository_named_exists(page: Path) -> None:
    for text in code_of(page):
        path = text.rstrip("/").partition(":")[0]
        in_root = path.partition("/")[0] in ROOTS or re.fullmatch(r"[\w.-]+\.(toml|yaml|lock|txt|cfg)", path)
        if re.fullmatch(r"[\w./-]+", path) and in_root and path not in ("home",):
            assert (PROJECT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_stages_named_for_from_are_the_stages(page: Path) -> None:
    from flows.run_context import STAGES

    for words in commands(page, "cuda-agent"):
        if "--from" in words and (stage := words[words.index("--from") + 1]) != "STAGE":
            assert stage in STAGES, words


@pytest.mark.parametrize("page", [*PAGES, PROJECT / "CHANGELOG.md"], ids=[*IDS, "CHANGELOG.md"])
def test_prose_has_at_most_110_columns(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    too_long = [line for line in prose.splitlines() if len(line) > 110 and not line.startswith("|")]
    assert not too_long, f"{page.name}: {too_long[0]}"


def test_comments_of_the_parameters_have_at_most_110_columns() -> None:
    lines = (PROJECT / "params.yaml").read_text().splitlines()
    assert [line for line in lines if line.lstrip().startswith("#") and len(line) > 110] == []


def test_a_command_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no command"):
        follow(["models", "explode"])


@pytest.mark.parametrize("page", sorted((PROJECT / "docs").rglob("*.svg")), ids=lambda page: page.name)
def test_pictures_are_sound_and_need_nothing_else(page: Path) -> None:
    assert ElementTree.parse(page).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.findall(r'href="(?!#)', page.read_text())
