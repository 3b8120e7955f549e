"""What the pages look up: logs of a namespace folded into a database that may be deleted."""
