"""The batch and streaming source of markers, deliveries and messages."""
