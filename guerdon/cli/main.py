"""The `guerdon` command.

Logs and progress go to stderr, results to stdout; `--json` prints the result as one JSON object. Exit codes:
0 on success, 1 on a failure explained in a line or two, 2 on wrong usage (an unknown verb, flag or setting).

A new verb is a function in one of the modules beside this one and a line in `VERBS`.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from guerdon.cli.parser import parse
from guerdon.cli.verb import OVERRIDES, Verb, argument, config_arguments, print_result
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted

PATH = argument("path", type=Path)
LABELS = (
    argument("--label-at", choices=["row", "next"], help="lerobot: the frame that a label belongs to"),
    argument("--label-from", metavar="COLUMN", help="lerobot: the column with a label of each frame"),
    argument("--outcomes", type=Path, metavar="FILE", help="lerobot: JSON or CSV, which episodes succeeded"),
)
"""How the labels of a data set are read, see `docs/howto/lerobot-data.md`."""
CHECKPOINT = argument("--checkpoint", type=Path, required=True, metavar="C", help="the reward model")
THRESHOLD = argument("--threshold", type=float, metavar="P", help="decide at P, not as calibrated")
PRECISION = argument("--precision", choices=["fp32", "bf16", "int8"], default="fp32")
FORMAT = argument("--format", help="the format of the data; detected if not given")

VERBS = (
    Verb(
        "demo",
        "demo:demo_verb",
        "run all three stages on the embedded environment",
        OVERRIDES,
        stage="start",
        example="guerdon demo",
    ),
    Verb(
        "collect",
        "collect:collect_verb",
        "run a policy and save labelled episodes",
        *config_arguments(default="collect"),
        argument("--resume", action="store_true", help="count what is there towards the targets"),
        stage="collect",
        example="guerdon collect collect.target_success=20 collect.target_failure=20",
    ),
    Verb(
        "train-reward",
        "train_reward:train_reward_verb",
        "fit, validate and save a reward model",
        *config_arguments(default="train_reward"),
        stage="fit",
        example="guerdon train-reward fit.data.path=runs/collect/data",
    ),
    Verb(
        "train",
        "train:train_verb",
        "train a policy",
        *config_arguments(default="train"),
        stage="use",
        example="guerdon train reward.use_reward_model=true reward.model.checkpoint_path=CHECKPOINT",
    ),
    Verb(
        "prove",
        "prove:prove_verb",
        "train beside controls and say what the learned reward did",
        *config_arguments(default="train", rlinf=False),
        argument("--seeds", type=int, default=3, metavar="N", help="seeds of each arm (3)"),
        argument("--arms", metavar="A,B", help="start, learned, off, shuffled, true (all)"),
        argument("--episodes", type=int, metavar="N", help="of an evaluation (learner.eval_episodes)"),
        argument("--workers", type=int, metavar="N", help="runs at a time (one for each core)"),
        stage="trust",
        example="guerdon prove reward.use_reward_model=true reward.model.checkpoint_path=CHECKPOINT",
    ),
    Verb(
        "evaluate",
        "train:evaluate_verb",
        "measure the success of a saved policy",
        argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a run or a step of it"),
        argument("--episodes", type=int, default=100, metavar="N", help="fresh episodes (100)"),
        argument("--seed", type=int, default=12345, metavar="S", help="of the environments"),
        argument("--env", metavar="ID", help="environment to play in (the policy's own)"),
        stage="use",
        example="guerdon evaluate --checkpoint runs/train/RUN --episodes 100",
    ),
    Verb(
        "zoo",
        "zoo:zoo_verb",
        "train on a reward model of the zoo; `zoo list` lists them",
        argument("--config-name", metavar="NAME", help="config, such as cartpole_gail"),
        argument("--config-path", metavar="DIR", help="where to look for it first"),
        argument("--di-engine", type=Path, metavar="FILE", help="a config file of DI-engine, read, not run"),
        argument("--trust", action="store_true", help="run that file, if reading it is not enough"),
        OVERRIDES,
        stage="zoo",
        example="guerdon zoo --config-name cartpole_gail",
    ),
    Verb(
        "collect-demos",
        "zoo:collect_demos_verb",
        "record demonstrations for the zoo",
        argument("--env", metavar="ID", help="environment; a saved policy knows its own"),
        argument("--policy", default="scripted", metavar="P", help="`scripted`, or a saved policy"),
        argument("--episodes", type=int, default=10, metavar="N", help="whole episodes (10)"),
        argument("--noise", type=float, default=0.0, metavar="X", help="share of random actions (0)"),
        argument("--seed", type=int, default=0, metavar="S", help="of environments and noise"),
        argument("--out", type=Path, required=True, metavar="FILE", help="a .safetensors file"),
        stage="zoo",
        example="guerdon collect-demos --env CartPole-v1 --out demos.safetensors",
    ),
    Verb(
        "reward score",
        "reward:score_verb",
        "success probabilities of a data set, of pictures or of a video",
        argument("path", type=Path, help="a data set, a picture, a folder of pictures, or a video"),
        argument("--out", type=Path, metavar="FILE", help="write one row per frame (.parquet, .json)"),
        argument("--write-back", type=Path, metavar="DIR", help="copy a LeRobot data set, with rewards"),
        argument(
            "--label-at",
            choices=["auto", "row", "next"],
            default="auto",
            help="whose frame a reward of --write-back belongs to (as the data set's labels)",
        ),
        CHECKPOINT,
        THRESHOLD,
        PRECISION,
        stage="use",
        example="guerdon reward score DATA --checkpoint CHECKPOINT --out scores.parquet",
    ),
    Verb(
        "reward card",
        "reward:card_verb",
        "one page that shows whether a reward model can be trusted",
        argument("--data", type=Path, required=True, help="held-out episodes"),
        argument("--out", type=Path, required=True, metavar="HTML"),
        argument("--track", action="store_true", help="also send it to the trackers of the model's run"),
        CHECKPOINT,
        THRESHOLD,
        PRECISION,
        stage="trust",
        example="guerdon reward card --checkpoint CHECKPOINT --data DATA --out card.html",
    ),
    Verb(
        "reward export",
        "reward:export_verb",
        "a folder to share, with a model card; or straight to the Hugging Face hub",
        argument("--out", type=Path, metavar="FOLDER", help="write it here"),
        argument("--data", type=Path, help="held-out episodes for verdict, numbers and curves of the card"),
        argument("--push", metavar="OWNER/NAME", help="upload it to this repository of the hub"),
        argument("--private", action="store_true", help="make a new repository private"),
        argument("--to", choices=["guerdon", "lerobot"], default="guerdon", help="whose folder (guerdon)"),
        CHECKPOINT,
        stage="use",
        example="guerdon reward export --checkpoint CHECKPOINT --data DATA --out FOLDER",
    ),
    Verb(
        "reward quantize",
        "reward:quantize_verb",
        "make and verify the int8 version",
        argument("path", type=Path, help="a data set; the one it was fitted to is best"),
        THRESHOLD,
        CHECKPOINT,
        stage="use",
        example="guerdon reward quantize DATA --checkpoint CHECKPOINT",
    ),
    Verb(
        "reward recalibrate",
        "reward:recalibrate_verb",
        "another threshold without a refit",
        argument("--data", type=Path, required=True, help="labelled episodes that it was not fitted to"),
        argument("--fpr", type=float, metavar="F", help="share of failure frames that may fire"),
        argument("--threshold", type=float, metavar="P", help="this threshold; the calibration stays"),
        argument("--out", type=Path, metavar="C2", help="write here instead of into the checkpoint"),
        CHECKPOINT,
        stage="trust",
        example="guerdon reward recalibrate --checkpoint CHECKPOINT --data DATA --fpr 0.02",
    ),
    Verb(
        "data inspect",
        "data:inspect_verb",
        "format, episodes, cameras, labels and faults",
        PATH,
        FORMAT,
        *LABELS,
        argument("--preview", type=Path, metavar="PNG", help="also draw a sheet of frames"),
        stage="data",
        example="guerdon data inspect DATA --preview sheet.png",
    ),
    Verb(
        "data view",
        "view:view_verb",
        "frames, labels, rewards and learned probabilities as a page or a Rerun recording",
        argument("path", type=Path, help="a data set, or the folder of a run for its films"),
        FORMAT,
        *LABELS,
        argument("--rerun", action="store_true", help="write a Rerun recording (.rrd), not an HTML page"),
        argument("--checkpoint", type=Path, metavar="C", help="score the frames with this reward model"),
        argument("--episodes", type=int, default=20, metavar="N", help="how many at most (20)"),
        argument("--skip", type=int, default=0, metavar="K", help="leave out the first K (0)"),
        argument("--out", type=Path, metavar="FILE", help="instead of view.html or view.rrd; is replaced"),
        stage="data",
        example="guerdon data view DATA --rerun --checkpoint CHECKPOINT",
    ),
    Verb(
        "data convert",
        "data:convert_verb",
        "copy to another format",
        argument("source", type=Path),
        argument("target", type=Path),
        argument("--to", required=True, metavar="FORMAT", help="the format to write"),
        FORMAT,
        *LABELS,
        argument("--resume", action="store_true", help="go on with an interrupted copy (lerobot to native)"),
        argument("--videos", action="store_true", default=None, help="to lerobot: videos, not images"),
        argument("--fps", type=int, metavar="N", help="to lerobot: frames in a second (10)"),
        argument("--task", metavar="TEXT", help="to lerobot: what the robot is to do"),
        stage="data",
        example="guerdon data convert DATA PICTURES --to folder",
    ),
    Verb(
        "data audit",
        "data:audit_verb",
        "check labels, balance, duplicates, cameras and NaN",
        PATH,
        FORMAT,
        *LABELS,
        stage="data",
        example="guerdon data audit DATA",
    ),
    Verb(
        "data process",
        "data:process_verb",
        "clean a robot's data.pkl for training",
        argument("path", type=Path, metavar="PKL"),
        argument("--to", default="native", metavar="FORMAT", help="the format to write (native)"),
        argument("--keep-stationary", action="store_true", help="keep frames in which nothing moved"),
        argument("--hold-steps", type=int, metavar="N", help="steps at the target that make a success"),
        argument("--out", type=Path, metavar="DIR", help="instead of collected_data/ beside the file"),
        stage="data",
        example="guerdon data process logs/data.pkl",
    ),
    Verb(
        "robot-sim",
        "robot:robot_sim_verb",
        "a simulated robot that speaks SERL's protocol",
        argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)"),
        argument("--port", type=int, default=5000, metavar="P", help="port; 0 takes a free one (5000)"),
        argument("--seed", type=int, default=0, metavar="S", help="of noise and faults"),
        argument("--time-scale", type=float, default=1.0, metavar="X", help="X times real time (1)"),
        argument("--image-size", type=int, default=64, metavar="N", help="of square pictures (64)"),
        argument("--faults", default="", metavar="NAME=X,...", help="such as drop_rate=0.05"),
        stage="tools",
        example="guerdon robot-sim --port 5000",
    ),
    Verb(
        "teleop",
        "robot:teleop_verb",
        "drive a robot by hand and watch the learned reward",
        *config_arguments(default="teleop"),
        CHECKPOINT,
        argument("--port", type=int, default=8765, metavar="P", help="of the page (8765)"),
        argument("--save-dir", type=Path, default=Path("wrong_calls"), metavar="DIR", help="for wrong calls"),
        argument("--steps", type=int, metavar="N", help="end after so many steps"),
        stage="trust",
        example="guerdon teleop --checkpoint CHECKPOINT",
    ),
    Verb(
        "config show",
        "config:show_verb",
        "a config, composed, and where each value comes from",
        argument("overrides", nargs="*", metavar="NAME key=value", help="a config's name, then settings"),
        argument("--config-path", metavar="DIR", help="where to look for it first"),
        argument("--zoo", action="store_true", help="the config is one of `guerdon zoo`"),
        argument("--changed", action="store_true", help="leave out what is the schema's default"),
        stage="tools",
        example="guerdon config show train learner.ppo.lr=1e-4 --changed",
    ),
    Verb(
        "completion",
        "completion:completion_verb",
        "print a script that completes commands in a shell",
        argument("shell", choices=["bash", "zsh", "fish"]),
        stage="tools",
        example='eval "$(guerdon completion bash)"',
    ),
    Verb(
        "check",
        "check:check_verb",
        "check that everything is installed and works",
        stage="start",
        example="guerdon check",
    ),
)
"""Every verb there is: name, `module:function`, what it does, what it takes, its place in the help."""
GROUPS = {
    "reward": "use and assess a fitted reward model",
    "data": "look at data sets, convert, audit, clean",
    "config": "look at settings",
}
"""First words that several verbs share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv, VERBS, GROUPS)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.debug else logging.INFO,
        format="%(message)s",
        force=True,
    )
    verb: Verb = arguments.verb
    # Before torch is loaded. A thread that waits by spinning takes the core from the one it waits for: beside
    # other work a gradient step of a small network took 20 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        result = verb.run(arguments)
        if result is None:
            return 0
        print_result(arguments, result)
        if result.error:
            print(f"guerdon: error: {result.error}", file=sys.stderr)
        return 0 if result.ok and not result.error else 1
    except GuerdonError as error:
        if arguments.debug:
            raise
        print(f"guerdon: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except RunInterrupted as stopped:
        if os.environ.get("RANK", "0") == "0":  # only the first of several processes prints
            print(f"guerdon: {stopped}:", file=sys.stderr)
            print(_command_to_go_on(argv, stopped), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("guerdon: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone
        return 1


def _command_to_go_on(argv: Sequence[str], stopped: RunInterrupted) -> str:
    """The same command, from the checkpoint on."""
    kept = [item for item in argv if not item.lstrip("+").startswith(f"{stopped.setting}=")]
    return shlex.join(["guerdon", *kept, f"{stopped.setting}={stopped.checkpoint}"])


def command() -> NoReturn:
    """The program: `main`, then the end of the process."""
    _add_working_directory()
    code = main()
    if os.environ.get("RANK"):  # one of several processes: torch is loaded already
        from guerdon.fit.process_group import end_process, under_torchrun

        if under_torchrun():
            end_process(code)
    sys.exit(code)


def _add_working_directory() -> None:
    """Let `env.train.id=my_module:MyEnv-v0` find a module in the folder that the command runs in.

    It comes last, so that no file of that folder takes the place of an installed module; `python -P` and
    PYTHONSAFEPATH keep it out.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(folder)


if __name__ == "__main__":
    command()
