"""Whole workflows: the demo, the installation check."""
