"""Markers, positions, ledgers and statuses as bytes: pure, and bounded against hostile input."""
