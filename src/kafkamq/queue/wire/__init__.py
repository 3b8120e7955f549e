"""Headers, keys and payloads become bytes here: pure, and bounded against hostile input."""
