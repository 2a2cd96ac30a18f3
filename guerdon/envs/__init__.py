"""guerdon.envs"""
