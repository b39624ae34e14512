"""The table of mined operators, made once for each pair of torch and transformers versions."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.config import PROJECT
from components.core.files import atomic_folder, digest_file, digest_json
from components.core.progress import Progress

if TYPE_CHECKING:
    from components.synthesis.mined_operators import OperatorTable

RULES = ("mined_operators.py", "mine_torch.py", "mine_transformers.py", "source_extraction.py")


def library_versions() -> tuple[str, str]:
    """Of the installed torch and transformers, from their metadata."""
    return importlib.metadata.version("torch"), importlib.metadata.version("transformers")


def load_operator_table(folder: Path, progress: Progress) -> OperatorTable:
    """The table below `folder`, mined first where there is none of these versions and rules. Mining takes about a
    minute of one core."""
    from components.synthesis.mined_operators import OperatorTable, read_table, write_table

    rules = [digest_file(PROJECT / "components" / "synthesis" / name) for name in RULES]
    place = folder / digest_json([library_versions(), rules])[:16]
    if not (place / "operators.json").is_file():
        from components.synthesis import mine_torch, mine_transformers

        progress.update("seeds", 0, 2)
        forms, without = mine_torch.mine()
        progress.update("seeds", 1, 2, forms=len(forms), left_out=len(without))
        modules, others = mine_transformers.mine()
        progress.update("seeds", 2, 2, modules=len(modules), left_out=len(without) + len(others))
        with atomic_folder(place) as temporary:
            write_table(
                temporary,
                OperatorTable(*library_versions(), tuple(forms), tuple(modules), (*without, *others)),
            )
    return read_table(place)
