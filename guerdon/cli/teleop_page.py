"""The page of `guerdon teleop`: what cameras see, what the model says of it, and a key for wrong calls."""

from __future__ import annotations

import io
import json
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image

from guerdon.core.types import Episode, UInt8Array
from guerdon.data.store import StoreWriter
from guerdon.monitoring.page import document, section
from guerdon.rewards.relabel import fires
from guerdon.web import TOKEN_HEADER, Answer, HttpError, Request, WebServer

HISTORY = 300
"""Steps that the curve shows."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is on the page."""

    step: int
    frames: Mapping[str, UInt8Array]
    """Camera -> uint8 [H, W, 3]."""
    scored: Mapping[str, UInt8Array]
    """Camera -> uint8 [k, H, W, 3]; the frames that the verdict was made of."""
    prob_success: float
    wrong: bool = False
    """Whether it was saved as a wrong call already."""


class LiveView:
    """The latest verdicts, for the page; used by the loop and by the server's threads."""

    def __init__(self, threshold: float, save_dir: Path, source: str) -> None:
        self.threshold, self.save_dir, self._source = threshold, save_dir, source
        self._lock = threading.Lock()
        self._curve: deque[float] = deque(maxlen=HISTORY)
        self._shown: Shown | None = None
        self.num_wrong = 0

    def show(self, shown: Shown) -> None:
        """A new step."""
        with self._lock:
            self._shown = shown
            self._curve.append(shown.prob_success)

    def state(self) -> dict[str, Any]:
        """For the page."""
        with self._lock:
            return {
                "step": 0 if self._shown is None else self._shown.step,
                "cameras": [] if self._shown is None else list(self._shown.frames),
                "threshold": self.threshold,
                "curve": [round(value, 4) if math.isfinite(value) else None for value in self._curve],
                "num_wrong": self.num_wrong,
            }

    def picture(self, camera: str) -> bytes | None:
        """The latest frame of a camera as PNG."""
        with self._lock:
            frame = None if self._shown is None else self._shown.frames.get(camera)
        if frame is None:
            return None
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "png")
        return file.getvalue()

    def save_wrong(self) -> str:
        """Save what is shown as a wrong call; returns what was done, in words."""
        with self._lock:
            shown = self._shown
            if shown is None:
                return "there is nothing to save yet"
            if shown.wrong:
                return f"step {shown.step} is saved already"
            called = bool(fires(shown.prob_success, self.threshold))
            count = len(next(iter(shown.scored.values())))
            labels = np.zeros(count, np.float32)
            labels[-1] = 0.0 if called else 1.0
            episode = Episode(
                frames=shown.scored,
                labels=labels,
                success=not called,
                source=self._source,
                split="train",  # whoever saw the model's mistake has chosen the frame: it cannot measure it
            )
            with StoreWriter(self.save_dir) as writer:
                writer.add_many([episode])
            self._shown = replace(shown, wrong=True)
            self.num_wrong += 1
            word = "failure" if called else "success"
            return f"step {shown.step} saved as {word} (the model said {shown.prob_success:.3f})"


_SCRIPT = """
const curve = document.getElementById('curve'), number = document.getElementById('number');
const note = document.getElementById('note'), line = document.getElementById('threshold');
let names = '';
async function tell() {
  const answer = await fetch('wrong', {method: 'POST', headers: {[TOKEN[0]]: TOKEN[1]}});
  note.textContent = answer.ok ? await answer.text() : (await answer.json()).error;
}
document.getElementById('wrong').onclick = tell;
document.addEventListener('keydown', event => { if (event.key === 'w' && !event.repeat) tell(); });
async function look() {
  try {
    const state = await (await fetch('state.json')).json();
    if (state.cameras.join() !== names) {
      names = state.cameras.join();
      const strip = document.getElementById('frames'); strip.replaceChildren();
      for (const name of state.cameras) {
        const figure = document.createElement('figure'), image = document.createElement('img');
        image.dataset.camera = name; image.alt = name;
        const words = document.createElement('figcaption'); words.textContent = name;
        figure.append(image, words); strip.append(figure);
      }
    }
    for (const image of document.querySelectorAll('#frames img'))
      image.src = 'frame/' + encodeURIComponent(image.dataset.camera) + '?' + state.step;
    const points = state.curve, last = points[points.length - 1], width = 600, height = 160;
    const x = i => width * i / Math.max(HISTORY - 1, 1), y = p => height * (1 - p);
    curve.setAttribute('points', points.map((p, i) => x(i).toFixed(1) + ',' + y(p).toFixed(1)).join(' '));
    line.setAttribute('y1', y(state.threshold)); line.setAttribute('y2', y(state.threshold));
    number.textContent = last === undefined ? '-' : last === null ? 'not a number' : last.toFixed(3);
    number.className = 'big ' + (last > state.threshold ? 'good' : 'bad');
    document.getElementById('facts').textContent = 'step ' + state.step + ', threshold ' +
      state.threshold.toFixed(3) + ', ' + state.num_wrong + ' wrong calls saved';
  } catch (error) { note.textContent = 'the robot is not there any more'; }
  setTimeout(look, 200);
}
look();
"""
_STYLE = """
#frames { display: flex; flex-wrap: wrap; gap: 12px; }
#frames img { width: 256px; height: 256px; image-rendering: pixelated; border-width: 1px; }
#number { color: var(--tone); } svg.plot { border: 1px solid var(--line); }
button { font: inherit; padding: 6px 14px; }
"""


def page(token: str) -> str:
    """The page that shows a `LiveView`; `token` lets it save wrong calls."""
    plot = (
        '<svg class="plot" viewBox="0 0 600 160" role="img" aria-label="probability of success over time">'
        '<line id="threshold" class="limit" x1="0" x2="600" y1="80" y2="80"/>'
        '<polyline id="curve" class="curve" points=""/></svg>'
    )
    body = f'<div id="number" class="big">-</div><p class="note" id="facts"></p>{plot}'
    button = '<p><button id="wrong">wrong call (w)</button> <span id="note" role="status"></span></p>'
    known = f"const HISTORY = {HISTORY}, TOKEN = {json.dumps([TOKEN_HEADER, token])};"
    script = f"<script>{known}{_SCRIPT}</script>"
    sections = [section("What the cameras see", '<div id="frames"></div>')]
    sections.append(section("Probability of success", body + button) + script)
    return document("Reward model, live", "", sections, _STYLE)


class ViewServer(WebServer):
    """Serves one `LiveView` on this machine alone; it begins at once."""

    def __init__(self, view: LiveView, port: int) -> None:
        self.view = view
        super().__init__("127.0.0.1", port, name="teleop", pages=True)
        self.start()

    def respond(self, request: Request) -> Answer | None:
        """The page, what it asks for, and pictures; a wrong call."""
        path = request.path
        if (request.method, path) == ("POST", "/wrong"):
            return Answer.of_text(self.view.save_wrong())
        if request.method == "GET" and path == "/":
            return Answer.of_text(page(self.token), "text/html")
        if request.method == "GET" and path == "/state.json":
            return Answer.of_json(self.view.state())
        if request.method == "GET" and path.startswith("/frame/"):
            image = self.view.picture(unquote(path[len("/frame/") :]))
            if image is not None:
                return Answer(body=image, kind="image/png")
        raise HttpError(404, f"there is nothing at {request.method} {path[:80]}")
