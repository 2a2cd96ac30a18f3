"""Rewards by rule on text: right answers count, wrong ones do not, and nothing hangs or raises."""

import logging
import os
import pickle
import resource
import signal
import threading
import time

import numpy as np
import pytest

from guerdon.config import RewardConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import (
    CombinedTextReward,
    ExactMatchReward,
    FormatReward,
    MathReward,
    RegexReward,
    create_text_reward,
)
from guerdon.rewards.text.deadline import DeadlineChecks
from guerdon.serve import RewardWorker

THOUGHT = "<think>one and one</think>\n<answer>2</answer>"


@pytest.fixture(scope="module")
def math():
    return MathReward(seconds=2.0)


def test_mathematical_equivalence(math):
    cases = [
        (r"so it is \boxed{\frac{1}{2}}", "1/2", 1),
        ("The answer is 0.5.", r"\frac{1}{2}", 1),
        (r"\frac{2}{4}", "0.5", 1),
        (r"hence $(x+1)^2$", "x^2 + 2x + 1", 1),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1),
        (r"\boxed{0.5001}", "1/2", 0),
        ("first 3, then 4", "3", 0),
        (r"$(x+1)^2$", "x^2 + 1", 0),
        ("no idea", "7", 0),
        ("", "7", 0),
    ]
    responses, references, expected = zip(*cases, strict=True)
    scores = math(responses, references)
    assert scores.dtype == np.float32
    assert scores.tolist() == list(expected)


def test_bad_latex_is_wrong_and_leaves_a_debug_line(math, caplog):
    with caplog.at_level(logging.DEBUG, "guerdon"):
        scores = math([r"$$\frac{1}{$$", r"$\sqrt{\left( x$", "$$$$", r"\boxed{"], ["1", "1", "1", "1"])
    assert not scores.any()
    assert "could be read in the response" in caplog.text


def test_an_endless_computation_costs_its_own_score_alone(math, caplog):
    responses = ["$3$", "$9^{9^{9^{9}}}$", "$3$"]
    started = time.perf_counter()
    with caplog.at_level(logging.DEBUG, "guerdon"):
        scores = math(responses, ["3", "3", "3"])
    assert scores.tolist() == [1, 0, 1]
    assert "took too long" in caplog.text
    assert time.perf_counter() - started < 240


def test_mathematics_in_a_thread(math):
    found = []
    thread = threading.Thread(target=lambda: found.append(math(["$4$", "$5$"], ["4", "4"]).tolist()))
    thread.start()
    thread.join(60)
    assert found == [[1.0, 0.0]]


def test_the_answer_stands_at_the_end_or_in_its_tag(math):
    long = "1 + " * 50_000 + r"which gives \boxed{12}"
    assert math([long], ["12"]).tolist() == [1]
    tagged = MathReward(answer_tag="answer", seconds=2.0)
    texts = ["<answer>3/6</answer>", "<think>1/2</think>", "<answer>1/2", "<answer>3</answer> or 1/2"]
    assert tagged(texts, ["1/2"] * 4).tolist() == [1, 0, 0, 0]
    with pytest.raises(DataError, match="5000 characters, more than max_chars=4000"):
        math(["1"], ["1" * 5000])


def test_without_math_verify_the_error_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('hidden')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'guerdon\[text\]'"):
        MathReward()(["1"], ["1"])


def test_exact_match_and_its_normalisation():
    rule = ExactMatchReward()
    assert rule(["  Paris\n", "London", "paris!"], ["paris"] * 3).tolist() == [1, 0, 0]
    assert ExactMatchReward(ignore_case=False)(["Paris"], ["paris"]).tolist() == [0]
    assert ExactMatchReward(ignore_spaces=False)(["a  b"], ["a b"]).tolist() == [0]
    loose = ExactMatchReward(ignore_punctuation=True, ignore_articles=True)
    assert loose(["The Eiffel-Tower!"], ["eiffeltower"]).tolist() == [1]
    tagged = ExactMatchReward(answer_tag="answer")
    assert tagged([THOUGHT, "2", "<answer></answer>"], ["2", "2", ""]).tolist() == [1, 0, 0]
    assert ExactMatchReward(max_chars=10)(["x" * 11, "x" * 10], ["x" * 11, "x" * 10]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (THOUGHT, 1, 1),
        ("  " + THOUGHT + "\n", 1, 1),
        ("Well: " + THOUGHT, 0, 1),
        (THOUGHT + " done", 0, 1),
        ("<think>a</think> then <answer>2</answer>", 0, 1),
        ("<answer>2</answer><think>a</think>", 0, 0),
        ("<think></think><answer>2</answer>", 0, 0),
        ("<think>a<answer>2</answer></think>", 0, 0),
        (THOUGHT + "<answer>3</answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(text, strict, loose):
    assert FormatReward()([text], [""]).tolist() == [strict]
    assert FormatReward(allow_outside=True)([text], [""]).tolist() == [loose]


def test_an_enormous_text_takes_no_time():
    started = time.process_time()  # other load does not count
    texts = ["<think>" * 2_000_000, "<think>" * 14_000]
    assert not FormatReward()(texts, ["", ""]).any()
    assert not ExactMatchReward(ignore_articles=True)(texts, ["a", "a"]).any()
    assert time.process_time() - started < 2


def test_regular_expressions():
    rule = RegexReward(pattern=r"answer:\s*{reference}$", flags=("ignorecase",))
    texts = ["The ANSWER: 1+1", "answer: 11", "answer: 1+1!"]
    assert rule(texts, ["1+1"] * 3).tolist() == [1, 0, 0]
    whole = RegexReward(pattern=r"\d+", full=True)
    assert whole(["42", "42 "], ["", ""]).tolist() == [1, 0]


def computing_seconds_of_children():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def test_a_catastrophic_expression_ends_in_time():
    spent = computing_seconds_of_children()
    harmless = RegexReward(pattern=r"(a+)+$")
    assert harmless(["aaa"], [""]).tolist() == [1]
    harmless._checks.close()
    start = computing_seconds_of_children() - spent  # of the process that computes
    rule = RegexReward(pattern=r"(a+)+$", seconds=0.5)
    started, spent = time.perf_counter(), computing_seconds_of_children()
    assert rule(["aaa", "a" * 60 + "b", "aa"], [""] * 3).tolist() == [1, 0, 1]
    assert time.perf_counter() - started < 240
    rule._checks.close()
    spent = computing_seconds_of_children() - spent
    assert 0.4 < spent < 1.0 + 4 * start  # with two starts of the process


def test_a_machine_with_other_work_to_do_costs_no_score():
    rule = RegexReward(pattern=r"(a+)+$|b", seconds=1.0)
    assert rule(["b"], [""]).tolist() == [1]
    child, found = rule._checks._child, []
    thread = threading.Thread(target=lambda: found.append(rule(["a" * 20 + "b"], [""]).tolist()))
    thread.start()
    for _ in range(4):  # held up in the middle of its work, for longer than it may compute
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.01)
    thread.join(60)
    assert found == [[1.0]] and rule._checks._child is child


def test_the_weighted_sum_of_rules():
    rule = CombinedTextReward([(FormatReward(), 0.25), (ExactMatchReward(answer_tag="answer"), 1.0)])
    texts = [THOUGHT, THOUGHT.replace("2", "3"), "<answer>2</answer>", "2"]
    np.testing.assert_array_equal(rule(texts, ["2"] * 4), np.float32([1.25, 0.25, 1.0, 0.0]))


def test_rules_from_plain_settings():
    spec = {
        "name": "combined",
        "rules": [
            {"name": "format", "weight": 0.5, "tags": ["think", "answer"]},
            {"name": "regex", "pattern": "2", "weight": -0.5},
            "exact_match",
        ],
    }
    assert create_text_reward(spec)([THOUGHT, "2"], ["", "2"]).tolist() == [0.0, 0.5]
    assert create_text_reward("exact_match") == ExactMatchReward()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", "unknown text reward 'exact_mach'; did you mean 'exact_match'"),
        ({}, "needs a name, one of math, exact_match"),
        ({"name": "format", "tag": ["a"]}, "did you mean 'format.tags'"),
        ({"name": "format", "tags": ["a", "a"]}, "different names"),
        ({"name": "regex"}, "regex.pattern is missing"),
        ({"name": "regex", "pattern": "("}, "no regular expression"),
        ({"name": "regex", "pattern": "a", "flags": ["dotal"]}, "did you mean 'dotall'"),
        ({"name": "math", "seconds": 0}, "math.seconds"),
        ({"name": "combined", "rules": []}, "at least one rule"),
        ({"name": "combined", "rules": ["format"], "weights": [1]}, "weights"),
        ({"name": "combined", "rules": [{"name": "format", "weight": "1"}]}, "finite number"),
        (["format"], "a name or a mapping"),
    ],
)
def test_wrong_settings(spec, message):
    with pytest.raises(ConfigError, match=message):
        create_text_reward(spec)


@pytest.mark.parametrize(
    ("responses", "references", "message"),
    [
        (["a"], ["a", "b"], "1 responses and 2 references"),
        ("a", ["a"], "responses must be a list of texts, not str"),
        (["a"], [None], "references must hold texts, not NoneType"),
        ([3], ["a"], "responses must hold texts, not int"),
    ],
)
def test_wrong_batches(responses, references, message):
    with pytest.raises(DataError, match=message):
        ExactMatchReward()(responses, references)


def test_an_empty_batch_has_no_rewards():
    for rule in (ExactMatchReward(), RegexReward(pattern="a"), CombinedTextReward([(FormatReward(), 1.0)])):
        assert rule([], []).shape == (0,)


def test_checks_survive_copying_and_closing():
    checks = DeadlineChecks("regex", {"pattern": "b", "flags": 0, "full": False, "references": False}, 1.0)
    assert checks.run([("abc", ""), ("a", "")]) == [True, False]
    copy = pickle.loads(pickle.dumps(checks))
    checks.close()
    assert checks.run([("b", "")]) == copy.run([("b", "")]) == [True]


# The worker of a text task


def test_the_reward_worker_judges_text_by_rules():
    rules = {"name": "combined", "rules": ["exact_match", {"name": "regex", "pattern": "^4", "weight": 0.5}]}
    worker = RewardWorker(RewardConfig(text=rules), task_type="text")
    with pytest.raises(ConfigError, match=r"call init_worker\(\) first"):
        worker.compute_rewards(["4"], ["4"])
    worker.init_worker()
    rewards = worker.compute_rewards(["4", "42", "5"], ["4", "4", "5"])
    assert rewards.dtype == np.float32 and rewards.tolist() == [1.5, 0.5, 1.0]
    with pytest.raises(DataError, match="need a reference"):
        worker.compute_rewards(["4"])
    with pytest.raises(ConfigError, match="has no image reward worker"):
        worker.compute_batch_rewards({"base_camera": np.zeros((1, 8, 8, 3), np.uint8)})


def test_a_learned_model_for_text_is_not_supported():
    with pytest.raises(ConfigError, match=r"not supported for text tasks.*reward\.text"):
        RewardWorker(RewardConfig(use_reward_model=True), task_type="text")
