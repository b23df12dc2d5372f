"""Send the page of a made-up hang to Alertmanager, or as Alertmanager's JSON to a webhook. It resolves by itself.

usage: page_test.py URL
"""

import datetime
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 10.0
RESOLVED_SECONDS = 120
LABELS = {"alertname": "HangwatchTrainingHung", "severity": "critical", "job_id": "page-test", "job_key": "page-test"}
DESCRIPTION = """Stuck on: open(/data/shard-3) in pid 2805, data-loader worker of rank 3 (gpu-07)
Do first: nothing. `make page-test` has made up this hang: no job, rank or node of this page exists
Named:
  rank 3 on gpu-07: waits for its loader worker (pid 2805, in open) at train.py:48"""
ANNOTATIONS = {
    "summary": "page-test (made up) has hung for 2 min: rank 3 on gpu-07: open data/shard-3",
    "description": DESCRIPTION,
    "runbook_url": "docs/runbooks/HangwatchTrainingHung.md",
}


def post(url: str, value: object) -> None:
    """Post a value as JSON. Raises OSError."""
    request = urllib.request.Request(url, json.dumps(value).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # noqa: S310
        pass


def read_configuration(url: str) -> str:
    """Return the configuration of the Alertmanager at this address; "" if another server answers."""
    try:
        with urllib.request.urlopen(f"{url}/api/v2/status", timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
            return str(json.load(answer)["config"]["original"])
    except (urllib.error.HTTPError, ValueError, KeyError, TypeError):
        return ""


def main(url: str) -> str:
    """Send the page, and return the sentence that says where it went."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ends = now + datetime.timedelta(seconds=RESOLVED_SECONDS)
    alert = {"labels": LABELS, "annotations": ANNOTATIONS, "startsAt": now.isoformat(), "endsAt": ends.isoformat()}
    configuration = read_configuration(url)
    if configuration:
        post(f"{url}/api/v2/alerts", [alert])
        if "on-call" not in configuration:
            return f"sent to Alertmanager at {url}, which has no receiver on-call: see alertmanager.example.yaml"
        return f"sent to Alertmanager at {url}: its on-call gets the page now, and its end in {RESOLVED_SECONDS} s"
    labels = {name: LABELS[name] for name in ("job_id", "job_key")}
    form = {"version": "4", "receiver": "on-call", "status": "firing", "groupLabels": labels, "commonLabels": LABELS}
    post(url, {**form, "commonAnnotations": ANNOTATIONS, "alerts": [{**alert, "status": "firing"}]})
    return f"sent to {url}, in the form of Alertmanager's webhook"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith(("http://", "https://")):
        sys.exit(f"usage: {Path(__file__).name} URL, such as http://127.0.0.1:9093 or that of a webhook")
    try:
        sys.stdout.write(main(sys.argv[1].rstrip("/")) + "\n")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: not sent: {error}")
