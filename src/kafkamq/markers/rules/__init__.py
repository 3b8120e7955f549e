"""The rules of markers, leases and redelivery: pure."""
