"""Load the table of mined operators, which is made once for each version of torch and transformers.

Mined operators are the operators of torch and modules of transformers that were tried and that tasks can use.
"""

import importlib.metadata
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from components.core.config import PROJECT
from components.core.files import atomic_folder, atomic_write, digest_json
from components.core.progress import Progress
from components.core.sources import source_digest

if TYPE_CHECKING:
    from components.synthesis.mined_operators import OperatorTable

# Source files below components/ on which the table depends. If one of them changes, the table is mined again.
RULES = (
    "bootstrap/operator_chain.py",
    "synthesis/core_composer.py",
    "synthesis/mined_operators.py",
    "synthesis/mine_torch.py",
    "synthesis/mine_transformers.py",
    "synthesis/source_extraction.py",
    "synthesis/torch_rules.py",
)


def library_versions() -> tuple[str, str]:
    """Return the installed versions of torch and transformers, without importing the libraries."""
    return importlib.metadata.version("torch"), importlib.metadata.version("transformers")


def load_operator_table(folder: Path, progress: Progress) -> "OperatorTable":
    """Return the table of operators that tasks can use, for the installed torch and transformers.

    The table is read from a folder below `folder` that is named by a digest of the libraries' versions and
    the sources in RULES. If that folder is missing, all operators are tried first ("mined") and the table is
    stored, which takes about a minute on one core; the steps are reported to `progress`.
    """
    from components.synthesis.mined_operators import OperatorTable

    rules = [source_digest(PROJECT / "components" / name) for name in RULES]
    table = folder / digest_json([library_versions(), rules])[:16]
    if not (table / "operators.json").is_file():
        from components.synthesis import mine_torch, mine_transformers

        progress.update("seeds", 0, 2)
        templates, without = mine_torch.mine()
        progress.update("seeds", 1, 2, forms=len(templates), left_out=len(without))
        modules, others = mine_transformers.mine()
        progress.update("seeds", 2, 2, modules=len(modules), left_out=len(without) + len(others))
        with atomic_folder(table) as temporary:
            found = OperatorTable(*library_versions(), tuple(templates), tuple(modules), without | others)
            text = json.dumps(asdict(found), indent=1, ensure_ascii=False)
            atomic_write(temporary / "operators.json", f"{text}\n")
    return TypeAdapter(OperatorTable).validate_json((table / "operators.json").read_bytes())
