"""Groups and wait-for graph to a verdict: suspects, evidence, confidence and text. Pure."""
