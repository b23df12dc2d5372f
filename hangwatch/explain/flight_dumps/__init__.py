"""Flight-recorder dumps that torch wrote itself."""
