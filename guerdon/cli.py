"""The `guerdon` command.

Logs and progress go to stderr, results to stdout; `--json` prints the result as one JSON object. Exit codes:
0 on success, 1 on a failure explained in a line or two, 2 on wrong usage (an unknown verb, flag or setting).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import guerdon
from guerdon.errors import ConfigError, DataError, GuerdonError
from guerdon.types import DataSummary, Fault, display_path

if TYPE_CHECKING:
    from guerdon.collect.run import CollectResult
    from guerdon.datasets.audit import AuditReport

log = logging.getLogger("guerdon")

Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = _parse(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.debug else logging.INFO,
        format="%(message)s",
        force=True,
    )
    handler: Handler = arguments.handler
    try:
        return handler(arguments)
    except GuerdonError as error:
        if arguments.debug:
            raise
        print(f"guerdon: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("guerdon: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is nobody to tell
        return 1


def command() -> NoReturn:
    """The program: `main`, then the end of the process."""
    code = main()
    if os.environ.get("RANK"):  # one of several processes: torch is loaded already
        from guerdon.fit.team import end_process, under_torchrun

        if under_torchrun():
            end_process(code)
    sys.exit(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings (`key=value`) may stand before and after flags, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    common.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    parser = argparse.ArgumentParser(prog="guerdon", description=guerdon.__doc__)
    parser.add_argument("--version", action="version", version=f"guerdon {guerdon.__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    demo = verbs.add_parser("demo", parents=[common], help="the workflow on the embedded environment")
    demo.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")
    demo.set_defaults(handler=_demo)

    collect = verbs.add_parser("collect", parents=[common], help="run a policy, save labelled episodes")
    _add_config(collect, default="collect")
    collect.add_argument("--resume", action="store_true", help="count what is there towards the targets")
    collect.set_defaults(handler=_collect)

    fit = verbs.add_parser("train-reward", parents=[common], help="fit, prove and save a reward model")
    _add_config(fit, default="train_reward")
    fit.set_defaults(handler=_train_reward)

    train = verbs.add_parser("train", parents=[common], help="train a policy as the config says")
    _add_config(train, default="train")
    train.set_defaults(handler=_train)

    evaluate = verbs.add_parser("evaluate", parents=[common], help="success of a saved policy")
    evaluate.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a run or a step of it"
    )
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="fresh episodes (100)")
    evaluate.add_argument("--seed", type=int, default=12345, metavar="S", help="of the environments")
    evaluate.set_defaults(handler=_evaluate)

    zoo = verbs.add_parser("zoo", parents=[common], help="train on a reward model of the zoo")
    zoo.add_argument("--config-name", metavar="NAME", help="config, such as cartpole_gail")
    zoo.add_argument("--config-path", metavar="DIR", help="where to look for it first")
    zoo.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them; `list` lists models"
    )
    zoo.set_defaults(handler=_zoo)
    demos = verbs.add_parser("collect-demos", parents=[common], help="demonstrations of a policy for the zoo")
    demos.add_argument("--env", metavar="ID", help="environment; a saved policy knows its own")
    demos.add_argument("--policy", default="scripted", metavar="P", help="`scripted`, or a saved policy")
    demos.add_argument("--episodes", type=int, default=10, metavar="N", help="whole episodes (10)")
    demos.add_argument("--noise", type=float, default=0.0, metavar="X", help="share of random actions (0)")
    demos.add_argument("--seed", type=int, default=0, metavar="S")
    demos.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .safetensors file")
    demos.set_defaults(handler=_collect_demos)

    _add_reward(verbs.add_parser("reward", help="use and judge a fitted reward model"), common)

    data = verbs.add_parser("data", help="look at data sets, convert and audit them")
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", parents=[common], help="what is there")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--format", help="do not detect the format, take this one")
    inspect.add_argument("--preview", type=Path, metavar="PNG", help="also draw a sheet of frames")
    inspect.set_defaults(handler=_inspect)
    convert = actions.add_parser("convert", parents=[common], help="copy to another format")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--to", required=True, metavar="FORMAT", help="the format to write")
    convert.add_argument("--format", help="do not detect the format of the source, take this one")
    convert.set_defaults(handler=_convert)
    audit = actions.add_parser("audit", parents=[common], help="labels, balance, duplicates, cameras, NaN")
    audit.add_argument("path", type=Path)
    audit.add_argument("--format", help="do not detect the format, take this one")
    audit.set_defaults(handler=_audit)
    process = actions.add_parser("process", parents=[common], help="clean a robot's data.pkl for training")
    process.add_argument("path", type=Path, metavar="PKL")
    process.add_argument("--to", default="native", metavar="FORMAT", help="the format to write (native)")
    process.add_argument("--keep-stationary", action="store_true", help="keep frames in which nothing moved")
    process.add_argument(
        "--hold-steps", type=int, metavar="N", help="steps at the target that make a success"
    )
    process.add_argument("--out", type=Path, metavar="DIR", help="instead of collected_data/ beside the file")
    process.set_defaults(handler=_process)

    robot = verbs.add_parser(
        "robot-sim", parents=[common], help="a simulated robot that speaks SERL's protocol"
    )
    robot.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    robot.add_argument("--port", type=int, default=5000, metavar="P", help="port; 0 takes a free one (5000)")
    robot.add_argument("--seed", type=int, default=0, metavar="S", help="of noise and faults")
    robot.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="X times real time (1)")
    robot.add_argument("--image-size", type=int, default=64, metavar="N", help="of square pictures (64)")
    robot.add_argument(
        "--faults", default="", metavar="NAME=X,...", help="such as drop_rate=0.05,latency_rate=0.02"
    )
    robot.set_defaults(handler=_robot_sim)

    drive = verbs.add_parser(
        "teleop", parents=[common], help="drive a robot by hand, the model's verdict live on a page"
    )
    _add_config(drive, default="teleop")
    drive.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="the reward model")
    drive.add_argument("--port", type=int, default=8765, metavar="P", help="of the page (8765)")
    drive.add_argument(
        "--save-dir", type=Path, default=Path("wrong_calls"), metavar="DIR", help="store for wrong calls"
    )
    drive.add_argument("--steps", type=int, metavar="N", help="end after so many steps")
    drive.set_defaults(handler=_teleop)

    check = verbs.add_parser("check", parents=[common], help="is everything installed and working?")
    check.set_defaults(handler=_check)
    return parser


def _add_reward(reward: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    uses = reward.add_subparsers(title="actions", required=True, metavar="ACTION")
    score = uses.add_parser("score", parents=[common], help="success probabilities of a data set")
    score.add_argument("path", type=Path, help="a data set in any format")
    score.add_argument("--out", type=Path, metavar="FILE", help="write one row per frame (.parquet, .json)")
    score.set_defaults(handler=_score)
    card = uses.add_parser("card", parents=[common], help="one page that shows whether it can be trusted")
    card.add_argument("--data", dest="path", type=Path, required=True, help="held-out episodes")
    card.add_argument("--out", type=Path, required=True, metavar="HTML")
    card.set_defaults(handler=_card)
    quantize = uses.add_parser("quantize", parents=[common], help="make and verify the int8 version")
    quantize.add_argument("path", type=Path, help="a data set; the one it was fitted to is best")
    quantize.add_argument("--threshold", type=float, metavar="P", help="decide at P, not as calibrated")
    quantize.set_defaults(handler=_quantize)
    for use in (score, card, quantize):
        use.add_argument("--checkpoint", type=Path, required=True, metavar="C")
    for use in (score, card):
        use.add_argument("--precision", choices=["fp32", "bf16", "int8"], default="fp32")


def _add_config(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--config-name", default=default, metavar="NAME", help=f"config (default: {default})")
    parser.add_argument("--config-path", metavar="DIR", help="where to look for it first")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")


def _print(arguments: argparse.Namespace, result: dict[str, Any], lines: Sequence[str]) -> None:
    """The result: one JSON object if asked for, lines for people otherwise."""
    print(json.dumps(result) if arguments.json else "\n".join(lines))


def _demo(arguments: argparse.Namespace) -> int:
    from guerdon.run.demo import run_demo

    summary, lines = run_demo(arguments.overrides)
    _print(arguments, summary, lines)
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from guerdon.collect.collector import open_npy_archive
    from guerdon.collect.run import collect
    from guerdon.config import load_config

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    section = replace(config.collect, resume=config.collect.resume or arguments.resume)
    if config.env.eval.env_type == "robot":  # the real-world document has its robot there
        from guerdon.collect.robot import collect_robot

        episodes = config.runner.num_data_episodes
        result = collect_robot(config.env.eval, section, num_episodes=episodes, seed=config.seed)
        return _report_collected(arguments, result)
    archive = None
    if config.reward.collect_data:  # the documents' first generation: two directories of .npy files
        place = config.reward.data_collection
        section = replace(section, format="npy-trajectory", cameras=place.image_keys, resume=True)
        section = replace(section, save_dir=str(Path(place.positive_dir).parent))
        archive = open_npy_archive(
            Path(place.positive_dir),
            Path(place.negative_dir),
            place.max_positive_trajectories,
            place.max_negative_trajectories,
        )
    policy = None
    if section.policy == "checkpoint":
        from guerdon.run.attempts import saved_policy  # and with it torch, which the others do without

        policy = saved_policy(section, config.env.train, config.seed)
    result = collect(config.env.train, section, seed=config.seed, archive=archive, policy=policy)
    return _report_collected(arguments, result)


def _report_collected(arguments: argparse.Namespace, result: CollectResult) -> int:
    counts = f"success {result.num_success}{_limit(result.target_success)}"
    counts += f" fail {result.num_failure}{_limit(result.target_failure)}"
    rate = result.env_steps / max(result.seconds, 1e-9)
    line = f"{counts} in {result.seconds:.1f} s ({rate:,.0f} steps/s) -> {result.save_dir} ({result.format})"
    _print(arguments, asdict(result), [line])
    if not result.complete:
        raise DataError(
            f"the targets were not met: {result.reason} with {counts}. What was collected is kept; "
            "go on with --resume, or try another collect.policy or collect.policy_noise"
        )
    return 0


def _limit(target: int | None) -> str:
    return "" if target is None else f"/{target}"


def _robot_sim(arguments: argparse.Namespace) -> int:
    from guerdon.config.build import build
    from guerdon.config.schema_robot import RobotSimConfig
    from guerdon.envs.robot.sim.server import SimServer

    faults = dict(item.partition("=")[::2] for item in arguments.faults.split(",") if item)
    settings = {
        "host": arguments.host, "port": arguments.port, "seed": arguments.seed,
        "time_scale": arguments.time_scale, "image_size": [arguments.image_size] * 2, "faults": faults,
    }  # fmt: skip
    server = SimServer(build(RobotSimConfig, settings))
    result = {"url": server.url, "time_scale": arguments.time_scale, "faults": faults}
    where = f"simulated robot at {server.url} (time x{arguments.time_scale:g}); end it with Ctrl-C"
    _print(arguments, result, [where])
    sys.stdout.flush()  # whoever started us in the background waits for the address
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log.info("the simulated robot has ended")
    finally:
        server.server_close()
    return 0


def _teleop(arguments: argparse.Namespace) -> int:
    from guerdon.config import load_config
    from guerdon.run.teleop import teleop

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    reward = config.reward
    reward = replace(reward, model=replace(reward.model, checkpoint_path=str(arguments.checkpoint)))
    result = teleop(
        config.env.eval,
        reward,
        port=arguments.port,
        save_dir=arguments.save_dir,
        max_steps=arguments.steps,
        seed=config.seed,
    )
    line = f"{result['steps']} steps, {result['wrong_calls']} wrong calls -> {result['save_dir']}"
    _print(arguments, result, [f"{line} ({result['reason']})"])
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from guerdon.store import inspect

    summary = inspect(arguments.path, arguments.format)
    _print(arguments, summary.to_dict(), summary_lines(summary))
    if arguments.preview is not None:
        from guerdon.datasets.preview import write_preview

        write_preview(arguments.path, arguments.preview, arguments.format)
        log.info("preview: %s", display_path(arguments.preview))
    return 0


def summary_lines(summary: DataSummary) -> list[str]:
    """A data set in a few aligned lines."""
    good, bad, cut = (
        summary.num_success_episodes,
        summary.num_failure_episodes,
        summary.num_incomplete_episodes,
    )
    share = summary.num_positive_frames / max(summary.num_frames, 1)
    cameras = ", ".join(f"{name} {shape[0]}x{shape[1]}x{shape[2]}" for name, shape in summary.cameras.items())
    rows = [
        ("path", display_path(summary.path)),
        ("format", summary.format),
        ("episodes", f"{summary.num_episodes} ({good} success, {bad} failure, {cut} unfinished)"),
        ("frames", f"{summary.num_frames} ({summary.num_positive_frames} positive, {share:.1%})"),
        ("cameras", cameras or "none"),
        ("size", f"{summary.bytes / 1e6:.1f} MB"),
    ]
    if summary.content_hash is not None:
        rows.append(("content hash", summary.content_hash))
    rows.append(("faults", str(len(summary.faults)) if summary.faults else "none"))
    return [f"{name:<13}{value}" for name, value in rows] + _fault_lines(summary.faults)


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    return [f"  {display_path(fault.path)}: {fault.reason}" for fault in faults]


def _convert(arguments: argparse.Namespace) -> int:
    from guerdon.store import convert

    written, faults = convert(arguments.source, arguments.target, arguments.to, arguments.format)
    return _report_written(arguments, written, faults, arguments.target, arguments.to)


def _process(arguments: argparse.Namespace) -> int:
    from guerdon.datasets.cleaning import process

    place = arguments.path.resolve()
    home = place if place.is_dir() else place.parent
    report = process(
        arguments.path,
        arguments.out or home / "collected_data",
        arguments.to,
        keep_stationary=arguments.keep_stationary,
        hold_steps=arguments.hold_steps,
    )
    gone = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items() if count)
    lines = [
        f"{report.num_episodes} episodes -> {display_path(report.path)} ({arguments.to})",
        f"frames    {report.num_frames} kept, {report.num_positive_frames} of them success; "
        f"left out: {gone or 'none'}",
        "split     " + ", ".join(f"{count} {name}" for name, count in report.splits.items()),
    ]
    lines += [f"{len(report.faults)} not used:"] * bool(report.faults) + _fault_lines(report.faults)
    _print(arguments, {**report.to_dict(), "format": arguments.to}, [*lines, *_audit_lines(report.audit)])
    return 0


def _report_written(
    arguments: argparse.Namespace, written: int, faults: Sequence[Fault], target: Path, format: str
) -> int:
    result = {
        "num_episodes": written,
        "path": str(target),
        "format": format,
        "faults": [asdict(fault) for fault in faults],
    }
    lines = [f"{written} episodes -> {display_path(target)} ({format})"]
    lines += [f"{len(faults)} not used:"] * bool(faults) + _fault_lines(faults)
    _print(arguments, result, lines)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from guerdon.datasets.audit import audit

    report = audit(arguments.path, arguments.format)
    _print(arguments, report.to_dict(), _audit_lines(report))
    return 0 if report.ok else 1


def _audit_lines(report: AuditReport) -> list[str]:
    lines = [
        f"{len(report.findings)} findings in {report.num_episodes} episodes of {display_path(report.path)}"
    ]
    for finding in report.findings:
        lines.append(f"{finding.level:<8}{finding.check:<12}{finding.message}")
        lines += [f"{'':<20}{example}" for example in finding.examples]
    return lines


def _train_reward(arguments: argparse.Namespace) -> int:
    from guerdon.config import load_config
    from guerdon.fit.team import speaks_for_all
    from guerdon.run.train_reward import fit_lines, fit_summary, train_reward

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    folder, result = train_reward(config)
    if speaks_for_all():
        _print(arguments, {**fit_summary(result), "folder": str(folder)}, fit_lines(result, folder))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from guerdon.config import load_config
    from guerdon.run.train import train, train_lines

    config = load_config(arguments.config_name, arguments.overrides, arguments.config_path)
    if config.fit.only:
        return _train_reward(arguments)
    folder, summary = train(config)
    _print(arguments, {**summary, "folder": str(folder)}, train_lines(summary, folder))
    return 0


def _zoo(arguments: argparse.Namespace) -> int:
    from guerdon.run.zoo import models, run_zoo, zoo_lines

    if arguments.overrides == ["list"]:
        known = models()
        lines = [
            f"{item['name']:<15}{item['rewards']}{' (demonstrations)' * item['needs_demonstrations']}"
            for item in known
        ]
        _print(arguments, {"models": known}, lines)
        return 0
    if arguments.config_name is None:
        raise ConfigError("give --config-name, or `guerdon zoo list` to see the models")
    summary = run_zoo(arguments.config_name, arguments.overrides, arguments.config_path)
    _print(arguments, summary, zoo_lines(summary))
    return 0


def _collect_demos(arguments: argparse.Namespace) -> int:
    from guerdon.run.zoo import collect_demos

    result = collect_demos(
        arguments.out,
        env_id=arguments.env,
        policy=arguments.policy,
        episodes=arguments.episodes,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    line = f"{result['episodes']} episodes, {result['transitions']} transitions, mean return "
    line += f"{result['mean_return']:.2f} -> {display_path(arguments.out)}"
    _print(arguments, result, [line])
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from guerdon.run.train import evaluate_checkpoint

    if arguments.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {arguments.episodes}")
    result = evaluate_checkpoint(arguments.checkpoint, arguments.episodes, arguments.seed)
    once = "unknown" if result["success_once"] is None else f"{result['success_once']:.1%}"
    at_end = "unknown" if result["success_at_end"] is None else f"{result['success_at_end']:.1%}"
    lines = [f"success      {once} of {result['episodes']} episodes, {at_end} at their end"]
    _print(arguments, result, [*lines, f"env return   {result['env_return']:.2f}"])
    return 0


def _score(arguments: argparse.Namespace) -> int:
    from guerdon.run.judge import score

    result = score(arguments.path, arguments.checkpoint, arguments.out, precision=arguments.precision)
    metrics = result["metrics"]
    lines = [
        f"{result['frames']} frames, {result['fires']} above the threshold of {result['threshold']:.4f}",
        f"AUC {metrics['auc']:.4f}, true positives {metrics['true_positive_rate']:.1%}, "
        f"false positives {metrics['false_positive_rate']:.2%}",
        f"{result['frames_per_second']:,.0f} frames/s",
    ]
    lines += [f"-> {display_path(arguments.out)}"] if arguments.out is not None else []
    _print(arguments, result, lines)
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from guerdon.run.judge import card

    result = card(arguments.path, arguments.checkpoint, arguments.out, precision=arguments.precision)
    _print(arguments, result, [result["headline"], f"-> {display_path(arguments.out)}"])
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from guerdon.run.judge import quantize

    result = quantize(arguments.path, arguments.checkpoint, arguments.threshold)
    lines = [
        f"int8 decides as fp32 does on {result['agreement']:.3%} of "
        f"{result['num_check_frames']} held-out frames",
        f"{result['judged_twice']:.1%} of them are near the threshold and judged again in fp32",
        f"-> {display_path(result['file'])}",
    ]
    _print(arguments, result, lines)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from guerdon.run.check import check_installation

    results = check_installation()
    lines = [
        f"{'ok' if item.ok else ('missing' if item.optional else 'FAILED'):<9}{item.name:<14}{item.detail}"
        for item in results
    ]
    _print(arguments, {"parts": [asdict(item) for item in results]}, lines)
    return 0 if all(item.ok or item.optional for item in results) else 1


if __name__ == "__main__":
    command()
