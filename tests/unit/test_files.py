"""Folders that replace others in one step."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.core import files
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.files import atomic_folder, check_replaceable, remove_stale, remove_tree, verify_files


def replace(path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(path) as folder:
            (folder / "file").write_text(text)
    assert (path / "file").read_text() == "new"
    assert os.listdir(path.parent) == [path.name], "nothing of the old folder is left"


def test_a_folder_that_is_replaced_is_at_its_path_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "folder", os.rename

    def watched(*paths: Any) -> None:
        rename(*paths)
        assert (path / "file").is_file(), "a process that is killed here leaves nothing at the path"

    monkeypatch.setattr(files.os, "rename", watched)
    replace(path)


def test_a_folder_is_replaced_on_a_file_system_that_cannot_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "libc", SimpleNamespace(renameat2=lambda *_: -1))
    replace(tmp_path / "folder")


def test_a_link_that_leads_nowhere_is_removed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    remove_tree(tmp_path / "link")
    assert not os.path.lexists(tmp_path / "link")


def test_an_old_link_is_stale_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("")
    for name, target in {"old": "nowhere", "newer": "nowhere", "old too": "new"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
        if name.startswith("old"):
            os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    remove_stale(tmp_path, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "newer"]


@pytest.mark.parametrize(
    ("files", "other"),
    [((), ""), (("result", "notes"), ""), (("notes",), "than a set;"), (("result", "mine"), r"\(mine\)")],
)
def test_only_a_folder_without_other_files_is_replaced(
    tmp_path: Path, files: tuple[str, ...], other: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=other) if other else contextlib.nullcontext():
        check_replaceable(tmp_path, "a set", ("result", "notes"))


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    for folder, fault in {".": "current folder", "../file/out": "file is no folder", "/": "holds"}.items():
        with pytest.raises(UserError, match=fault):
            check_replaceable(Path(folder), "a data set", ("first",))
    check_replaceable(Path("new/out"), "a data set", ("first",))


def test_a_file_or_a_broken_link_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(UserError, match="holds something else than a set; give a new"):
            check_replaceable(tmp_path / name, "a set", ("result",))
    check_replaceable(tmp_path / "new", "a set", ("result",))


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"files": 5}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json: is missing or damaged.*; delete the folder"):
        verify_files(tmp_path)


@pytest.mark.parametrize("files", ["{}", '[[1, "x"]]'])
def test_a_manifest_whose_digest_is_wrong_is_named_before_any_file_is_read(
    tmp_path: Path, files: str
) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"files": {files}, "digest": "0"}}')
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"manifest\.json: its digest does not match the files that it lists"):
        verify_files(tmp_path)


def test_files_are_read_as_they_were_written_whatever_the_locale_is(tmp_path: Path) -> None:
    program = r"""
import sys
from pathlib import Path
from components.core.files import read_json, write_changed, write_json
path = Path(sys.argv[1])
write_json(path, "J\xfcrgen")
assert read_json(path) == "J\xfcrgen"
write_changed(path, "J\xfcrgen")
write_changed(path, "J\xfcrgen")
"""
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file")], env=plain, check=True, cwd=PROJECT
    )
