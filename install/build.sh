#!/usr/bin/env bash
# Builds an sdist, and a wheel from it, into dist/, and checks both:  install/build.sh [checkout]
set -euo pipefail
cd "$(dirname "$0")/.."
install/packaging.sh
rm -rf dist
# Without isolation: it would fetch setuptools each time.
build/packaging/bin/pyproject-build --no-isolation --outdir dist "${1:-.}" >build/packaging/log 2>&1 || {
    cat build/packaging/log >&2
    exit 1
}
build/packaging/bin/twine check --strict dist/*
