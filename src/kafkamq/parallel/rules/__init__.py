"""The rules of the parallel consumer are pure."""
