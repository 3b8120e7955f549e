"""``kafkamq web``: what a namespace holds and what became of it, in a browser and as JSON."""
