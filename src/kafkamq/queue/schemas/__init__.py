"""Bodies that are neither bytes nor JSON: deserializers, and schemas of a registry."""
