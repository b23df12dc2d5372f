#!/usr/bin/env bash
# tool: chrony 4.3 (Debian 12), as root
# finding: with `local` in its configuration and no source at all, `chronyc -c tracking` says leap Normal, offset 0, exit 0
# last run: 2026-11-28
#
# Only the reference id 7F7F0101 (the local clock) shows that nothing was synchronised. `chronyc waitsync` ends with 1.
. "$(dirname "$0")/lib.sh"
(cd "$folder" && apt-get -qq download chrony >/dev/null && dpkg -x chrony_*.deb .)
chmod 0700 "$folder"
printf 'local stratum 8\ncmdport 323\nbindcmdaddress 127.0.0.1\nbindcmdaddress /\npidfile %s/pid\n' "$folder" > "$folder/chrony.conf"
cat > "$folder/inside.sh" <<'SH'
ip link set lo up
"$1/usr/sbin/chronyd" -x -d -u root -f "$1/chrony.conf" > "$1/log" 2>&1 &
daemon=$!
for _ in $(seq 50); do
  "$1/usr/bin/chronyc" -h 127.0.0.1 -c tracking > "$1/answer" 2>/dev/null && break
  sleep 0.2
done
echo "exit code $?: $(cut -d, -f1,3,5,14 "$1/answer")"
kill "$daemon"
SH
unshare -n bash "$folder/inside.sh" "$folder" | expect 'exit code 0: 7F7F0101,8,0.000000000,Normal'
