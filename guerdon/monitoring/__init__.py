"""Watching reward models: the reward card, drift and reward hacking, reports."""
