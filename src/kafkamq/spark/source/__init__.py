"""Here is the batch and streaming source of markers, deliveries and messages."""
