"""The definition of a check; discovering and running checks; showing their results."""
