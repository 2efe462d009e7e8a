#!/usr/bin/env bash
# Installs the clients that the server is tried with into .clients/: the official packages of OpenAI and Anthropic for Python, OpenAI's
# for Node, and the agents OpenCode and Codex. Needs python3 with venv, npm, and their registries; takes a minute and 900 MB. Does
# nothing where all is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=(openai==3.57.0 anthropic==2.14.0)
NODE=(openai@7.59.0 opencode-ai@1.18.33 @openai/codex@0.171.0)

wanted="${PYTHON[*]} ${NODE[*]}"
if [ -e .clients/installed ] && [ "$(cat .clients/installed)" = "$wanted" ]; then
    exit 0
fi
mkdir -p .clients
rm -f .clients/installed
python3 -m venv --clear .clients/venv
.clients/venv/bin/pip install --quiet --disable-pip-version-check "${PYTHON[@]}"
npm install --prefix .clients --no-audit --no-fund --loglevel=error "${NODE[@]}"
printf '%s' "$wanted" >.clients/installed
