"""Plain learners: one readable file for each algorithm."""
