"""Reward models of the literature, a file each."""
