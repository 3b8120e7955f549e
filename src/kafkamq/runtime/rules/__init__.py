"""Rules of the executors: pure."""
