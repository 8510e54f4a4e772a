"""How long samples will be."""
