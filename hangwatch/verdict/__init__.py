"""Verdicts: find suspects from groups of ranks and the wait-for graph, then add evidence, confidence and text. Pure."""
