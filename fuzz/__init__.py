"""Fuzzing: damaged and hostile inputs for everything that reads files; `python -m fuzz --help`."""
