#!/usr/bin/env bash
# Builds an sdist, and a wheel from it, into dist/, and checks both:  install/build.sh [checkout]
set -euo pipefail
cd "$(dirname "$0")/.."
install/environment.sh packaging
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A copy: a build leaves files beside the sources, for a moment, and lint may run meanwhile.
(cd "${1:-.}" && cp -a lightning_rl callbacks recipes setup.cfg pyproject.toml README.md LICENSE "$folder")
rm -rf dist
# Without isolation: it would fetch setuptools each time.
build/packaging/bin/pyproject-build --no-isolation --outdir dist "$folder" >"$folder/log" 2>&1 || {
    cat "$folder/log" >&2
    exit 1
}
build/packaging/bin/twine check --strict dist/*
