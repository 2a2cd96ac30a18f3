"""Small tasks for reward models, with fixed episode lengths, and their scripted experts."""
