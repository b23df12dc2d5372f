#!/bin/sh
# Validates the PodMonitor and the PrometheusRule of the chart against the Prometheus operator's own schemas, which are in
# an npm package. The test suite uses Kubernetes' schemas, which do not contain these kinds.
#
#   deploy/helm/validate-custom-resources.sh        needs node and npm, and .venv of `make test`
set -eu
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
chart=$PWD/deploy/helm/hangwatch
for program in node npm "$python"; do
  command -v "$program" >/dev/null || {
    echo "validate-custom-resources.sh: $program: not found; install Debian's nodejs and npm, and run make test once" >&2
    exit 2
  }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-fund --no-audit @kubernetes-models/prometheus-operator@6.0.0

"$python" - "$chart" <<'PYTHON' >rendered.json 2>helm.log || { cat helm.log; exit 1; }
import json
import sys

import yaml
from helm_python import chart

values = {"image": {"repository": "registry.example.com/hangwatch"}, "podMonitor": {"enabled": True, "endpoint": {"scheme": "https"}}, "prometheusRule": {"enabled": True}}
files = chart.Chart.load(sys.argv[1]).render(values, name="release", namespace="gpu")
found = [one for text in files.values() if "monitoring.coreos.com" in text for one in yaml.safe_load_all(text)]
json.dump([one for one in found if one], sys.stdout)
PYTHON

cat >validate.mjs <<'NODE'
import fs from "node:fs";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";
import { PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule";

const kinds = { PodMonitor, PrometheusRule };
const rendered = JSON.parse(fs.readFileSync("rendered.json"));
const names = rendered.map((one) => one.kind).sort().join();
if (names !== "PodMonitor,PrometheusRule") throw new Error(`rendered: ${names}`);
for (const one of rendered) {
  new kinds[one.kind](one).validate();
  console.log(`${one.kind}: valid`);
}
// The validation must be able to fail.
for (const one of rendered) {
  const wrong = structuredClone(one);
  if (one.kind === "PodMonitor") wrong.spec.podMetricsEndpoints[0].interval = "often";
  else wrong.spec.groups[0].rules[0].expr = { not: "a query" };
  let refused = false;
  try { new kinds[one.kind](wrong).validate(); } catch { refused = true; }
  if (!refused) throw new Error(`a wrong ${one.kind} was taken for valid`);
}
NODE
node validate.mjs
