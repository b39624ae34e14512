#!/usr/bin/env bash
# Build kernels/ exactly as the judge builds them.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m utils.compile
