#!/bin/bash
# Back up or restore the databases of Prefect and MLflow.
#   infra/postgres/backup.sh backup FOLDER      writes FOLDER/{prefect,mlflow}.dump, each whole or not at all
#   infra/postgres/backup.sh restore FOLDER     into databases that exist and are empty; stop Prefect and MLflow first
# The server is PostgreSQL's usual variables: PGHOST, PGPORT, PGUSER, PGPASSWORD.
set -euo pipefail

if [[ $# -ne 2 || ! "$1" =~ ^(backup|restore)$ ]]; then
    sed -n '3,5s/^# *//p' "$0" >&2
    exit 2
fi
folder=$2

for database in prefect mlflow; do
    file=$folder/$database.dump
    case $1 in
    backup)
        mkdir -p "$folder"
        pg_dump --format=custom --no-owner --file="$file.partial" "$database"
        pg_restore --list "$file.partial" >/dev/null # a dump that cannot be read is no back-up
        mv "$file.partial" "$file"
        ;;
    restore)
        [[ -f $file ]] || { echo "$file: no such back-up; give the folder that backup wrote." >&2; exit 2; }
        tables=$(psql --no-psqlrc --tuples-only --no-align --dbname="$database" \
            --command="select count(*) from information_schema.tables where table_schema = 'public'")
        [[ $tables -eq 0 ]] || { echo "$database: holds $tables tables; restore into an empty database (dropdb, createdb)." >&2; exit 2; }
        pg_restore --no-owner --single-transaction --exit-on-error --dbname="$database" "$file"
        ;;
    esac
    echo "$1 of $database done" >&2
done
