"""Verdicts from elsewhere: by token, of messages that are held or handed over (R34)."""
