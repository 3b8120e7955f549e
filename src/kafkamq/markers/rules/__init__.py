"""The rules of markers, leases and redelivery are pure.

The index from a rule to its tests are ``tests/mutant_lists``: they name each rule, the edits that
break it, and the test file that finds each. Tests' names begin with the rule, in two digits
(``test_r05_...``).
"""
