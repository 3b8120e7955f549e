"""Executors of handlers: threads, an event loop, processes; and the worker that uses them."""
