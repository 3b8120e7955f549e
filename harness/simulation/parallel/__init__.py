"""The shipped parallel consumer under seeds: groups of them, their handlers, and a verdict."""
