"""The rules of claims are pure."""
