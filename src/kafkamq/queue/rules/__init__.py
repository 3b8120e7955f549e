"""Rules that every backend shares: pure."""
