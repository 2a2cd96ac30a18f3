"""Rewards by rule for text tasks."""
