#!/usr/bin/env python3
"""Hook that posts the verdict to Slack, without Alertmanager. Python 3.6 or later, no packages.

    on_hung = ["/etc/hangwatch/hooks/post-to-slack.py", "{incident}", "/etc/hangwatch/slack-url"]

The file slack-url holds the URL of an incoming webhook; only the user hangwatch may read it. Each node of a job
posts separately.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

folder, url_file = map(Path, sys.argv[1:])
incident = json.loads((folder / "incident.json").read_text())
head = "{HANGWATCH_JOB} ({HANGWATCH_OWNER}) is {HANGWATCH_STATE} on {HANGWATCH_NODE}".format(**os.environ)
verdict = incident["verdict"]
lines = ["Stuck on: " + verdict["stuck_on"], "Do first: " + verdict["next_step"]] if verdict["stuck_on"] else []
text = "\n".join([head, *lines, verdict["message"], "hangwatch report " + os.environ["HANGWATCH_NAME"]])
for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # otherwise <!channel> would notify the channel
    text = text.replace(plain, escaped)
request = urllib.request.Request(  # noqa: S310 - the URL is the site's
    url_file.read_text().strip(), json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
)
urllib.request.urlopen(request, timeout=10)  # noqa: S310
