"""The rules of claims: pure."""
