"""Records of claims as text: pure, and bounded against hostile input."""
