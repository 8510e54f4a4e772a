"""Rewards: rules, the user's functions in processes of their own, and reward models."""
