"""`collect`, `read` and `Dataset`: labelled episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.api.settings import Keywords, check_count, check_env_kwargs, check_path, check_seed, shown
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy, to_uint8_hwc
from guerdon.core.notebook import html_table
from guerdon.core.types import DataSummary, Episode, Fault, FloatArray, display_path
from guerdon.data.datasets.audit import AuditReport, audit
from guerdon.data.datasets.pictures import preview
from guerdon.data.formats import find_format, get_format
from guerdon.data.summary import convert, inspect

if TYPE_CHECKING:  # Gymnasium is imported where it is needed
    from guerdon.api.envs import EnvGiven
    from guerdon.data.collect.run import CollectResult
    from guerdon.envs.success import LabelFunction

POLICIES = ("random", "scripted", "motion_planner")


class Dataset:
    """Labelled episodes on disk, in any format; made by `read` and `collect`.

    Attributes:
        path: where they are.
        format: such as `native`; see `docs/reference/data-formats.md`.
        result: what `collect` did; None if the data were read.

    Examples:
        >>> data = gd.read("data")
        >>> len(data), data.num_success, data.num_failure
        >>> for episode in data:
        ...     episode.frames["base_camera"].shape, episode.labels.mean()
    """

    def __init__(self, path: str | os.PathLike[str], format: str | None = None) -> None:
        self.path = check_path("path", path, "the path of a data set")
        if not isinstance(format, str | None):
            raise ConfigError(f"format must be the name of a format, not {format!r:.80}")
        self.format = find_format(self.path, format).name
        self.result: CollectResult | None = None

    @classmethod
    def from_arrays(
        cls, frames: Any, labels: Any, out: str | os.PathLike[str], *, episode: Any = None
    ) -> Dataset:
        """Write labelled images as a data set.

        Args:
            frames: images [N, H, W, C] in any layout and type that `Reward.predict` takes, or a dict of
                them, camera -> images.
            labels: [N], 1 or True where an image shows success.
            out: the folder; what is there stays.
            episode: [N], which episode each image belongs to, in the order of its steps; None: each image is
                one of its own. Images of one episode resemble each other: without their numbers a validation
                split looks better than it is.
        """
        cameras = frames if isinstance(frames, Mapping) else {"base_camera": frames}
        if not cameras:
            raise DataError("frames is an empty dict: give camera -> images [N, H, W, C]")
        folder = check_path("out", out)
        images = {str(name): to_uint8_hwc(part, name="frames") for name, part in cameras.items()}
        marks = _labels(labels)
        numbers = np.arange(len(marks)) if episode is None else to_numpy(episode)
        for name, part in images.items():
            if part.ndim != 4 or not part.shape[:1] == marks.shape == numbers.shape:
                raise DataError(
                    f"frames ({name}) has shape {list(part.shape)}, labels {list(marks.shape)} and episode "
                    f"{list(numbers.shape)}: give [N, H, W, C], [N] and [N]"
                )
        with get_format("native").writer(folder) as writer:
            for number in np.unique(numbers):
                rows = np.flatnonzero(numbers == number)
                success = bool((marks[rows] >= 0.5).any())
                shown_here = {name: part[rows] for name, part in images.items()}
                writer.add(Episode(frames=shown_here, labels=marks[rows], success=success))
        return cls(out, "native")

    @cached_property
    def summary(self) -> DataSummary:
        """Counts, cameras, sizes and faults; reads everything once."""
        return inspect(self.path, self.format)

    def inspect(self) -> DataSummary:
        """Counts, cameras, sizes and faults as they are now; `guerdon data inspect`."""
        self.__dict__.pop("summary", None)
        return self.summary

    def audit(self) -> AuditReport:
        """Look for wrong labels, duplicates, dead cameras and the like; `guerdon data audit`."""
        return audit(self.path, self.format)

    def preview(self) -> Any:
        """A picture (`PIL.Image.Image`) of the first successes and failures, an episode a row."""
        return preview(self.path, self.format)

    def convert(self, out: str | os.PathLike[str], to: str = "native") -> Dataset:
        """Copy to another format; returns the copy."""
        convert(self.path, check_path("out", out), to, self.format)
        return Dataset(out, to)

    @property
    def num_success(self) -> int:
        """Complete episodes with a success."""
        return self.summary.num_success_episodes

    @property
    def num_failure(self) -> int:
        """Complete episodes without one."""
        return self.summary.num_failure_episodes

    def __len__(self) -> int:
        """Episodes."""
        return self.summary.num_episodes

    def __iter__(self) -> Iterator[Episode]:
        """The episodes one after another; files that cannot be used are left out (`summary.faults`)."""
        for item in find_format(self.path, self.format).read(self.path):
            if not isinstance(item, Fault):
                yield item

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        known = self.summary.to_dict()
        return known if self.result is None else {**known, "collected": self.result.to_dict()}

    def _facts(self) -> dict[str, str]:
        known = self.summary
        cameras = ", ".join(f"{name} {'x'.join(map(str, size))}" for name, size in known.cameras.items())
        return {
            "path": display_path(self.path),
            "format": self.format,
            "episodes": f"{known.num_episodes} ({self.num_success} success, {self.num_failure} failure)",
            "frames": f"{known.num_frames} ({known.num_positive_frames} success)",
            "cameras": cameras,
            **({"faults": str(len(known.faults))} if known.faults else {}),
        }

    def __repr__(self) -> str:
        return f"Dataset({', '.join(f'{name}={text}' for name, text in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html_table("Dataset", self._facts())


def read(path: str | os.PathLike[str], format: str | None = None) -> Dataset:
    """Open labelled episodes in any format that `guerdon data inspect` knows.

    Args:
        path: a folder or a file.
        format: such as `folder` or `pkl-episode`; None detects it.

    Examples:
        >>> gd.read("pictures").audit().ok  # pictures/success/*.png, pictures/failure/*.png
    """
    return Dataset(path, format)


def data_path(data: Any) -> Path:
    """Where the data of an argument `data` are: a `Dataset` or a path that exists."""
    given = data.path if isinstance(data, Dataset) else data
    path = check_path("data", given, "a Dataset or the path of one")
    if not path.exists():
        raise DataError(f"data: {display_path(path)} does not exist")
    return path


def _labels(labels: Any) -> FloatArray:
    """Labels of frames, float32 [N], each from 0 to 1."""
    try:
        marks: FloatArray = to_numpy(labels).astype(np.float32)
    except (TypeError, ValueError):
        raise DataError(f"labels must be numbers or booleans [N], not {labels!r:.80}") from None
    if marks.ndim != 1 or not ((marks >= 0) & (marks <= 1)).all():
        raise DataError(f"labels must be 0 to 1, [N], not {labels!r:.80}")
    return marks


def collect(
    env: EnvGiven,
    policy: Any = "random",
    *,
    successes: int = 50,
    failures: int = 50,
    out: str | os.PathLike[str] = "data",
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    success_key: str | None = None,
    label_fn: LabelFunction | None = None,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> Dataset:
    """Run a policy and keep labelled episodes; what `guerdon collect` does.

    Args:
        env: an id, an environment, a vector environment, or a function that makes an environment. Its images
            come from the observation or from `render()` (`render_mode="rgb_array"`).
        policy: `random`, `scripted`, `motion_planner`, the folder of a saved policy, an agent (anything with
            `predict`), or a function from an observation to an action; with a vector environment, from
            observations [N, ...] to actions [N, ...].
        successes: stop once so many successful episodes are kept ...
        failures: ... and so many failed ones.
        out: the folder; what is there stays.
        num_envs: environments in parallel that are made of an id or a function.
        max_episode_steps: truncate episodes of an id after so many steps.
        env_kwargs: arguments of the environment's constructor, with an id.
        success_key: the entry of the info that tells success; None: `success` or `is_success`.
        label_fn: tells success of a single environment's step instead, (obs, info) -> bool.
        seed: of environments and policy.
        progress: whether to show a progress bar.
        **settings: fields of the `collect` section, such as `cameras`, `format`, `policy_noise`,
            `max_episodes`, `resume`.

    Returns:
        The data set; `.result` has the counts and why collecting stopped.

    Examples:
        >>> data = gd.collect("guerdon/Tabletop-v0", policy="scripted", successes=20, failures=20, out="data")
    """
    from gymnasium.vector import AutoresetMode

    from guerdon.api.envs import env_config, vector_env
    from guerdon.config import CollectConfig, EnvConfig
    from guerdon.data.collect.run import collect as run
    from guerdon.envs.make import make_vector_env
    from guerdon.envs.success import LabelSuccess, SuccessLabels

    keywords = Keywords(
        "collect",
        CollectConfig,
        [()],
        without=("enabled", "save_dir", "policy", "policy_checkpoint", "target_success", "target_failure"),
    )
    own = (
        "policy",
        "successes",
        "failures",
        "out",
        "num_envs",
        "env_kwargs",
        "success_key",
        "label_fn",
        "max_episode_steps",
        "seed",
        "progress",
    )
    cfg = keywords.apply(
        CollectConfig(
            save_dir=os.fspath(check_path("out", out)),
            target_success=check_count("successes", successes, 0),
            target_failure=check_count("failures", failures, 0),
            **_policy_settings(policy),
        ),
        settings,
        own,
    )
    if not (cfg.target_success or cfg.target_failure):
        raise ConfigError("successes and failures are both 0: there is nothing to collect")
    seed = check_seed(seed)
    limit = None if max_episode_steps is None else check_count("max_episode_steps", max_episode_steps)
    labels = SuccessLabels(success_key, label_fn)
    given: Any = None
    if isinstance(env, str):
        made = env_config(env, num_envs, max_episode_steps=limit, init_params=check_env_kwargs(env_kwargs))
        if labels.given:
            given = LabelSuccess(make_vector_env(made, autoreset_mode=AutoresetMode.SAME_STEP), labels)
    else:
        if env_kwargs is not None or max_episode_steps is not None:
            raise ConfigError("env_kwargs and max_episode_steps belong to an id: env is there already")
        given = vector_env(env, num_envs, keep_final_frame=True, labels=labels)
        made = EnvConfig(num_envs=given.num_envs)
    with shown(progress):
        acting = _policy(policy, cfg, made, seed, batched=_is_vector(env))
        result = run(made, cfg, seed=seed, policy=acting, env=given)
    data = Dataset(out, cfg.format)
    data.result = result
    return data


def _is_vector(env: Any) -> bool:
    from gymnasium.vector import VectorEnv

    return isinstance(env, VectorEnv)


def _policy_settings(policy: Any) -> dict[str, Any]:
    """What the `collect` section says of the policy; one that is an object takes its place later."""
    if isinstance(policy, str | os.PathLike):
        if policy in POLICIES:
            return {"policy": policy}
        if not Path(policy).exists():
            raise ConfigError(
                f"policy must be one of {', '.join(POLICIES)}, the folder of a saved policy, an agent or a "
                f"function; there is nothing at {os.fspath(policy)!r}"
            )
        return {"policy": "checkpoint", "policy_checkpoint": os.fspath(policy), "policy_noise": 0.0}
    if not (callable(policy) or hasattr(policy, "predict")):
        raise ConfigError(f"policy must be a name, a folder, an agent or a function, not {policy!r:.80}")
    return {}


def _policy(policy: Any, cfg: Any, env: Any, seed: int, *, batched: bool) -> Any:
    """The policy where it is an object or a saved agent; None: the `collect` section names it."""
    if isinstance(policy, str | os.PathLike):
        if cfg.policy != "checkpoint":
            return None
        from guerdon.training.collect_policy import saved_policy  # imports torch

        return saved_policy(cfg, env, seed)
    if hasattr(policy, "predict"):
        return _FunctionPolicy(lambda obs: policy.predict(obs, deterministic=False)[0], batched=True)
    return _FunctionPolicy(policy, batched=batched)


class _FunctionPolicy:
    """A function from observations to actions as a policy to collect with."""

    takes_observations = True

    def __init__(self, function: Callable[[Any], Any], *, batched: bool) -> None:
        self._function, self._batched = function, batched

    def act(self, observations: Any) -> Any:
        """Actions for a batch of observations."""
        if self._batched:
            return to_numpy(self._function(observations))
        parts = observations if isinstance(observations, Mapping) else {None: observations}
        count = len(next(iter(parts.values())))
        rows = [{name: part[env] for name, part in parts.items()} for env in range(count)]
        single = [row if isinstance(observations, Mapping) else row[None] for row in rows]
        return np.stack([to_numpy(self._function(each)) for each in single])

    def reset(self, mask: Any) -> None:
        """Nothing to do: a function has no memory."""
