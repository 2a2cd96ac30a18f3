"""Episodes as one HTML page: frames, labels, learned probability and rewards, for people without Rerun."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray, UInt8Array
from guerdon.monitoring.page import document, figure, section, strip
from guerdon.monitoring.svg import Plot
from guerdon.monitoring.views import ViewedEpisode

PICTURES = 8
"""Of an episode and camera, evenly spaced."""
MAX_SIDE = 160
REWARDS = {"env_reward": "env reward", "learned_reward": "learned reward"}
STYLE = """
svg.plot .learned { stroke: var(--care); stroke-width: 2.2; fill: none; }
.strip img { image-rendering: pixelated; }
"""


def write_page(path: Path, episodes: Iterable[ViewedEpisode], title: str) -> tuple[int, int]:
    """Write the page, replacing an older one; returns how many episodes and frames it is of.

    Args:
        path: of the file; missing folders are made.
        episodes: read one at a time; the page keeps a few small pictures of each.
        title: of the page.
    """
    sections, frames = [], 0
    for episode in episodes:
        body, count = _episode(episode)
        sections.append(section(episode.name, body, episode.about))
        frames += count
    note = f'<p class="note">{len(sections)} episodes, {frames} frames. {escape(_key())}</p>'
    make_directory(path.parent)
    write_atomic(path, document(title, note, sections, STYLE))
    return len(sections), frames


def _key() -> str:
    return "Green edges and bands: success by label or environment. Dashed: the threshold."


def _episode(episode: ViewedEpisode) -> tuple[str, int]:
    """The HTML of an episode, and its number of frames."""
    parts, counts = [], set()
    success = episode.values.get("label", episode.values.get("env_success"))
    for camera, frames in episode.frames.items():
        kept, count = _evenly(frames)
        counts.add(count)
        if success is not None and len(success) != count:
            raise DataError(f"{episode.name} has {count} frames and {len(success)} labels")
        pictures = [_figure(frame, step, camera, success) for step, frame in kept]
        parts.append(f'<p class="note">{escape(camera)}</p>{strip(pictures)}')
    if len(counts) != 1:
        raise DataError(f"{episode.name}: the cameras have different numbers of frames: {sorted(counts)}")
    (count,) = counts
    plots = [_success_plot(episode, success, count), *_reward_plots(episode, count)]
    return f'{"".join(parts)}<div class="pair">{"".join(plots)}</div>', count


def _evenly(frames: Iterable[UInt8Array]) -> tuple[list[tuple[int, UInt8Array]], int]:
    """At most 2 * PICTURES small pictures with their steps are held; PICTURES of them at the end.

    The number of frames of a film is not known before its end: whenever too many are held, every second goes.
    """
    kept: list[tuple[int, UInt8Array]] = []
    stride, last, count = 1, None, 0
    for step, frame in enumerate(frames):
        last, count = (step, frame), step + 1
        if step % stride == 0:
            kept.append((step, _small(frame)))
        if len(kept) > 2 * PICTURES:
            kept, stride = kept[::2], 2 * stride
    if last is not None and kept[-1][0] != last[0]:
        kept.append((last[0], _small(last[1])))
    chosen = np.unique(np.linspace(0, len(kept) - 1, min(PICTURES, len(kept))).round().astype(int))
    return [kept[number] for number in chosen], count


def _small(frame: UInt8Array) -> UInt8Array:
    image = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else np.ascontiguousarray(frame))
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(image.convert("RGB"))


def _figure(frame: UInt8Array, step: int, camera: str, success: FloatArray | None) -> str:
    file = BytesIO()
    Image.fromarray(frame).save(file, format="PNG")
    style = "" if success is None else "success" if success[step] >= 0.5 else "failure"
    return figure(file.getvalue(), "png", f"{camera}, step {step}", f"step {step}", style)


def _success_plot(episode: ViewedEpisode, success: FloatArray | None, count: int) -> str:
    """Labels as bands, the learned probability as a curve."""
    prob = episode.values.get("prob_success")
    if success is None and prob is None:
        return ""
    plot = Plot(
        label=f"success in {episode.name}",
        x_label="step",
        y_label="label" if prob is None else "learned probability",
        x_range=(0.0, float(max(count - 1, 1))),
        width=380,
        height=180,
    )
    if success is not None:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], success >= 0.5, [0])).astype(int)))
        plot.bands(edges[::2].tolist(), (edges[1::2] - 1).tolist())
    if prob is not None:
        plot.curve(np.arange(count), _of_length(prob, count, episode))
        if episode.threshold is not None:
            plot.curve(plot.x_range, [episode.threshold] * 2, style="limit")
    return plot.svg()


def _reward_plots(episode: ViewedEpisode, count: int) -> list[str]:
    plots = []
    for name, words in REWARDS.items():
        values = episode.values.get(name)
        known = np.zeros(0) if values is None else values[np.isfinite(values)]
        if values is None or not len(known):
            continue
        low, high = min(0.0, float(known.min())), max(0.0, float(known.max()))
        plot = Plot(
            label=f"{words} in {episode.name}",
            x_label="step",
            y_label=words,
            x_range=(0.0, float(max(count - 1, 1))),
            y_range=(low, high if high > low else low + 1.0),
            width=380,
            height=180,
            left=58,
        )
        style = "learned" if name == "learned_reward" else "curve"
        plots.append(plot.curve(np.arange(count), _of_length(values, count, episode), style=style).svg())
    return plots


def _of_length(values: FloatArray, count: int, episode: ViewedEpisode) -> FloatArray:
    if len(values) != count:
        raise DataError(f"{episode.name} has {count} frames and {len(values)} values")
    return values
