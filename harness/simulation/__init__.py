"""The shipped code under a seed: threads of many processes, one at a time, on a virtual clock."""
