"""ManiSkill as vector environments, one simulation a process."""
