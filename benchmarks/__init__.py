"""Side-by-side measurements; `make bench` runs them all and prints versions, settings and results."""
