"""Public paths that stay; the code is in the folders of its feature."""
