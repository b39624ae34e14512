#!/bin/bash
# The whole stack on one host without containers: PostgreSQL, an S3 endpoint, Prefect, MLflow, a Ray cluster of two nodes, a worker.
#   infra/one-host.sh up FOLDER [PARAMETER=VALUE]...                start what does not run, deploy, start the worker; safe to repeat
#   infra/one-host.sh start FOLDER SERVICE                          start one again: postgres s3 prefect mlflow ray-head ray-node worker
#   infra/one-host.sh down FOLDER                                   end everything; what is in FOLDER stays
# Afterwards `. FOLDER/environment` lets a shell reach it. Ports: see below, each can be set. AWS_ENDPOINT_URL_S3 with the usual
# credentials and BUCKET name a store that is there; without it one is started, OpenStack Swift with its S3 interface, kept in FOLDER.
set -euo pipefail

[[ $# -ge 2 && "$1" =~ ^(up|start|down)$ ]] || { sed -n '3,7s/^# *//p' "$0" >&2; exit 2; }
act=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
shift 2
project=$(cd "$(dirname "$0")/.." && pwd)
cd "$project"
: "${PYTHON:=$project/.venv/bin/python}" "${POSTGRES_PORT:=5432}" "${S3_PORT:=9000}" "${PREFECT_PORT:=4200}" "${MLFLOW_PORT:=5000}" "${RAY_PORT:=6379}" "${BUCKET:=cuda-agent}"
programs=$(dirname "$PYTHON")
postgres=$(find /usr/lib/postgresql -maxdepth 2 -name bin 2>/dev/null | sort -V | tail -1)
export PATH="$programs:${postgres:+$postgres:}$PATH" LC_ALL=C.UTF-8

# PostgreSQL refuses to run as root.
as_user=()
[[ $(id -u) -ne 0 ]] || as_user=(setpriv --reuid=nobody --regid=nogroup --clear-groups)

services="postgres s3 prefect mlflow ray-head ray-node"
if [[ -f $folder/environment ]]; then
    . "$folder/environment"
else
    [[ -z ${AWS_ENDPOINT_URL_S3:-} ]] && local_store=1 || local_store=
    (umask 077 && touch "$folder/environment") # it holds the store's key
    {
        echo "export LOCAL_STORE=$local_store BUCKET=$BUCKET POSTGRES_PORT=$POSTGRES_PORT S3_PORT=$S3_PORT PREFECT_PORT=$PREFECT_PORT MLFLOW_PORT=$MLFLOW_PORT RAY_PORT=$RAY_PORT"
        echo "export AWS_ENDPOINT_URL_S3=${AWS_ENDPOINT_URL_S3:-http://127.0.0.1:$S3_PORT} AWS_DEFAULT_REGION=${AWS_DEFAULT_REGION:-us-east-1}"
        [[ -z $local_store ]] || echo "export AWS_ACCESS_KEY_ID=cuda-agent:nightly AWS_SECRET_ACCESS_KEY=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(20))')"
        echo "export PREFECT_API_URL=http://127.0.0.1:$PREFECT_PORT/api PREFECT_HOME=$folder/prefect RAY_ADDRESS=127.0.0.1:$RAY_PORT"
        echo "export PREFECT_SERVER_ANALYTICS_ENABLED=false MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 DO_NOT_TRACK=1"
    } >"$folder/environment"
    . "$folder/environment"
fi
[[ -n $LOCAL_STORE ]] || services=${services/s3 /}

runs() { # not one that is dead and not yet reaped
    local state
    [[ -f $folder/$1.pid ]] && state=$(sed 's/.*) //; s/ .*//' "/proc/$(<"$folder/$1.pid")/stat" 2>/dev/null) && [[ $state != Z ]]
}

launch() { # NAME COMMAND...: in a session of its own, so that it and its children end together
    local name=$1
    shift
    setsid "$@" >>"$folder/$name.log" 2>&1 </dev/null &
    echo $! >"$folder/$name.pid"
}

supervise() { # NAME COMMAND...: the same, and started again when it ends by itself, as while PostgreSQL recovers or without Ray's head; not when it ends at once
    launch "$1" bash -c 'while began=$SECONDS; "$@"; ((SECONDS - began > 2)); do sleep 1; done' "$@"
}

await() { # NAME COMMAND...: until the command succeeds
    local name=$1
    shift
    for _ in $(seq 240); do
        "$@" >/dev/null 2>&1 && return
        runs "$name" || break
        sleep 0.5
    done
    echo "$name did not start; its last words:" >&2
    tail -5 "$folder/$name.log" >&2
    exit 1
}

answers() { "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1"; }

start() {
    if runs "$1"; then return; fi
    case $1 in
    postgres)
        local data=$folder/postgres
        mkdir -p "$data"
        [[ ${#as_user[@]} -eq 0 ]] || chown nobody "$data"
        [[ -f $data/PG_VERSION ]] || "${as_user[@]}" initdb -D "$data" -U cuda_agent -A trust >"$folder/postgres.log"
        # PostgreSQL takes one that was killed for running until the system has reaped it.
        for _ in {1..300}; do
            grep -qs '^State:.Z' "/proc/$(head -n 1 "$data/postmaster.pid" 2>/dev/null || echo none)/status" || break
            sleep 0.1
        done
        launch postgres "${as_user[@]}" postgres -D "$data" -h 127.0.0.1 -p "$POSTGRES_PORT" -c unix_socket_directories=
        await postgres pg_isready -h 127.0.0.1 -p "$POSTGRES_PORT"
        local psql=(psql -h 127.0.0.1 -p "$POSTGRES_PORT" -U cuda_agent -d postgres -v ON_ERROR_STOP=1 -qtA)
        [[ -n $("${psql[@]}" -c "select 1 from pg_database where datname = 'mlflow'") ]] || "${psql[@]}" -f infra/postgres/databases.sql
        ;;
    s3)
        supervise s3 "$PYTHON" infra/swift/serve.py "$folder/s3" --port "$S3_PORT" --bucket "$BUCKET"
        await s3 "$PYTHON" -c 'import sys, boto3; boto3.client("s3").head_bucket(Bucket=sys.argv[1])' "$BUCKET"
        ;;
    prefect)
        supervise prefect env PREFECT_SERVER_DATABASE_CONNECTION_URL="postgresql+asyncpg://cuda_agent@127.0.0.1:$POSTGRES_PORT/prefect" \
            prefect server start --host 127.0.0.1 --port "$PREFECT_PORT"
        await prefect answers "$PREFECT_API_URL/health"
        ;;
    mlflow)
        supervise mlflow mlflow server --host 127.0.0.1 --port "$MLFLOW_PORT" --workers 1 \
            --backend-store-uri "postgresql+psycopg2://cuda_agent@127.0.0.1:$POSTGRES_PORT/mlflow" --artifacts-destination "s3://$BUCKET/mlflow"
        await mlflow answers "http://127.0.0.1:$MLFLOW_PORT/health"
        ;;
    ray-head)
        supervise ray-head ray start --head --block --port "$RAY_PORT" --num-cpus 0 --include-dashboard false --object-store-memory 100000000
        await ray-head ray health-check --address "127.0.0.1:$RAY_PORT"
        ;;
    ray-node)
        # Judges are placed here, by the resource.
        supervise ray-node ray start --block --address "127.0.0.1:$RAY_PORT" --resources '{"judge": 2}' --object-store-memory 100000000
        ;;
    worker)
        launch worker prefect worker start --pool cpu --with-healthcheck
        ;;
    *)
        echo "$1: no such service; give one of $services worker." >&2
        exit 2
        ;;
    esac
    echo "$1 runs" >&2
}

case $act in
up)
    for service in $services; do start "$service"; done
    # CUDA_AGENT_PROFILE and the other variables of deploy.sh apply here too.
    PYTHON=$PYTHON CUDA_AGENT_POOL=cpu CUDA_AGENT_HOME=$folder/home infra/prefect/deploy.sh \
        "registry.tracking_uri=http://127.0.0.1:$MLFLOW_PORT" "store.url=s3://$BUCKET/cuda-agent" \
        "store.endpoint=$AWS_ENDPOINT_URL_S3" pool.judges=1 pool.resource=judge "$@"
    start worker
    ;;
start)
    [[ $# -eq 1 ]] || { echo "start: give one service of $services worker." >&2; exit 2; }
    start "$1"
    ;;
down)
    for service in worker ray-node ray-head mlflow prefect s3 postgres; do
        if runs "$service"; then
            # SIGINT ends PostgreSQL at once and in order; it ends the others too.
            [[ $service = postgres ]] && signal=INT || signal=TERM
            # Flow runs have sessions of their own; what they started ends with them.
            [[ $service != worker ]] || pkill -TERM -P "$(<"$folder/worker.pid")" || true
            kill "-$signal" -- "-$(<"$folder/$service.pid")" || true
            for _ in $(seq 60); do runs "$service" && sleep 0.5 || break; done
            kill -KILL -- "-$(<"$folder/$service.pid")" 2>/dev/null || true
        fi
        rm -f "$folder/$service.pid"
    done
    ;;
esac
