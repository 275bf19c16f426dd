#!/usr/bin/env bash
# Regenerates the checked-in Python code of the contract. PYTHON names the interpreter that has `rollwire[protos]`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-.venv/bin/python}")
PATH="$(cd "$(dirname "$python")" && pwd):$PATH" # protoc finds its mypy plugins on PATH
cd protos
python=$(case "$python" in /*) echo "$python" ;; *) echo "../$python" ;; esac)
"$python" -m grpc_tools.protoc -I . --python_out=. --mypy_out=quiet:. rollwire/v1/*.proto
"$python" -m grpc_tools.protoc -I . --grpc_python_out=. --mypy_grpc_out=quiet:. $(grep -l '^service ' rollwire/v1/*.proto)
