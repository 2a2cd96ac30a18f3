"""Text rewards through TRL's own trainer."""

import json

import pytest

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.text.rules import (
    CombinedTextReward,
    ExactMatchReward,
    FormatReward,
    MathReward,
    RegexReward,
)

GOOD = "<think>easy</think><answer>4</answer>"


def said(text):
    return [{"role": "assistant", "content": text}]


def test_plain_and_conversational_completions():
    rule = ExactMatchReward()
    assert rule(prompts=["a", "b"], completions=["Four", "five"], answer=["four", "four"]) == [1.0, 0.0]
    asked = [[{"role": "user", "content": "2+2?"}]] * 3
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "image"}]}]
    tools = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "5"},
        *said("4"),
    ]
    rewards = rule(
        prompts=asked, completions=[said("5"), parts, tools], completion_ids=[[1]] * 3, solution=["4"] * 3
    )
    assert rewards == [0.0, 1.0, 1.0] and all(type(reward) is float for reward in rewards)


def test_rows_without_an_answer_get_none():
    columns = {"reference": ["4", None, 4], "trainer_state": object(), "log_metric": print}
    assert ExactMatchReward()(prompts=[""] * 3, completions=["4", "4", "4"], **columns) == [1.0, None, 1.0]


def test_rules_without_references_need_no_column():
    completions = [GOOD, "4"]
    assert FormatReward()(prompts=[""] * 2, completions=completions) == [1.0, 0.0]
    assert RegexReward(pattern="^4$")(completions=completions) == [0.0, 1.0]
    both = CombinedTextReward([(FormatReward(), 0.5), (RegexReward(pattern="4"), 1.0)])
    assert both(completions=completions, prompts=[""] * 2) == [1.5, 1.0]
    assert not both.needs_reference
    assert CombinedTextReward([(FormatReward(), 1), (MathReward(), 1)]).needs_reference


def test_names_and_other_columns():
    assert [rule.__name__ for rule in (MathReward(), FormatReward())] == ["math", "format"]
    assert FormatReward.__name__ == "FormatReward"
    reward = ExactMatchReward().as_trl(column="gold", name="right")
    assert reward.__name__ == "right"
    assert reward(prompts=["x"], completions=["a"], gold=["A"], answer=["b"]) == [1.0]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (
            {"gold": ["4"]},
            ConfigError,
            r"no column with right answers \(reference, .*only \['gold'\]: .*as_trl",
        ),
        ({"answer": "4"}, DataError, "must be a list of 1 answers"),
        ({"answer": ["4", "5"]}, DataError, "must be a list of 1 answers"),
        ({"answer": [["4"]]}, DataError, "must hold texts or numbers"),
    ],
)
def test_wrong_columns_are_named(columns, error, message):
    with pytest.raises(error, match=message):
        ExactMatchReward()(prompts=["x"], completions=["4"], **columns)


@pytest.mark.parametrize("completion", [7, [1], [{"role": "assistant", "content": 7}]])
def test_what_is_no_completion_is_said(completion):
    with pytest.raises(DataError, match=r"a completion is|content of a message is"):
        ExactMatchReward()(prompts=["x"], completions=[completion], answer=["4"])


@pytest.mark.slow
@pytest.mark.parametrize("conversational", [False, True])
def test_a_grpo_trainer_takes_them_as_they_are(tmp_path, conversational):
    """One step of the real trainer, with a random model of two layers on the CPU."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(_tokenizer(tmp_path / "tokenizer.json")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    prompts = [[{"role": "user", "content": "2"}]] * 4 if conversational else ["2"] * 4
    data = Dataset.from_dict({"prompt": prompts, "answer": ["4", "4", None, None]})
    rules = [ExactMatchReward(), RegexReward(pattern=r"\d").as_trl(name="digit")]
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_generations=2, max_steps=1,
        max_completion_length=4, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=rules, args=args, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert 0 <= logged["rewards/digit/mean"] <= 1 and "rewards/exact_match/mean" in logged
    completions = [said("4"), said("x")] if conversational else ["4", "x"]
    rows = [{"prompt": prompts[0], "answer": "4"}, {"prompt": prompts[1], "answer": None}]
    rewards = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, [[1], [2]])
    assert rewards[0].tolist() == [1.0, 1.0]
    assert rewards[1, 0].isnan() and rewards[1, 1] == 0


def _tokenizer(path):
    """Words of single characters."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{str(digit): 2 + digit for digit in range(10)}, "x": 12}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "x"},
            }
        )
    )
    return path
