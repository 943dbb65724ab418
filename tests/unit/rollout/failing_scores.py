"""Reward functions that fail; a module, as the processes that call them import it."""


def fails(prompt, completion, prompt_ids, completion_ids, **columns):
    return completion.grade()


def text(prompt, completion, prompt_ids, completion_ids, **columns):
    return "1"
