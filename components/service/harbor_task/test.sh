#!/usr/bin/env bash
# Have the files in /app judged. If the judge itself fails, no reward is written and the exit code is 1.
cd /app && exec python3 "$(dirname "$0")/judge.py" --reward /logs/verifier
