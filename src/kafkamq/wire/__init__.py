"""Bytes to values and back: pure, and bounded against hostile input."""
