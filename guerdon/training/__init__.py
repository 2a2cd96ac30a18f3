"""Training a policy on a learned reward: workers, loops, checkpoints; public names: `guerdon.run`."""
