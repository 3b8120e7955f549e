"""What the project is tested with, and no user runs: it imports the product, never the reverse."""
