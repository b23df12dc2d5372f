"""What a scrape of Prometheus gets."""

from hangwatch.metrics.collector import BoardCollector, families, registry

__all__ = ["BoardCollector", "families", "registry"]
