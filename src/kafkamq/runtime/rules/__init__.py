"""The rules of the executors are pure."""
