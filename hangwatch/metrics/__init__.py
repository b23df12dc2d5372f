"""Prometheus metrics, made from the board."""

from hangwatch.metrics.collector import BoardCollector, families, registry

__all__ = ["BoardCollector", "families", "registry"]
