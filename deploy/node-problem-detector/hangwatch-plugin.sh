#!/bin/sh
# A custom plugin of node-problem-detector. Exit status: 0 healthy, 1 problem, any other unknown. Prints one short line.
# The arguments are names of checks. Without arguments, all checks run.
HANGWATCH="${HANGWATCH:-/opt/hangwatch/bin/hangwatch}"

report=$(timeout 20 $HANGWATCH check "$@" 2>/dev/null)
line=$(printf '%s\n' "$report" | awk '$1 == "CRITICAL" { sub(/:$/, "", $3); print $2 " " $3; exit }')
if [ -n "$line" ]; then
    echo "$line"
    exit 1
fi
if [ -z "$report" ]; then
    echo "hangwatch check did not respond"
    exit 2
fi
if printf '%s\n' "$report" | grep -q '^UNKNOWN'; then
    echo "some checks cannot tell"
    exit 2
fi
echo "this node is fit to train"
