#!/bin/sh
# Builds a Debian package of hangwatch from its wheel. `make deb` calls it; see --help.
set -eu
umask 022

usage() {
  cat <<TEXT
usage: build.sh [--python PYTHON] [--output DIR] WHEEL

Makes DIR/hangwatch_VERSION_ARCHITECTURE.deb (default: dist): a virtual environment under /opt/hangwatch with all that
hangwatch needs, the unit, its user, the configuration. It fits the release of Debian or Ubuntu whose PYTHON it is
built on (default: /usr/bin/python3), and needs that release's python3 alone.
TEXT
}

fail() {
  echo "build.sh: $*" >&2
  exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
python=/usr/bin/python3 output=dist wheel=
while [ $# -gt 0 ]; do
  case $1 in
    --python) [ $# -ge 2 ] || fail "--python needs an interpreter"; python=$2; shift ;;
    --output) [ $# -ge 2 ] || fail "--output needs a folder"; output=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; fail "unknown option: $1" ;;
    *) wheel=$1 ;;
  esac
  shift
done
[ -f "$wheel" ] || fail "${wheel:-no wheel}: no such file. Make it with: make dist"
for program in dpkg-deb dpkg "$python"; do
  command -v "$program" >/dev/null || fail "$program: not found; a package is built on the release that it is for"
done
# pip of the build environment: the package contains no pip.
pip=${PIP:-"$checkout/.venv/bin/python -m pip --disable-pip-version-check --quiet"}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
venv=$root/opt/hangwatch
"$python" -m venv --without-pip "$venv"
$pip --python "$venv/bin/python" install --no-compile "$wheel"

# Remove the path of the build folder. Activation scripts are not needed: no person works in this environment.
rm -f "$venv"/bin/[Aa]ctivate* "$venv"/lib/python3*/site-packages/hangwatch-*.dist-info/direct_url.json
sed -i '/^command = /d' "$venv/pyvenv.cfg"
grep -rlI "^#!$venv/" "$venv/bin" | xargs sed -i "1s|^#!$venv/|#!/opt/hangwatch/|"
# Compile here, without checks at run time: hangwatch then writes nothing under /opt, and dpkg removes all files.
"$python" -m compileall -q -s "$root" -p / --invalidation-mode unchecked-hash "$venv/lib"
if found=$(grep -rlI "$work" "$root"); then fail "these name the folder of the build: $found"; fi
run="$venv/bin/python -IB $venv/bin/hangwatch"

install -d "$root/usr/bin" "$root/etc/hangwatch" "$root/usr/share/doc/hangwatch/examples"
ln -s /opt/hangwatch/bin/hangwatch "$root/usr/bin/hangwatch"
install -D -m 0644 "$checkout/deploy/systemd/hangwatch.service" "$root/usr/lib/systemd/system/hangwatch.service"
install -D -m 0644 "$checkout/deploy/systemd/hangwatch.sysusers" "$root/usr/lib/sysusers.d/hangwatch.conf"
install -m 0644 "$checkout/deploy/systemd/kernel-stack.conf" "$checkout"/deploy/prometheus/* "$root/usr/share/doc/hangwatch/examples"
install -m 0644 "$here/copyright" "$checkout/README.md" "$root/usr/share/doc/hangwatch"
install -m 0644 "$here/hangwatch.toml" "$root/etc/hangwatch/hangwatch.toml"
$run config --sample >"$root/etc/hangwatch/hangwatch.sample.toml"

# The completion scripts query the program itself, so they match this version.
for shell in bash:bash-completion/completions/hangwatch zsh:zsh/vendor-completions/_hangwatch fish:fish/vendor_completions.d/hangwatch.fish; do
  install -d "$root/usr/share/$(dirname "${shell#*:}")"
  _HANGWATCH_COMPLETE=${shell%%:*}_source $run >"$root/usr/share/${shell#*:}"
done

install -d "$root/usr/share/man/man1"
gzip -9nc "$checkout/deploy/man/hangwatch.1" >"$root/usr/share/man/man1/hangwatch.1.gz"

install -d "$root/DEBIAN"
version=$($run --version | sed 's/.* //')
architecture=$(dpkg --print-architecture)
supported=$("$python" -c 'import sys; print("python3 (>= %d.%d), python3 (<< %d.%d)" % (*sys.version_info[:2], sys.version_info[0], sys.version_info[1] + 1))')
sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@PYTHON@/$supported/" \
  -e "s/@KIB@/$(du -sk "$root" | cut -f1)/" "$here/control" >"$root/DEBIAN/control"
printf '%s\n' /etc/hangwatch/hangwatch.toml /etc/hangwatch/hangwatch.sample.toml >"$root/DEBIAN/conffiles"
install -m 0755 "$here/preinst" "$here/postinst" "$here/prerm" "$here/postrm" "$root/DEBIAN"
mkdir -p "$output"
dpkg-deb --root-owner-group --build "$root" "$output/hangwatch_${version}_$architecture.deb"
