"""The rules of the parallel consumer: pure."""
