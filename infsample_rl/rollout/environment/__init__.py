"""Trajectories of several turns: what a turn asks for, and what comes back."""
