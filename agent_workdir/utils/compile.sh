#!/usr/bin/env bash
# Build kernels/ exactly as the judge builds them.
exec "${PYTHON:-python3}" -m utils.compile
