"""Pictures of docs/benchmarks.md, from the data files: `python -m benchmarks.plots`. Needs the extra `bench`."""

from __future__ import annotations

import matplotlib as mpl
from matplotlib import pyplot

from benchmarks import results

IMAGES = results.ROOT / "docs" / "img"


def draw_detection() -> None:
    """Draw the share of hangs that hangwatch and each rule have found, over the minutes since the hang began."""
    found = results.load("detection").details[0]
    minutes = [float(minute) for minute in found.columns[1:]]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, *shares in found.rows:
        is_ours = name.startswith("hangwatch")
        axes.step(minutes, [100 * float(share) for share in shares], where="post", label=name, lw=3 if is_ours else 1.2)
    axes.set(xlabel="minutes since the hang began", ylabel="hangs found (%)", ylim=(-2, 103))
    axes.legend(fontsize=8, loc="center right")
    figure.savefig(IMAGES / "bench-detection.png", dpi=100, metadata={"Software": None})


def draw_scale() -> None:
    """Draw CPU seconds over ranks, with logarithmic axes."""
    (table,) = results.load("scale").tables
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    ranks = [int(name.replace(",", "").split()[0]) for name in table.columns[1:-1]]
    for step, *seconds, slope in table.rows:
        points = [(size, float(value)) for size, value in zip(ranks, seconds, strict=True) if value]
        axes.loglog(*zip(*points, strict=True), marker="o", label=f"{step} (slope {slope})")
    axes.set(xlabel="ranks", ylabel="CPU seconds")
    axes.legend(fontsize=8)
    figure.savefig(IMAGES / "bench-scale.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    mpl.use("Agg")
    IMAGES.mkdir(exist_ok=True)
    draw_detection()
    draw_scale()
