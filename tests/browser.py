"""Open a page in headless Chromium. A missing browser fails the test, it does not skip it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]


def find_browser() -> str:
    """$GUERDON_CHROMIUM, or chromium from Debian's packages."""
    names = [os.environ.get("GUERDON_CHROMIUM"), "chromium", "chromium-browser"]
    for name in filter(None, names):
        if path := shutil.which(name):
            return path
    raise AssertionError("Chromium is missing: apt-get install -y --no-install-recommends chromium")


def screenshot(
    html_path: Path | str, png_path: Path, *, width: int = 1000, height: int = 4000, dark: bool = False
) -> Path:
    """Draw the first `height` pixels of a page, a file or a URL, to PNG; `dark`: preferred colour scheme."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run([f"--screenshot={png_path}", f"--window-size={width},{height}", scheme], html_path)
    assert png_path.stat().st_size > 0
    return png_path


def dump_dom(html_path: Path) -> str:
    """The page as the browser understood it."""
    return _run(["--dump-dom"], html_path)


def _run(arguments: list[str], html_path: Path | str) -> str:
    live = isinstance(html_path, str)
    place = str(html_path) if live else Path(html_path).resolve().as_uri()
    arguments = [*arguments, "--virtual-time-budget=3000"] if live else arguments  # its scripts may ask first
    with tempfile.TemporaryDirectory() as profile:
        command = [find_browser(), *FLAGS, f"--user-data-dir={profile}", *arguments]
        result = subprocess.run(
            [*command, place],
            capture_output=True,
            text=True,
            timeout=480,
            check=False,
        )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
