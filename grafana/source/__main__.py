"""Write the dashboards next to this package: `python -m grafana.source`."""

from pathlib import Path

from grafana.source import fleet, job, node
from grafana.source.panels import as_json

FOLDER = Path(__file__).parent.parent
DASHBOARDS = {"fleet": fleet.dashboard, "node": node.dashboard, "job": job.dashboard}


def main() -> None:
    """Write one file per dashboard."""
    for name, build in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(as_json(build()))


if __name__ == "__main__":
    main()
