"""Rules of share groups: pure."""
