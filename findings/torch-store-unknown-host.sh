#!/usr/bin/env bash
# tool: torch 2.13.0
# finding: a MASTER_ADDR that no name server knows is retried until the timeout, and the exception speaks of a timeout
# last run: 2026-11-29
#
# A host name without an address is a permanent error, and getaddrinfo answers at once. TCPStore asks again until its
# timeout has passed. Its DistNetworkError then says "timed out ... while trying to connect", as for a host that is
# down. Only log lines tell the reason, and those speak of IPv6 addresses.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/connect.py" <<'PY'
import datetime, time
import torch.distributed as dist

began = time.monotonic()
try:
    dist.TCPStore("no-such-host.invalid", 29500, 2, False, timeout=datetime.timedelta(seconds=4))
except dist.DistNetworkError as error:
    text = str(error)
waited = time.monotonic() - began >= 4
print(f"waited for the timeout: {waited}; says timed out: {'timed out' in text}; names the reason: {'gai error' in text}")
PY
timeout 100 "$folder/venv/bin/python" "$folder/connect.py" 2>"$folder/log" |
  expect 'waited for the timeout: True; says timed out: True; names the reason: False'
families=$(grep -o 'The IPv[46] network addresses of' "$folder/log" | sort -u)
echo "$families" | expect 'The IPv6 network addresses of'
