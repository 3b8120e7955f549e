"""The shipped claims engine under seeds: members, their claims or ranges, and a verdict."""
