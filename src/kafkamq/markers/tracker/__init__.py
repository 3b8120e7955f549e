"""The tracker in this process: it folds a marker partition, and settles what is due."""
