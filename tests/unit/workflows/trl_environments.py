"""Environments, a rollout function and reward functions as one writes them for TRL's GRPOTrainer."""

import random
import threading


class Counter:
    """The model has to count to a target."""

    made = 0

    def __init__(self):
        Counter.made += 1
        self.thread = threading.current_thread()
        self.value = 0

    def reset(self, target=3, **row):
        self.value, self.target = 0, target
        return f" Count to {target}."

    def increment(self, step: int) -> str:
        """
        Increment the counter.

        Args:
            step: How far to count.

        Returns:
            The new value.
        """
        assert threading.current_thread() is self.thread or self.value == 0
        self.value += step
        return f"The value is {self.value}."

    async def look(self) -> int:
        """Return the value."""
        return self.value

    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("no")

    def _hidden(self):
        raise AssertionError

    def get_reward(self):
        return float(self.value == self.target)


class Dice:
    """Rolls Python's global dice, which concurrent episodes of one process would share."""

    def reset(self, seed, **row):
        random.seed(seed)
        self.rolled = []

    def roll(self) -> int:
        """Roll."""
        self.rolled.append(random.randint(1, 6))
        return self.rolled[-1]

    def get_reward(self):
        return float(int("".join(map(str, self.rolled))))


def made_counter():
    return Counter()


def short(prompts, completions, completion_ids, environments, **columns):
    assert prompts[0][-1]["content"].startswith("Please.")
    assert completions[0][0]["role"] == "assistant"
    assert len(completions[0][-1]["content"]) > 0
    return [0.5 * (environments[0].value > 0)]


async def none(completions, **columns):
    return [None]


def echo_rollout(prompts, trainer):
    """Two turns, with a word of the environment between them, as in TRL's examples."""
    from rollwright.compat.trl_workflows import generate_rollout_completions

    tokenizer, rows = trainer.processing_class, {}
    for prompt in prompts:
        [first] = generate_rollout_completions(trainer, [prompt])
        between = tokenizer.encode("then", add_special_tokens=False)
        ids = [*first["prompt_ids"], *first["completion_ids"], *between]
        _, [second], [logprobs], _ = trainer.vllm_generation.generate([ids], None, 1)
        row = {
            "prompt_ids": first["prompt_ids"],
            "completion_ids": [*first["completion_ids"], *between, *second],
            "logprobs": [*first["logprobs"], *[0.0] * len(between), *[each[0] for each in logprobs]],
            "env_mask": [1] * len(first["completion_ids"]) + [0] * len(between) + [1] * len(second),
            "word": first["text"],
        }
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
    return rows


def word_reward(prompts, completions, completion_ids, word, wanted, **columns):
    return [float(each == want) for each, want in zip(word, wanted, strict=True)]


def other_attribute(prompts, trainer):
    return trainer.vllm_client.generate(prompts)


def invented_tokens(prompts, trainer):
    ids = trainer.processing_class.encode("one two", add_special_tokens=False)
    return {"prompt_ids": [ids] * len(prompts), "completion_ids": [ids] * len(prompts), "logprobs": [[0.0]] * len(prompts)}


def one_row_only(prompts, trainer):
    return {"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]]}


def without_ids(prompts, trainer):
    return {"completion_ids": []}
