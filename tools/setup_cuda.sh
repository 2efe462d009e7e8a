#!/usr/bin/env bash
# Installs the pinned CUDA compiler into .cuda, from PyPI: 100 MB to load, 271 MB on disk. Its driver interface is that of CUDA 13.0, the
# newest that drivers of branch 580 know.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

WHEELS=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)

[ -x .cuda/bin/pip ] || python3 -m venv .cuda
.cuda/bin/pip install --quiet --disable-pip-version-check "${WHEELS[@]}"
.cuda/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc --version | tail -1
