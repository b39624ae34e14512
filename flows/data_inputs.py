"""Compute the inputs of the data set, its code and parameters, which decide whether it is built again."""

from pathlib import Path
from typing import Any

from components.core.files import digest_json
from components.core.params import Params
from components.core.sources import project_digests
from components.synthesis.operator_table import library_versions
from flows.run_context import PipelineRun

# Source paths whose change causes the data set to be built again. The judge's sources are not listed, because
# the data set depends on the judge only through the parameters and the verdicts.
MAKERS = ("components/synthesis/", "components/core/task.py")


def maker_digest(run: PipelineRun) -> str:
    """Return the digest of the code that makes the data set.

    It covers the sources in MAKERS, the library versions, and the number of the request to build the data set
    again (`--from dataset`), which is 0 if there is none.
    """
    files = {name: digest for name, digest in project_digests().items() if name.startswith(MAKERS)}
    return digest_json([files, library_versions(), run.rerun_number("dataset")])


def absolute_values(params: Params) -> dict[str, Any]:
    """Return all parameters as nested dictionaries, with the paths in data.against made absolute.

    DVC runs in the folder of its workspace, where relative paths would name other files.
    """
    values: dict[str, Any] = params.model_dump(mode="json")
    values["data"]["against"] = [str(Path(path).resolve()) for path in params.data.against]
    return values
