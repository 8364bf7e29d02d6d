#!/usr/bin/env bash
# Unpacks Debian's Slurm into build/slurm, where tests/integration/test_slurm.py finds it. It is not
# installed: where `srun` is in PATH, Lightning warns in every run that is started without it.
set -euo pipefail
cd "$(dirname "$0")/.."
place=build/slurm
[ ! -e $place/made ] || exit 0

command -v apt-get >/dev/null || {
    echo "make launch-tools: apt-get is needed; elsewhere, put slurmctld, slurmd and sbatch into PATH" >&2
    exit 1
}
rm -rf $place
mkdir -p $place/packages
packages=$(apt-get install --simulate --no-install-recommends slurmctld slurmd slurm-client |
    awk '$1 == "Inst" { print $2 }')
# shellcheck disable=SC2086
(cd $place/packages && apt-get download --quiet --option APT::Sandbox::User=root $packages)
for package in $place/packages/*.deb; do dpkg -x "$package" $place; done
touch $place/made
