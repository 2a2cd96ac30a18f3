"""Fit a reward model: `main_reward.py --config-path DIR --config-name NAME [overrides]`."""

import sys

from guerdon.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train-reward", *sys.argv[1:]]))
