#!/bin/sh
# Builds the image with `make image` as an unprivileged user, starts it with the rights that the chart gives it, and dumps
# a process of another user in it. Needs no image registry: a Debian tree with Python replaces the base image.
#
#   apt-get install buildah runc debootstrap python3-venv uidmap
#   deploy/test-container.sh [FOLDER]
#
# FOLDER (default: a temporary one) keeps the Debian tree for the next run; test-in-nspawn.sh can share it.
set -eu

. "$(dirname "$0")/debian-machine.sh"

# A step: its description, and the command that must succeed.
see() {
  what=$1
  shift
  "$@" || fail "not so: $what"
  echo "  ok: $what"
}

[ "$(id -u)" = 0 ] || fail "must run as root"
for needed in buildah runc debootstrap python3 newuidmap; do
  command -v "$needed" >/dev/null || fail "$needed: not found; apt-get install buildah runc debootstrap python3-venv uidmap"
done

victim=
work=${1:-$(mktemp -d /var/tmp/hangwatch-image.XXXXXX)}
mkdir -p "$work"
work=$(cd "$work" && pwd)
chmod go+x "$work" # mktemp allows only root, and the builder is not root
keep=$#
finish() {
  [ -z "$victim" ] || kill "$victim" 2>/dev/null || true
  podless rm --all >/dev/null 2>&1 || true
  # The files belong to ids of the builder's user namespace: the builder cannot remove them, root can.
  rm -rf "$work/home"
  [ "$keep" = 1 ] || rm -rf "$work"
}
trap finish EXIT
podless() {
  buildah --root "$work/storage" --runroot "$work/run" "$@"
}
rm -rf "$work/wheels" "$work/source" "$work/copy" "$work/names"
mkdir -p "$work/wheels" "$work/source"

make_tree debian

echo "==> wheels"
for part in hangwatch pyproject.toml README.md LICENSE; do cp -R "$checkout/$part" "$work/source"; done
python3 -m pip --disable-pip-version-check --quiet --quiet wheel --wheel-dir "$work/wheels" "$work/source" 'setuptools>=77'
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$work/pip.conf"

echo "==> a user that may build: names and id ranges in a mount namespace of its own"
builder=54321
mkdir -p "$work/names" "$work/home"
for file in passwd group subuid subgid; do
  cp "/etc/$file" "$work/names/$file" 2>/dev/null || : >"$work/names/$file"
done
echo "builder:x:$builder:$builder::$work/home:/bin/sh" >>"$work/names/passwd"
echo "builder:x:$builder:" >>"$work/names/group"
echo "builder:200000:65536" | tee -a "$work/names/subuid" >>"$work/names/subgid"
chown -R "$builder:$builder" "$work/home"
# Runs a line of shell as the builder, without root's rights.
as_builder() {
  WORK=$work LINE=$1 BUILDER_ID=$builder PATH=/usr/sbin:/usr/bin:/sbin:/bin unshare --mount sh -eu -c '
    for file in passwd group subuid subgid; do [ ! -e "/etc/$file" ] || mount --bind "$WORK/names/$file" "/etc/$file"; done
    exec setpriv --reuid "$BUILDER_ID" --regid "$BUILDER_ID" --clear-groups \
      env -i "HOME=$WORK/home" "PATH=$PATH" sh -eu -c "$LINE"'
}
rootless="buildah --storage-driver vfs"

echo "==> a base image"
(cd "$tree" && tar --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' -cf "$work/base.tar" .)
as_builder "cd; base=\$($rootless from scratch)
  $rootless add --quiet \$base $work/base.tar /
  $rootless run --isolation chroot \$base -- ln -sf python3 /usr/bin/python
  $rootless commit --quiet \$base localhost/hangwatch-python" >/dev/null
rm "$work/base.tar"

echo "==> make image, without root"
mkdir "$work/copy" && cp -R "$checkout/Makefile" "$checkout/Dockerfile" "$checkout/.dockerignore" "$work/source/." "$work/copy"
chmod -R a+rX "$work/copy"
arguments="--isolation chroot --build-arg PYTHON_IMAGE=localhost/hangwatch-python"
arguments="$arguments --volume $work/wheels:/wheels:ro --volume $work/pip.conf:/etc/pip.conf:ro"
as_builder "cd $work/copy; make image BUILDER='$rootless' IMAGE_ARGS='$arguments'" >"$work/build.log" 2>&1 || { cat "$work/build.log"; fail "the image cannot be built"; }
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$checkout/hangwatch/__init__.py")
as_builder "cd; $rootless push --quiet localhost/hangwatch:$version docker-archive:$work/home/image.tar:localhost/hangwatch:latest"
podless pull --quiet "docker-archive:$work/home/image.tar" >/dev/null
image_has() { podless inspect --type image --format "{{$1}}" hangwatch | grep -q -- "$2"; }
see "its user is a number, not 0" image_has .Docker.Config.User '^65532:65532$'
see "it has a health check" image_has .Docker.Config.Healthcheck /healthz
see "it is labelled" image_has .OCIv1.Config.Labels org.opencontainers.image.version

box=$(podless from --pull-never --pid host --network host hangwatch)
# "--cap-drop all" would also drop the added capabilities.
drop=$(printf ' --cap-drop CAP_%s' AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID \
  SETPCAP SETUID SYS_CHROOT)
run() { podless run --isolation oci --runtime runc "$@"; }
unprivileged() { run --cap-drop all --user 65532:65532 "$box" -- "$@"; }
# shellcheck disable=SC2086 # $drop must be split into words
privileged() {
  run --user 0:0 $drop --cap-add CAP_SYS_PTRACE --cap-add CAP_DAC_READ_SEARCH --cap-add CAP_KILL --cap-add CAP_SYSLOG "$box" -- "$@"
}
says() {
  text=$1
  shift
  "$@" 2>&1 | grep -q -- "$text"
}
within_tries() {
  for _ in $(seq "$1"); do
    if "$2"; then return; fi
  done
  return 1
}
dumped() { says stuck_here privileged py-spy dump --pid "$victim"; }
read_clock='import ctypes; print("clock", ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) >= 0)'

echo "==> started"
see "hangwatch runs without any right" says '^hangwatch, version' unprivileged hangwatch --version
see "py-spy is inside" says '^py-spy 0.4' unprivileged py-spy --version
see "the chart's capabilities are exactly what it has" says 'CapEff:.0000000400080024$' privileged grep CapEff /proc/self/status
see "under a seccomp filter" says 'Seccomp:.2$' privileged grep Seccomp: /proc/self/status
see "which lets it read the clock's state" says 'clock True' privileged python -c "$read_clock"

setpriv --reuid 12345 --regid 12345 --clear-groups env -i python3 -c '
import time
def stuck_here():
    while True:
        time.sleep(1)
stuck_here()' &
victim=$!
see "it dumps a process of another user, outside of the container" within_tries 20 dumped
see "which it cannot without them" eval '! unprivileged py-spy dump --pid "$victim" >/dev/null 2>&1'
see "the process lives on" kill -0 "$victim"
echo "==> all green"
