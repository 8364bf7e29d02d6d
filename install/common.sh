# Sourced by the scripts beside it, from the repository root: which build this machine gets, and
# from where. Sets $backend (cpu or cuda), $torch_source and $extras.

backend=${LIGHTNING_RL_BACKEND:-}
if [ -z "$backend" ]; then
    if timeout 20 nvidia-smi >/dev/null 2>&1; then backend=cuda; else backend=cpu; fi
fi
extras=$backend,dev,docs,recipes

# uv does not read pip's settings; carry over the ones that say where packages come from.
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
[ -z "${PIP_EXTRA_INDEX_URL:-}" ] || export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}
[ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}

# Makes build/NAME, an empty environment for what is not to meet .venv's packages, or ends the script
# if it is there as setup.cfg and install/ ask for it now, of which .venv's stamp is made. Sets $place;
# at the end call environment_made.
begin_environment() {
    place=build/$1
    wanted=$(cat .venv/setup.stamp)
    [ "$(cat "$place/made" 2>/dev/null)" != "$wanted" ] || exit 0
    .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$place"
}

# Lets $place find in .venv what it lacks itself.
put_venv_behind() {
    local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$purelib")')" \
        >"$($place/bin/python -c "$purelib")/behind.pth"
}

environment_made() { echo "$wanted" >"$place/made"; }

# The CPU build of torch is not on the main index: take it from a local wheel folder that has it,
# else from PyTorch's own index. On CUDA, vLLM requires the torch it was built for.
torch_source=()
if [ $backend = cpu ] && ! compgen -G "${UV_FIND_LINKS:-/nonexistent}/torch-*+cpu*.whl" >/dev/null; then
    torch_source=(--torch-backend=cpu)
fi
