#!/bin/bash
# Brings pools, deployments and automations to a Prefect server: deploy.py, which --help describes, in the environment of
# this checkout, that of PYTHON, or that of the container.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$project/.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$project/infra/prefect/deploy.py" "$@"
