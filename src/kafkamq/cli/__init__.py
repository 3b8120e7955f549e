"""The commands of the program ``kafkamq``; they hold no rule of a queue."""

from kafkamq.cli.app import app, main

__all__ = ["app", "main"]
