"""Clean a robot's recording: `process_realworld_data.py data.pkl` writes `collected_data/` beside it."""

import sys

from guerdon.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "process", *sys.argv[1:]]))
