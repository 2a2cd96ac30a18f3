"""Train as the config says: `train_embodied_agent.py --config-path DIR --config-name NAME [overrides]`."""

import sys

from guerdon.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
