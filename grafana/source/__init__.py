"""The dashboards as typed code. `python -m grafana.source` writes grafana/*.json."""
