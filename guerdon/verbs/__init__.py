"""Groups of verbs of the `guerdon` command: what they take, and what they print."""
