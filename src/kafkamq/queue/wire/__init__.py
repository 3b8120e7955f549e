"""Headers, keys and payloads as bytes: pure, and bounded against hostile input."""
