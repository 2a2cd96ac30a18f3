"""`guerdon reward`: use and judge a fitted reward model."""

from __future__ import annotations

import argparse
from pathlib import Path

from guerdon.cli.common import Verbs, print_result
from guerdon.core.types import display_path


def add_reward(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """`guerdon reward ...`."""
    reward = verbs.add_parser("reward", help="use and judge a fitted reward model")
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


def _score(arguments: argparse.Namespace) -> int:
    from guerdon.cli.judge import score

    result = score(arguments.path, arguments.checkpoint, arguments.out, precision=arguments.precision)
    metrics = result["metrics"]
    lines = [
        f"{result['frames']} frames, {result['fires']} above the threshold of {result['threshold']:.4f}",
        f"AUC {metrics['auc']:.4f}, true positives {metrics['true_positive_rate']:.1%}, "
        f"false positives {metrics['false_positive_rate']:.2%}",
        f"{result['frames_per_second']:,.0f} frames/s",
    ]
    lines += [f"-> {display_path(arguments.out)}"] if arguments.out is not None else []
    print_result(arguments, result, lines)
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from guerdon.cli.judge import card

    result = card(arguments.path, arguments.checkpoint, arguments.out, precision=arguments.precision)
    print_result(arguments, result, [result["headline"], f"-> {display_path(arguments.out)}"])
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from guerdon.cli.judge import quantize

    result = quantize(arguments.path, arguments.checkpoint, arguments.threshold)
    lines = [
        f"int8 decides as fp32 does on {result['agreement']:.3%} of "
        f"{result['num_check_frames']} held-out frames",
        f"{result['judged_twice']:.1%} of them are near the threshold and judged again in fp32",
        f"-> {display_path(result['file'])}",
    ]
    print_result(arguments, result, lines)
    return 0
