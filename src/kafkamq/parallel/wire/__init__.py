"""Offset maps as bytes: pure, and bounded against hostile input."""
