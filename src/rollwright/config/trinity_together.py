"""Keys of Trinity-shaped files that decide something together: a KL and its weight, replay, batches, lengths, synchronisation."""

from __future__ import annotations

from typing import Any

from rollwright.config.source import KeyPath
from rollwright.config.trinity_work import Work
from rollwright.errors import ConfigError

_REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer."
#: The weight of the KL that Trinity-RFT takes where a file names a ``kl_loss_fn`` and no ``kl_coef``.
KL_COEFFICIENT = 0.001


def decide_together(work: Work) -> None:
    """Translate the keys of ``TOGETHER`` that a file has; faults are noted."""
    for decide in (_name, _kl, _entropy, _replay, _batch_of_experiences, _synchronisation, _lengths, _stragglers):
        try:
            decide(work)
        except ConfigError as error:
            work.faults.append(str(error))


def _said(work: Work, key: str, otherwise: Any = None) -> Any:
    return work.together[key][1] if key in work.together else otherwise


def _fault(work: Work, key: str, message: str) -> ConfigError:
    return ConfigError(f"{work.origins.of(work.together[key][0])}: {key} {message}")


def _path(work: Work, *keys: str) -> KeyPath:
    """Where the first of the keys that the file has is written."""
    return next(work.together[key][0] for key in keys if key in work.together)


def _name(work: Work) -> None:
    """A group of runs is a directory there, between the project's and the run's; here it is a part of the run's name."""
    group, name = _said(work, "group"), _said(work, "name", "trial")
    if group:
        work.put(_path(work, "group"), [("trial_name", f"{group}-{name}")])
    elif "name" in work.together:
        work.put(_path(work, "name"), [("trial_name", name)])


def _stragglers(work: Work) -> None:
    """Samples that take longer than the others."""
    ratio_key, wait_key = "explorer.over_rollout.ratio", "explorer.over_rollout.wait_after_min"
    if ratio_key in work.together:
        work.put(_path(work, ratio_key), [("rollout.over_sampling", _said(work, ratio_key))])
    if _said(work, ratio_key) and _said(work, wait_key):
        raise _fault(
            work, wait_key, "is a time to wait for stragglers, but they are cut as soon as the batch is complete; set it to 0"
        )
    if _said(work, "explorer.dynamic_timeout.enable"):
        raise _fault(
            work,
            "explorer.dynamic_timeout.enable",
            "goes by how long samples usually take, but nobody measures a sample's usual time; set it to false, and explorer.max_timeout",
        )
    for key in (wait_key, "explorer.dynamic_timeout.enable", "explorer.dynamic_timeout.ratio"):
        if key in work.together:
            work.notes.append(f"{key}: {_said(work, key)} is of nothing that is switched on")


def _kl(work: Work) -> None:
    name_key, weight_key = "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"
    name, weight = _said(work, name_key), _said(work, weight_key)
    if name == "none":
        work.put(_path(work, name_key), [("actor.kl_ctl", 0.0)])
        if weight is not None:
            work.notes.append(f"{weight_key}: {weight} is the weight of no KL, as kl_loss_fn is none")
        return
    if name is not None:
        if name not in ("k1", "k2", "k3"):
            raise _fault(work, name_key, f"is {name!r}; here there are k1, k2, k3 and none")
        work.put(_path(work, name_key), [("actor.kl_estimator", name)])
    if weight is not None:
        work.put(_path(work, weight_key), [("actor.kl_ctl", weight)])
    elif name is not None:
        work.put(_path(work, name_key), [("actor.kl_ctl", KL_COEFFICIENT)])


def _entropy(work: Work) -> None:
    name_key, weight_key = "algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.entropy_coef"
    name, weight = _said(work, name_key, "default"), _said(work, weight_key)
    if name not in ("default", "none"):
        raise _fault(work, name_key, f"is {name!r}; here there are default and none")
    if name_key in work.together:
        work.notes.append(f"{name_key}: {name} (as here)")
    if weight is None:
        return
    if name == "none":
        work.notes.append(f"{weight_key}: {weight} is the weight of nothing, as entropy_loss_fn is none")
    else:
        work.put(_path(work, weight_key), [("actor.entropy_coef", weight)])


def _replay(work: Work) -> None:
    given = {key.removeprefix(_REPLAY): value for key, (_, value) in work.together.items() if key.startswith(_REPLAY)}
    if not given:
        return
    if not given.pop("enable", False):
        work.notes.append(f"{_REPLAY[:-1]}: not enabled, so each experience is used once, in order")
        return
    work.put(_path(work, f"{_REPLAY}enable"), [("store.order", "priority")])
    cooldown = given.pop("reuse_cooldown_time", None)
    if cooldown is None:
        work.notes.append(f"{_REPLAY}reuse_cooldown_time: not set, so each experience is used once")
    else:
        again = [("store.cooldown_seconds", cooldown), ("store.uses", None)]
        work.put(_path(work, f"{_REPLAY}reuse_cooldown_time"), again)
    for key, value in given.items():
        work.put(_path(work, f"{_REPLAY}{key}"), [(f"store.{key}", value)])
    if work.data["store"].get("type") == "queue":
        work.data["store"]["type"] = "sql"
        work.notes.append("store.type: sql, a queue with priorities is a database")


def _batch_of_experiences(work: Work) -> None:
    key = "buffer.train_batch_size"
    if key not in work.together:
        return
    size = _whole(work, key, 1)
    whole = work.data.get("train_dataset", {}).get("batch_size", 1) * work.data.get("gconfig", {}).get("n_samples", 1)
    if work.data.get("mode", "both") in ("explore", "train"):
        work.put(_path(work, key), [("store.train_batch_size", size)])
    elif size == whole:
        work.notes.append(f"{key}: {size} (batch_size × repeat_times, as here)")
    else:
        raise _fault(
            work,
            key,
            f"is {size}, but in mode both a step trains on what it explored: batch_size × repeat_times = {whole}; set it to that, or "
            "run mode explore beside mode train",
        )


def _synchronisation(work: Work) -> None:
    """Weights move every ``interval`` steps, and explorers are ``offset`` batches further ahead."""
    interval_key, offset_key = "synchronizer.sync_interval", "synchronizer.sync_offset"
    if interval_key not in work.together and offset_key not in work.together:
        return
    interval, offset = _whole(work, interval_key, 1, otherwise=1), _whole(work, offset_key, 0, otherwise=0)
    if interval_key in work.together:
        work.put(_path(work, interval_key), [("rollout.weight_update_every_steps", interval)])
    work.put(_path(work, offset_key, interval_key), [("rollout.max_head_offpolicyness", interval - 1 + offset)])
    work.notes.append(
        f"synchronizer: weights move after every {interval} steps of the trainer, and no token is trained that is more than "
        f"sync_interval - 1 + sync_offset = {interval - 1 + offset} steps old; explorers wait where they would be further ahead"
    )


def _whole(work: Work, key: str, least: int, otherwise: int = 0) -> int:
    value = _said(work, key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _fault(work, key, f"is {value!r}; it is a whole number of at least {least}")
    return value


def _lengths(work: Work) -> None:
    key = "model.max_prompt_tokens"
    if key not in work.together:
        return
    rollout = work.data.setdefault("rollout", {})
    response = work.data.get("gconfig", {}).get("max_new_tokens")
    if "context_length" in rollout:
        work.notes.append(f"{key}: prompts are bounded by the model length {rollout['context_length']}")
    elif response is None:
        raise _fault(work, key, "bounds a prompt together with model.max_response_tokens, which is not set; set it, too")
    else:
        rollout["context_length"] = _whole(work, key, 1) + response
        work.notes.append(f"{key} + max_response_tokens -> rollout.context_length: {rollout['context_length']}")
