#!/usr/bin/env bash
# Makes a release of what is committed: sets the version, dates the changelog's entry, builds sdist
# and wheel into dist/, and commits and tags it. Nothing is uploaded:  install/release.sh 0.1.0
set -euo pipefail
cd "$(dirname "$0")/.."
fail() {
    echo "release failed: $*" >&2
    exit 1
}

version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] ||
    fail "VERSION='$version' is no version; write it as in make release VERSION=0.1.0"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
    fail "v$version is tagged already; choose the next version"
[ -z "$(git status --porcelain)" ] ||
    fail "there are changes (git status shows them); commit or remove them first"
entry=$(awk '/^## /{inside = /^## Unreleased$/; next} inside' CHANGELOG.md)
[ -n "${entry//[[:space:]]/}" ] ||
    fail "CHANGELOG.md has nothing under '## Unreleased'; write there what is new"

folder=$(mktemp -d)
undo() {
    git reset --quiet -- setup.cfg CHANGELOG.md
    git checkout --quiet -- setup.cfg CHANGELOG.md
    rm -rf "$folder"
}
trap undo EXIT
sed -i "s/^version = .*/version = $version/" setup.cfg
sed -i "s/^## Unreleased$/## Unreleased\n\n## $version ($(date +%F))/" CHANGELOG.md
git add setup.cfg CHANGELOG.md
# What is committed and no more: the folder may hold files that git ignores.
git archive "$(git write-tree)" | tar --extract --directory "$folder"
install/build.sh "$folder"
git commit --quiet --message "Release $version"
git tag --annotate "v$version" --message "lightning_rl $version"
echo "release: v$version is tagged, and nothing was uploaded; push the tag, and publish:"
ls dist/*
