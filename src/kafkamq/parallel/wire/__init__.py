"""Offset maps become bytes here: pure, and bounded against hostile input."""
