"""Records of claims become text here: pure, and bounded against hostile input."""
