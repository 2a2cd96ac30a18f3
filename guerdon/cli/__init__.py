"""The command `guerdon`: a file for each group of verbs."""
