#!/bin/sh
# Installs hangwatch as a systemd service, upgrades it when run again, or removes it. See --help.
set -eu
# The service's user must be able to read the installed files, whatever root's umask is.
umask 022

PREFIX=/opt/hangwatch
CONFIG=/etc/hangwatch
STATE=/var/lib/hangwatch
UNIT=/etc/systemd/system/hangwatch.service
SYSUSERS=/etc/sysusers.d/hangwatch.conf
COMMAND=/usr/local/bin/hangwatch
SHARE=/usr/local/share
MAN=$SHARE/man/man1/hangwatch.1
# The folder from which each shell loads completions of commands in /usr/local.
COMPLETIONS="bash:$SHARE/bash-completion/completions/hangwatch zsh:$SHARE/zsh/site-functions/_hangwatch
fish:$SHARE/fish/vendor_completions.d/hangwatch.fish"

usage() {
  cat <<TEXT
usage: install.sh [--wheels DIR] [--python PYTHON] [--no-start]
       install.sh --uninstall [--purge]

Installs this checkout of hangwatch into a virtual environment under $PREFIX, with a unit, a user, a configuration
($CONFIG/hangwatch.toml, never overwritten), a man page and completion for bash, zsh and fish. Run again, it upgrades
what is there.

  --wheels DIR     install without a network, from a folder made by: python3 -m pip wheel --wheel-dir DIR /path/to/checkout
  --python PYTHON  the interpreter to build on, 3.10 or later (default: python3)
  --no-start       do not enable or start the service
  --uninstall      stop the service and remove everything but $CONFIG and $STATE
  --purge          with --uninstall: remove those as well, and the user hangwatch
TEXT
}

fail() {
  echo "install.sh: $*" >&2
  exit 2
}

step() {
  echo "==> $*"
}

# True if systemd runs. It does not in an image build or a chroot; systemctl would fail there.
booted() {
  [ -d /run/systemd/system ]
}

check_python() {
  command -v "$python" >/dev/null || fail "$python: not found. Name an interpreter of Python 3.10 or later: --python /path/to/python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version 2>&1) is too old: hangwatch needs 3.10 or later. Name another interpreter: --python python3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
}

make_venv() {
  origin='import os, sys; print(os.path.realpath(sys.base_prefix), *sys.version_info[:2])'
  wanted=$("$python" -c "$origin")
  found=$("$PREFIX/bin/python" -c "$origin" 2>/dev/null || echo none)
  if [ "$wanted" != "$found" ]; then
    step "making a virtual environment in $PREFIX"
    "$python" -m venv --clear "$PREFIX"
  fi
}

install_package() {
  pip="$PREFIX/bin/python -m pip --disable-pip-version-check --quiet"
  if [ -n "$wheels" ]; then
    step "installing hangwatch from $wheels, without a network"
    # Two steps: the second reinstalls hangwatch even if its version is the same, but not the packages that it needs.
    $pip install --no-index --find-links "$wheels" --upgrade hangwatch || fail "$wheels does not hold all that is needed for" \
      "$("$PREFIX/bin/python" --version) on $(uname -m). Make it where both are the same: python3 -m pip wheel --wheel-dir $wheels $checkout"
    $pip install --no-index --find-links "$wheels" --force-reinstall --no-deps hangwatch
  else
    step "installing hangwatch from $checkout"
    # Install from a copy: setuptools leaves a build/ folder in the source, and installs stale modules from it.
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    for part in hangwatch pyproject.toml README.md LICENSE; do cp -R "$checkout/$part" "$copy"; done
    $pip install --retries 2 --upgrade "$copy" || fail "pip could not get what hangwatch needs, see above. Without a network: on a" \
      "machine that has one, with the same Python and architecture, type: python3 -m pip wheel --wheel-dir wheels $checkout" \
      "- then here: $0 --wheels wheels"
  fi
}

install_files() {
  step "installing $UNIT"
  install -D -m 0644 "$here/hangwatch.service" "$UNIT"
  install -D -m 0644 "$here/hangwatch.sysusers" "$SYSUSERS"
  install -d -m 0755 "$CONFIG" "$(dirname "$COMMAND")"
  ln -sfn "$PREFIX/bin/hangwatch" "$COMMAND"
  systemd-sysusers "$SYSUSERS"
  "$PREFIX/bin/hangwatch" config --sample >"$CONFIG/hangwatch.sample.toml"
  if [ ! -e "$CONFIG/hangwatch.toml" ]; then
    printf '# hangwatch: what is not set here has its default; every key is shown in hangwatch.sample.toml beside this file.\n' >"$CONFIG/hangwatch.toml"
  fi
  chmod 0644 "$CONFIG/hangwatch.toml" "$CONFIG/hangwatch.sample.toml"
  "$PREFIX/bin/hangwatch" config --check "$CONFIG/hangwatch.toml"
  install_help
  # Through sh: setpriv would search for the program with root's rights.
  if ! setpriv --reuid=hangwatch --regid=hangwatch --clear-groups sh -c "$PREFIX/bin/hangwatch --version" >/dev/null 2>&1; then
    step "note: only root and the service can run hangwatch: $python lies in a folder that others may not enter." \
      "To let every user run it: --python /usr/bin/python3"
  fi
}

# The man page and the completion scripts. These query the program itself, so they match this version.
install_help() {
  mkdir -p "$(dirname "$MAN")"
  install -m 0644 "$checkout/deploy/man/hangwatch.1" "$MAN"
  for one in $COMPLETIONS; do
    mkdir -p "$(dirname "${one#*:}")"
    _HANGWATCH_COMPLETE=${one%%:*}_source "$PREFIX/bin/hangwatch" >"${one#*:}"
  done
}

start() {
  if ! booted; then
    step "systemd is not running here: the service will start at boot once enabled (systemctl enable hangwatch)"
    return
  fi
  systemctl daemon-reload
  if [ "$no_start" = yes ]; then
    step "not started; to do so: systemctl enable --now hangwatch"
    return
  fi
  systemctl enable --quiet hangwatch.service
  systemctl restart hangwatch.service
  step "running; see: systemctl status hangwatch, journalctl -u hangwatch, curl localhost:9836/metrics"
}

uninstall() {
  if booted && [ -e "$UNIT" ]; then
    systemctl disable --quiet --now hangwatch.service
  fi
  rm -f "$UNIT" "$SYSUSERS" "$COMMAND" /etc/systemd/system/multi-user.target.wants/hangwatch.service
  rm -f "$MAN"
  for one in $COMPLETIONS; do rm -f "${one#*:}"; done
  rm -rf "$PREFIX"
  if booted; then systemctl daemon-reload; fi
  if [ "$purge" = yes ]; then
    rm -rf "$CONFIG" "$STATE" /etc/systemd/system/hangwatch.service.d
    if id hangwatch >/dev/null 2>&1; then userdel hangwatch; fi
    step "removed, with its configuration and incidents"
  else
    step "removed; kept: $CONFIG and $STATE (--purge removes them)"
  fi
}

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
action=install python=python3 wheels='' no_start=no purge=no
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) [ $# -ge 2 ] || fail "--wheels needs a folder"; wheels=$2; shift ;;
    --python) [ $# -ge 2 ] || fail "--python needs an interpreter"; python=$2; shift ;;
    --no-start) no_start=yes ;;
    --uninstall) action=uninstall ;;
    --purge) purge=yes ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown option: $1" ;;
  esac
  shift
done

[ "$(id -u)" = 0 ] || fail "must run as root: it writes $PREFIX, $CONFIG and $UNIT. Try: sudo $0"
if [ "$action" = uninstall ]; then
  uninstall
  exit 0
fi
[ "$purge" = no ] || fail "--purge goes with --uninstall"
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "$wheels: no such folder. Make one with: python3 -m pip wheel --wheel-dir $wheels $checkout"
# No two installations in one folder: dpkg's next upgrade would overwrite parts of this one.
if [ ! -e "$UNIT" ] && dpkg-query --search "$PREFIX/bin/hangwatch" >/dev/null 2>&1; then
  fail "$PREFIX belongs to the Debian package hangwatch. To install this checkout in its place: apt remove hangwatch"
fi
command -v systemd-sysusers >/dev/null || fail "systemd-sysusers: not found; this installs a systemd service. Without systemd: pip install $checkout"
check_python
make_venv
install_package
install_files
start
