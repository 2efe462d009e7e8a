#!/usr/bin/env bash
# The web page of `ebbtide serve` in a browser: installs what tests/web needs and runs it. Needs npm and its registry, and Chromium; as root
# on Debian the latter is installed where it is missing. CHROMIUM names another.
#
#     tools/web_check.sh [ENGINE [FOLDER]]
#
# ENGINE is the program (target/release/ebbtide), FOLDER takes the screenshots (target/web-screenshots).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PLAYWRIGHT=1.64.1
engine=${1:-target/release/ebbtide}
screenshots=${2:-target/web-screenshots}
chromium=${CHROMIUM:-/usr/bin/chromium}

fail() {
    printf 'tools/web_check.sh: %s\n' "$*" >&2
    exit 1
}

[ -x "$engine" ] || fail "$engine is missing: cargo build --release --locked"
command -v npm >/dev/null || fail "npm is missing: install Node.js 20 or newer"
if [ ! -x "$chromium" ]; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$chromium is missing: install Chromium, or set CHROMIUM"
    apt-get install -y -qq --no-install-recommends chromium >/dev/null || fail "Chromium cannot be installed"
fi
# Beside the tests, where node looks for it.
if [ ! -e "tests/web/node_modules/playwright-core/package.json" ] \
    || ! grep -q "\"version\": \"$PLAYWRIGHT\"" tests/web/node_modules/playwright-core/package.json; then
    npm install --prefix tests/web --no-save --no-package-lock --no-audit --no-fund --silent "playwright-core@$PLAYWRIGHT" \
        || fail "playwright-core $PLAYWRIGHT cannot be installed"
fi
exec node tests/web/check.mjs --engine "$engine" --chromium "$chromium" --screenshots "$screenshots"
