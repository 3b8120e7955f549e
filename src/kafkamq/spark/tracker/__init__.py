"""Here the tracker is a streaming query."""
