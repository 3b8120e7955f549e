"""Queues are acknowledged streams here."""
