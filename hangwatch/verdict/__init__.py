"""Verdicts: from groups and the wait-for graph to suspects, evidence, confidence and text. Pure."""
