#!/usr/bin/env bash
# Does what the Dockerfile does, without Docker: a clean Debian root by debootstrap in place of the base image, the
# checkout's files copied into it, then each RUN line in it. As root, with the network; 8 GB, some minutes.
#   launch/docker/check.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v debootstrap >/dev/null || { echo "check.sh: apt-get install debootstrap" >&2 && exit 1; }
file=launch/docker/Dockerfile
root=$(mktemp -d "${1:-/tmp}/image.XXXXXX")
mounted=("$root/proc") # debootstrap's own, if it is interrupted
end() {
    for place in "${mounted[@]}"; do ! mountpoint --quiet "$place" || umount "$place"; done
    rm -rf --one-file-system "$root" "$root.log"
}
trap end EXIT
bind() {
    mkdir -p "$root$1"
    mounted+=("$root$1")
    mountpoint --quiet "$root$1" || mount --bind "$1" "$root$1" # debootstrap may have left its /proc
}

# What FROM brings: Debian with Python 3.11 and its headers.
debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-venv bookworm "$root" >"$root.log"
cp /etc/resolv.conf "$root/etc/"
[ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$root/etc/ssl/certs/ca-certificates.crt"
bind /dev
bind /proc
[ ! -d "${PIP_FIND_LINKS:-}" ] || bind "$PIP_FIND_LINKS" # a folder of wheels

mkdir "$root/workspace"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$root/workspace"

# The package index and the proxy, as they are here, and nothing else of this environment.
passed=()
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || passed+=("$name=${!name}")
done
[ -z "${PIP_CERT:-}" ] || passed+=("PIP_CERT=/etc/ssl/certs/ca-certificates.crt")
inside() {
    chroot "$root" env -i "${passed[@]}" HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin BACKEND=cpu \
        sh -ec "cd /workspace; $1"
}
grep '^RUN ' $file | sed 's/^RUN //' | while read -r line; do
    echo "RUN $line"
    inside "$line"
done
echo "CMD lightning-rl doctor"
inside "PATH=/workspace/.venv/bin:\$PATH lightning-rl doctor"
