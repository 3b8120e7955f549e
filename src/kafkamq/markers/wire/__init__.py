"""Markers, positions, ledgers and statuses become bytes here: pure, and bounded against hostile
input.
"""
