"""The processes of a run and everything in flight between them. The only package that imports ray."""
