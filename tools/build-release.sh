#!/usr/bin/env bash
# Builds the release program with the feature cuda and kernels for every architecture: build-release.sh [CARGO ARGUMENTS]. Takes the compiler
# that NVCC or CUDA_HOME names, or nvcc on PATH, else the pinned one of tools/setup_cuda.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${NVCC:-}${CUDA_HOME:-}" ] && ! command -v nvcc >/dev/null; then
    tools/setup_cuda.sh
    homes=(.cuda/lib/python3.*/site-packages/nvidia/cu13)
    export NVCC="$PWD/${homes[0]}/bin/nvcc"
fi
unset EBBTIDE_CUDA_ARCHS
EBBTIDE_REQUIRE_KERNELS=1 cargo build --release --locked --features cuda "$@"
