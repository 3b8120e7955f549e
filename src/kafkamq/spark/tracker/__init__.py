"""The tracker as a streaming query."""
