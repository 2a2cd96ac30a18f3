"""Guerdon: learned rewards for reinforcement learning, and the evidence that they can be trusted."""

__version__ = "0.1.0"
