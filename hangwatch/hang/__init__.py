"""Is this job making progress? Jobs, detection, capture, groups, verdict."""
