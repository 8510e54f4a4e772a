"""A checkpoint behind HTTP, for harnesses that call the policy themselves."""
