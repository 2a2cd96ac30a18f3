"""The way of a reward through the package: as long as the docs say, and no longer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {"PPO": 6, "SAC and RLPD": 7, "SAC, asynchronous": 10, "GAIL with PPO": 6}
"""Files today; a change that makes the way shorter lowers the number, none raises it."""


@pytest.mark.slow
def test_the_docs_list_the_files_that_a_reward_passes():
    command = [sys.executable, str(ROOT / "scripts" / "reward_path_files.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    page = (ROOT / "docs" / "architecture.md").read_text()
    (printed,) = re.findall(r"<!-- files -->\n(.*?)\n<!-- /files -->", page, flags=re.S)
    assert printed == found, "run `python scripts/reward_path_files.py --write docs/architecture.md`"
    counts = {name: int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", found, flags=re.M)}
    assert counts.keys() == MOST.keys()
    assert all(counts[name] <= most for name, most in MOST.items()), counts
