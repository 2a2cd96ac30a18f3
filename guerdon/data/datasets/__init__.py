"""From stored episodes to data to learn from: frames, splits, duplicates, audits; see `guerdon.datasets`."""
