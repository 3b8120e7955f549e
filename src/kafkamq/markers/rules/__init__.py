"""The rules of markers, leases and redelivery are pure.

Tests of rule N are named ``test_rN_...``; ``tests/mutant_lists`` has the edits that break a rule,
and which test file finds each.
"""
