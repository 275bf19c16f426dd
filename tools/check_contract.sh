#!/usr/bin/env bash
# Checks that the checked-in generated code is what the protos give, and that v1 only grew since the last release tag.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(dirname "${PYTHON:-.venv/bin/python}")
before=$(cat protos/rollwire/v1/*_pb2* | sha256sum)
PYTHON=${PYTHON:-.venv/bin/python} tools/protos.sh
after=$(cat protos/rollwire/v1/*_pb2* | sha256sum)
if [ "$before" != "$after" ]; then
  echo "generated code was out of date: it has been regenerated, commit it (make protos)" >&2
  exit 1
fi
release=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)
if [ -n "$release" ]; then
  "$bin/buf" breaking --against ".git#tag=$release"
fi
