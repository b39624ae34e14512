"""Build backend (PEP 517, PEP 660) that installs a checkout as editable and refuses wheels and archives.

The application reads `params.yaml`, `dvc.yaml`, `agent_workdir/` and C++ sources from its checkout, which no
wheel would contain.
"""

from __future__ import annotations

from typing import NoReturn

from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]


def _refuse(*_: object, **__: object) -> NoReturn:
    raise SystemExit(
        "cuda-agent runs from its checkout only: run `make environment` there, or `pip install -e .` in your "
        "environment."
    )


build_wheel = build_sdist = get_requires_for_build_wheel = get_requires_for_build_sdist = _refuse
