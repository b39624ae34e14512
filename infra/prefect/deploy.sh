#!/bin/bash
# Brings work pools, the limit of one run per home, deployments and automations to the Prefect server of PREFECT_API_URL.
#   infra/prefect/deploy.sh [PARAMETER=VALUE]...    change parameters of every deployment; safe to repeat
# It runs Prefect's own commands on prefect.yaml, pools.yaml and automations.yaml. Variables, with their defaults:
#   CUDA_AGENT_PROFILE   profile of every deployment (h20-pool)
#   CUDA_AGENT_POOL      work pool of nights and data sets (gpu-h20); approvals are in the pool cpu
#   CUDA_AGENT_HOME      home (.cuda-agent of this folder; with Kubernetes /srv/cuda-agent)
#   CUDA_AGENT_CRON, CUDA_AGENT_TIMEZONE   schedule of the nights (0 1 * * *) and time zone of every schedule (UTC)
#   CUDA_AGENT_WORKERS   process: workers run flows on their own machine; kubernetes: as jobs (process)
#   CUDA_AGENT_ALERT     notification block that receives alarms as TYPE/NAME (none: alarms are events only)
#   RAY_ADDRESS          Ray cluster of the flow runs
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,12s/^# *//p' "$0"; exit 0; }

: "${PREFECT_API_URL:?PREFECT_API_URL is not set: start a server that stays (prefect server start) and name its address}"
export CUDA_AGENT_PROFILE=${CUDA_AGENT_PROFILE:-h20-pool} CUDA_AGENT_POOL=${CUDA_AGENT_POOL:-gpu-h20}
export CUDA_AGENT_CRON=${CUDA_AGENT_CRON:-0 1 * * *} CUDA_AGENT_TIMEZONE=${CUDA_AGENT_TIMEZONE:-UTC}
export CUDA_AGENT_WORKERS=${CUDA_AGENT_WORKERS:-process} COLUMNS=500 PREFECT_CLI_COLORS=false
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$project"
# Workers and pods start in another working directory, so the home is absolute.
[[ $CUDA_AGENT_WORKERS = kubernetes ]] && home=/srv/cuda-agent || home=$project/.cuda-agent
CUDA_AGENT_HOME=$(realpath -m "${CUDA_AGENT_HOME:-$home}")
export CUDA_AGENT_HOME
python=${PYTHON:-$project/.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
CUDA_AGENT_SETS=$("$python" -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@")
export CUDA_AGENT_SETS
prefect() { "$python" -m prefect --no-prompt "$@"; }
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# A bad profile, parameter, pool or block is refused before anything changes on the server.
sets=()
for assignment in "$@"; do
    [[ $assignment != home=* ]] || { echo "$assignment: the home of deployments is the variable CUDA_AGENT_HOME; set it." >&2; exit 2; }
    sets+=(--set "$assignment")
done
"$python" -m components.cli params --profile "$CUDA_AGENT_PROFILE" "${sets[@]}" --json >/dev/null
"$python" infra/prefect/job_templates.py "$CUDA_AGENT_WORKERS" "$scratch"
[[ -f $scratch/$CUDA_AGENT_POOL.json ]] || { echo "CUDA_AGENT_POOL: pools.yaml has no work pool $CUDA_AGENT_POOL." >&2; exit 2; }
# Prefect would keep the type of a pool that exists, and say that it updated it.
prefect work-pool ls --output json >"$scratch/pools"
"$python" - "$CUDA_AGENT_WORKERS" "$scratch/pools" "$scratch"/*.json <<'PY'
import json, pathlib, sys
workers, pools, *templates = sys.argv[1:]
names = {pathlib.Path(template).stem for template in templates}
for pool in json.loads(pathlib.Path(pools).read_text()):
    if pool["name"] in names and pool["type"] != workers:
        sys.exit(f"Work pool {pool['name']} is of type {pool['type']}, which cannot change; run prefect work-pool delete {pool['name']} first.")
PY
cp infra/prefect/automations.yaml "$scratch/automations.yaml"
if [[ -n ${CUDA_AGENT_ALERT:-} ]]; then
    block=$(prefect block inspect "$CUDA_AGENT_ALERT" | grep -oiE -m1 '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}') ||
        { echo "CUDA_AGENT_ALERT: the server has no block $CUDA_AGENT_ALERT; make one (prefect block create slack-webhook)." >&2; exit 2; }
    sed -i "s/\*event/*alert/; s/BLOCK/$block/" "$scratch/automations.yaml"
fi

for template in "$scratch"/*.json; do
    name=$(basename "$template" .json)
    prefect work-pool create "$name" --type "$CUDA_AGENT_WORKERS" --base-job-template "$template" --overwrite
    prefect work-pool update "$name" --description "$(<"${template%.json}.description")"
done
prefect global-concurrency-limit inspect cuda-agent-home >/dev/null 2>&1 ||
    prefect global-concurrency-limit create cuda-agent-home --limit 1

# Prefect skips a deployment with an invalid field and still exits with 0.
prefect deploy --all | tee "$scratch/deployed"
wanted=$(grep -c '^  - name:' prefect.yaml)
[[ $(grep -c "' successfully " "$scratch/deployed") -eq $wanted ]] || { echo "Not every deployment of prefect.yaml was accepted; see above." >&2; exit 1; }

# An automation with the same name would stay beside the new one.
sed -n 's/^  - name: //p' infra/prefect/automations.yaml | while read -r name; do
    if prefect automation inspect "$name" >/dev/null 2>&1; then prefect automation delete "$name" >/dev/null; fi
done
for attempt in 1 2 3 4 5; do
    prefect automation create --from-file "$scratch/automations.yaml" && break
    [[ $attempt -lt 5 ]] || { echo "The automations were not created; run this command again." >&2; exit 1; }
    sleep 5
done
