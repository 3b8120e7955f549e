"""Markers, positions, ledgers and statuses become bytes here, bounded against hostile input."""
