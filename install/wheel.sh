#!/usr/bin/env bash
# Builds sdist and wheel, and tries the wheel as a stranger would: installed into an environment of
# its own, in a folder that has nothing to do with this checkout. Other packages come from .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
install/build.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/uv venv --quiet --python .venv/bin/python "$folder/env"
.venv/bin/uv pip install --quiet --no-deps --python "$folder/env/bin/python" dist/*.whl
# .venv as a plain path: its own .pth files are not read, by which it finds this checkout.
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
behind=$(.venv/bin/python -c "$purelib")
echo "$behind" >"$("$folder/env/bin/python" -c "$purelib")/behind.pth"

unset PYTHONPATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # beside the tests
mkdir "$folder/stranger"
cd "$folder/stranger"
say() { echo "wheel: $*"; }
from=$("$folder/env/bin/python" -c 'import lightning_rl; print(lightning_rl.__file__)')
case $from in "$folder"/*) ;; *)
    say "lightning_rl comes from $from, not from the wheel"
    exit 1
    ;;
esac
set -x
PATH=$folder/env/bin:$PATH
lightning-rl doctor
lightning-rl --help | grep '^  convert '  # which only the wheel's metadata tells of
lightning-rl quickstart --help | grep -- "--model MODEL"
# What `lightning-rl quickstart` does first; its real model would take minutes.
python -c "from pathlib import Path; from lightning_rl.cli.quickstart import copy_recipes; copy_recipes(Path.cwd())"
python -m recipes.sort_digits.quickstart --sft_steps 50 --iterations 2
{ set +x; } 2>/dev/null
test -f runs/sort_digits/grpo/version_0/summary.json
test -f runs/sort_digits/grpo/version_0/hf/config.json
if grep -rlF "$checkout" --include='*.yaml' --include='*.json' .; then
    say "these files name the checkout"
    exit 1
fi
say "a stranger's quickstart runs from $(cd "$checkout" && ls dist/*.whl)"
