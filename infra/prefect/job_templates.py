"""Write the base job template of each work pool in pools.yaml.

    python infra/prefect/job_templates.py process|kubernetes FOLDER

FOLDER/<pool>.json is process.json or kubernetes.json, in which the values that pools.yaml sets for the pool
are the defaults, and FOLDER/<pool>.description is the pool's description. The environment of flow runs also
gets the place of Prefect's cached results, which is in the home (CUDA_AGENT_HOME) so that another worker
finds them, and this process's RAY_ADDRESS if it is set.
"""

import json
import os
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent


def main(workers: str, folder: str) -> None:
    settings = yaml.safe_load((HERE / "pools.yaml").read_text())
    environment = settings["environment"] | {
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": f"{os.environ['CUDA_AGENT_HOME']}/prefect/results"
    }
    if "RAY_ADDRESS" in os.environ:
        environment["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
    for name, pool in settings["pools"].items():
        template = json.loads((HERE / f"{workers}.json").read_text())
        variables = template["variables"]["properties"]
        values = pool["kubernetes"] if workers == "kubernetes" else {}
        for variable, value in (values | {"env": environment}).items():
            if variable not in variables:
                sys.exit(
                    f"pools.yaml: pool {name} sets {variable}, which {workers}.json does not know; "
                    f"give one of {', '.join(variables)}."
                )
            variables[variable]["default"] = value
        Path(folder, f"{name}.json").write_text(json.dumps(template))
        Path(folder, f"{name}.description").write_text(pool["description"])


if __name__ == "__main__":
    main(*sys.argv[1:])
