#!/usr/bin/env bash
# Installs what the scripts in tools/oracle/ need into .oracle/ of the repository: a Python environment with NumPy and gguf, and
# llama.cpp's shared library ready built (Linux, x86-64). Running it again does nothing where all is there.
set -euo pipefail

NUMPY=2.4.6
GGUF=0.19.0
LLAMA=3.22.1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
oracle=$root/.oracle
python=$oracle/venv/bin/python
package=$oracle/node_modules/@node-llama-cpp/linux-x64
library=$package/bins/linux-x64

fail() {
    echo "setup_oracle: $*" >&2
    exit 1
}

has_packages() {
    "$python" -c "
from importlib.metadata import version
raise SystemExit((version('numpy'), version('gguf')) != ('$NUMPY', '$GGUF'))" 2>/dev/null
}

has_library() {
    [ -e "$library/libggml-base.so" ] && grep -q "\"version\": \"$LLAMA\"" "$package/package.json"
}

mkdir -p "$oracle"
if ! has_packages; then
    command -v python3 >/dev/null || fail "python3 is missing; it is needed for all scripts of tools/oracle"
    # An environment left half made by an interrupted run is made anew.
    python3 -m venv --clear "$oracle/venv" || fail "'python3 -m venv' does not work; on Debian and Ubuntu install python3-venv"
    "$python" -m pip install --quiet --disable-pip-version-check "numpy==$NUMPY" "gguf==$GGUF"
    has_packages || fail "NumPy $NUMPY and gguf $GGUF were installed but cannot be loaded"
fi

if ! has_library; then
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) ;;
    *) fail "the ready-built library is for Linux on x86-64: build llama.cpp and set ORACLE_LLAMA_LIB (tools/oracle/README.md)" ;;
    esac
    command -v npm >/dev/null || fail "npm is missing, so llama.cpp's library cannot be fetched. Install Node.js, or run
    '$python -m pip install llama-cpp-python==0.3.36', which builds it from source (13 minutes on 2 cores).
    make_tiny_model.py, numpy_forward.py and compare_logits.py work without it."
    npm install --prefix "$oracle" --no-save --no-audit --no-fund --silent "@node-llama-cpp/linux-x64@$LLAMA"
    has_library || fail "the package @node-llama-cpp/linux-x64@$LLAMA has no library in $library"
fi

cat <<EOF
The oracle is ready in .oracle/ (NumPy $NUMPY, gguf $GGUF, llama.cpp 0.5.0). From the root of the repository:
  .oracle/venv/bin/python tools/oracle/make_tiny_model.py --shape micro --type F32 --out m.gguf
  .oracle/venv/bin/python tools/oracle/reference_logits.py m.gguf --random 40 --out ref.npz
  .oracle/venv/bin/python tools/oracle/numpy_forward.py m.gguf --check ref.npz --tolerance 1e-4
The scripts find the library in .oracle/; elsewhere set ORACLE_LLAMA_LIB=$library
EOF
