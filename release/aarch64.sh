#!/usr/bin/env bash
# Runs a command in a Debian for arm64 under qemu, in a copy of this tree:
#
#   release/aarch64.sh COMMAND [ARGUMENT...]
#
# The first run makes the system in build/aarch64, from MIRROR or else from where this machine's apt
# gets Debian; later runs keep it. dist/ is shared with it. Mounts are in a namespace of their own:
# they end with the command, however it ends, and what deletes build/ cannot reach through them.
set -euo pipefail
cd "$(dirname "$0")/.."

RULE=/usr/lib/binfmt.d/qemu-aarch64.conf BINFMT=/proc/sys/fs/binfmt_misc
SYSTEM=build/aarch64 ROOT=build/aarch64/root
PACKAGES=ca-certificates,g++,make,python3-dev,python3-venv

missing=()
[[ $EUID = 0 ]] || missing+=(root)
[[ -r $RULE ]] || missing+=(qemu-user-static)
for program in debootstrap git unshare; do
  command -v "$program" >/dev/null || missing+=("$program")
done
if ((${#missing[@]})); then
  echo "$0 needs root, qemu-user-static and debootstrap; missing: ${missing[*]}" >&2
  exit 1
fi
[[ ${MOUNTS_ARE_PRIVATE-} ]] || MOUNTS_ARE_PRIVATE=1 exec unshare --mount "$0" "$@"

[[ -e $BINFMT/register ]] || mount -t binfmt_misc binfmt_misc $BINFMT
if [[ ! -e $BINFMT/qemu-aarch64 ]]; then
  cat $RULE >$BINFMT/register
  trap 'echo -1 >$BINFMT/qemu-aarch64' EXIT # the rule is the kernel's, not the namespace's
fi

if [[ ! -e $SYSTEM/made ]]; then
  MIRROR=${MIRROR:-$(apt-get indextargets --format "\$(SITE)" "Label: Debian" | awk "NR == 1")}
  rm -rf $SYSTEM
  mkdir -p $SYSTEM
  debootstrap --arch=arm64 --variant=minbase --include=$PACKAGES bookworm $ROOT "$MIRROR"
  # A fork under qemu can block where several threads of Python make them, as those of setup.py do.
  echo "import os; os.cpu_count = lambda: 1" >$ROOT/etc/python3.11/sitecustomize.py
  touch $SYSTEM/made
fi

mkdir -p dist $ROOT/bapo/dist
for folder in proc sys dev etc/ssl/certs; do
  mount --rbind /$folder $ROOT/$folder
done
mount --bind dist $ROOT/bapo/dist
cp /etc/resolv.conf $ROOT/etc
# Newer files alone, so that make builds again only what has changed.
rm -rf $ROOT/bapo/tests
git ls-files -z --cached --others --exclude-standard |
  tar -c --null --files-from=- --ignore-failed-read | tar -x -C $ROOT/bapo

HOME=/root OPENBLAS_NUM_THREADS=1 chroot $ROOT /bin/sh -c 'cd /bapo && exec "$@"' sh "$@"
