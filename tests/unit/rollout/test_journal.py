"""The journal of an executor's episodes, and their replay without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import random
import threading
import time
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from echo import EchoEngine
from PIL import Image

from rollwright import GenerationHyperparameters, ModelRequest, ModelResponse, RolloutConfig, durable
from rollwright.errors import JournalError, PromptTooLongError, ReplayError
from rollwright.experience.journal import episodes
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Arguments, GroupEnd, ModelCall, digest_of
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.recorder import Recorder
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.replay import Replayer
from rollwright.trainers.loops.rl import PPOTrainer

GCONFIG = GenerationHyperparameters(max_new_tokens=4, temperature=0.7)


class Chat:
    """A few turns with a tool between them; two conversations side by side in every second sample."""

    def __init__(self, tool=None) -> None:
        self.tool = tool or durable("tool")(lambda turn: random.randrange(200, 300))

    async def arun_episode(self, engine, data):
        turns = data["turns"]
        rows = await asyncio.gather(*(self.conversation(engine, turns) for _ in range(1 + data["ordinal"] % 2)))
        return {
            "input_ids": [ids for ids, _ in rows],
            "loss_mask": [mask for _, mask in rows],
            "rewards": [sum(ids) / 1000 for ids, _ in rows],
        }

    async def conversation(self, engine, turns):
        ids, mask, rid = [1, 2, 3], [0, 0, 0], uuid.uuid4().hex
        for turn in range(turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=rid))
            ids += response.output_tokens
            mask += [1] * response.output_len
            if turn < turns - 1:
                ids.append(self.tool(turn))
                mask.append(0)
        return ids, mask


def run(directory, workflow, tasks=6, group_size=2, engine=None):
    journal = Journal(directory)
    with RolloutExecutor(engine or EchoEngine(0.001), RolloutConfig(), seed=3, journal=journal) as executor:
        data = [{"turns": 1 + number % 4, "ordinal": number} for number in range(tasks)]
        batch = executor.rollout_batch(data, workflow, group_size=group_size)
    journal.close()
    return batch


def replay(directory, workflow, group_size=2, **settings):
    replayer = Replayer(lambda episode: (workflow, None, group_size), seed=3, **settings)
    return list(replayer.replay(read_episodes(directory)))


def test_every_episode_of_a_run_is_equal_without_an_engine(tmp_path):
    batch = run(tmp_path, Chat())
    replayed = replay(tmp_path, Chat())
    assert [(each.verdict, each.why) for each in replayed] == [("equal", "")] * 12
    assert sum(len(each.rewards) for each in replayed) == len(batch["rewards"])
    ends = [record for _, record in read_records(tmp_path) if isinstance(record, GroupEnd)]
    assert [(end.ordinal, end.state) for end in ends] == [(number, "delivered") for number in range(6)]


def test_rows_and_calls_are_read_back_as_they_were(tmp_path):
    batch = run(tmp_path, Chat(), tasks=3, group_size=1)
    rows = {}
    for episode in read_episodes(tmp_path):
        for number, row in enumerate(episode.end.rows):
            rows[episode.begin.ordinal, number] = episode.row_ids(row), episode.row_mask(row)
            assert episode.calls[row.base].gconfig["temperature"] == pytest.approx(0.7)
    expected = zip(batch["input_ids"], batch["loss_mask"], batch["attention_mask"], strict=True)
    for (ids, mask), (row, masked, present) in zip((rows[key] for key in sorted(rows)), expected, strict=True):
        length = int(present.sum())
        np.testing.assert_array_equal(ids, row[:length].numpy())
        np.testing.assert_array_equal(mask, masked[:length].numpy().astype(bool))


def test_a_call_whose_arguments_are_gone_is_an_error_with_its_place(tmp_path, monkeypatch):
    run(tmp_path, Chat(), tasks=1, group_size=1)
    whole = list(read_records(tmp_path))
    monkeypatch.setattr(
        episodes, "read_all", lambda directory, files=None: (e for e in whole if not isinstance(e[1], Arguments))
    )
    with pytest.raises(JournalError, match=r"000000-0000\.journal, before byte \d+: call 0 of 0/0 has generation arguments 0"):
        list(read_episodes(tmp_path))


def test_a_journal_that_cannot_be_written_ends_rollout_whatever_a_workflow_catches(tmp_path, monkeypatch):
    """Its error is raised in the workflow's own model call, which a workflow may take for one of the engine's."""

    class Stubborn(Chat):
        async def arun_episode(self, engine, data):
            for _ in range(3):
                with contextlib.suppress(Exception):
                    return await super().arun_episode(engine, data)
            return None

    journal = Journal(tmp_path)
    with RolloutExecutor(EchoEngine(), RolloutConfig(max_failed_share=1.0), journal=journal) as executor:
        executor.rollout_batch([{"turns": 2, "ordinal": 0}], Stubborn())
        size = journal.size
        monkeypatch.setattr(os, "write", lambda file, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(JournalError, match=r"cannot be written .*: free space on that disk, then start the run again"):
            executor.rollout_batch([{"turns": 2, "ordinal": number} for number in range(1, 9)], Stubborn())
        monkeypatch.undo()
        assert isinstance(executor.stopped_by, JournalError)
    assert journal.size == size
    journal.close()
    assert [record for _, record in read_records(tmp_path)]


def test_a_call_is_a_delta_of_its_conversation(tmp_path):
    class Long(Chat):
        async def arun_episode(self, engine, data):
            ids, mask = await self.conversation(engine, 40)
            return {"input_ids": ids, "loss_mask": mask, "reward": 0.0}

    run(tmp_path, Long(), tasks=1, group_size=1)
    calls = [record for _, record in read_records(tmp_path) if isinstance(record, ModelCall)]
    assert [len(call.added) // 4 for call in calls] == [3] + [1] * 39
    assert [call.base for call in calls] == list(range(-1, 39))


def test_parallel_conversations_share_their_prompt(tmp_path):
    class Parallel:
        async def arun_episode(self, engine, data):
            prompt = list(range(100, 400))
            asked = [ModelRequest(input_ids=[*prompt, number], gconfig=GCONFIG) for number in range(3)]
            answers = await asyncio.gather(*map(engine.agenerate, asked))
            return [
                {"input_ids": [*prompt, number], "output_ids": answer.output_tokens, "reward": 1.0}
                for number, answer in enumerate(answers)
            ]

    run(tmp_path, Parallel(), tasks=1, group_size=1)
    calls = [record for _, record in read_records(tmp_path) if isinstance(record, ModelCall)]
    assert sorted(len(call.added) // 4 for call in calls) == [1, 1, 301]
    assert [each.verdict for each in replay(tmp_path, Parallel(), 1)] == ["equal"]


def test_conversations_may_come_in_another_order_than_they_were_recorded_in(tmp_path):
    """Which of them asks first may hang on the clock."""

    class Parallel:
        def __init__(self, order) -> None:
            self.order = order

        async def arun_episode(self, engine, data):
            rows = {}
            for number in self.order:
                ids, rid = [100 + min(number, 2)], uuid.uuid4().hex  # the last two begin alike
                for _ in range(2):
                    answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=rid))
                    ids = [*ids, *answer.output_tokens]
                rows[number] = {"input_ids": [100 + min(number, 2)], "output_ids": ids[1:], "reward": 1.0}
            return [rows[number] for number in sorted(rows)]

    run(tmp_path, Parallel([0, 1, 2, 3]), tasks=1, group_size=1)
    assert [each.verdict for each in replay(tmp_path, Parallel([1, 2, 0, 3]), 1)] == ["equal"]


def test_a_request_that_differs_is_named_by_its_first_token(tmp_path):
    run(tmp_path, Chat(), tasks=4, group_size=1)
    verdicts = {each.name: each for each in replay(tmp_path, Chat(tool=lambda turn: 500), 1)}
    assert verdicts["0/0"].verdict == "equal"  # one turn: no tool was called
    failed = verdicts["2/0"]
    assert isinstance(failed.error, ReplayError)
    assert "task 2, sample 0 (Chat) does not run as it was recorded: call 1 (conversation 0, turn 1) differs" in failed.why
    assert "from token 6 on: the prompt has 500" in failed.why


def test_a_workflow_that_swallows_the_difference_is_told_all_the_same(tmp_path):
    class Swallows(Chat):
        async def arun_episode(self, engine, data):
            try:
                return await super().arun_episode(engine, data)
            except Exception:
                return None

    run(tmp_path, Chat(), tasks=3, group_size=1)
    assert [each.verdict for each in replay(tmp_path, Swallows(tool=lambda turn: 500), 1)] == ["equal", "failed", "failed"]


def test_a_workflow_that_asks_for_more_has_no_model_to_ask(tmp_path):
    class More(Chat):
        async def conversation(self, engine, turns):
            return await super().conversation(engine, turns + 1)

    tool = durable("tool", kind="pure")(lambda turn: 250)
    run(tmp_path, Chat(tool), tasks=1, group_size=1)
    (failed,) = replay(tmp_path, More(tool), 1)
    assert "it asks for turn 1 of conversation 0, and the journal has 1 calls, none at that place" in failed.why


def test_changed_rewards_are_shown_beside_the_recorded_ones(tmp_path):
    class Half(Chat):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            return {**result, "rewards": [reward / 2 for reward in result["rewards"]]}

    run(tmp_path, Chat(), tasks=3, group_size=1)
    assert {each.verdict for each in replay(tmp_path, Half(), 1)} == {"differs"}
    for each in replay(tmp_path, Half(), 1, compares_rewards=False):
        assert each.verdict == "equal"
        assert each.rewards == pytest.approx([reward / 2 for reward in each.recorded_rewards])


def test_a_refused_prompt_is_refused_again(tmp_path):
    class Full(EchoEngine):
        async def agenerate(self, request):
            if len(request.tokens) > 5:
                raise PromptTooLongError("no room")
            return await super().agenerate(request)

    class UntilFull(Chat):
        async def arun_episode(self, engine, data):
            ids, mask = [1, 2, 3], [0, 0, 0]
            try:
                while True:
                    response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=str(data["ordinal"])))
                    ids, mask = [*ids, *response.output_tokens], [*mask, *[1] * response.output_len]
            except PromptTooLongError:
                return {"input_ids": ids, "loss_mask": mask, "reward": float(engine.recorder.outgrew_context)}

    run(tmp_path, UntilFull(), tasks=2, group_size=1, engine=Full())
    assert [(each.verdict, each.rewards) for each in replay(tmp_path, UntilFull(), 1)] == [("equal", [1.0])] * 2


def test_failed_and_rejected_samples_are_told(tmp_path):
    attempts = itertools.count()

    class Fails(Chat):
        async def arun_episode(self, engine, data):
            if data["ordinal"] == 1:
                return None
            if data["ordinal"] == 0 and next(attempts) == 0:
                raise ValueError("the first time")
            return await super().arun_episode(engine, data)

    run(tmp_path, Fails(), tasks=3, group_size=1)
    ends = [(each.begin.ordinal, each.begin.attempt, each.end.outcome, each.end.reason) for each in read_episodes(tmp_path)]
    assert sorted(ends) == [
        (0, 0, "failed", "ValueError: the first time"),
        (0, 1, "accepted", ""),
        (1, 0, "rejected", ""),
        (2, 0, "accepted", ""),
    ]


def test_a_journal_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch):
    journal = Journal(tmp_path)

    def full(frame):
        raise JournalError("the disk is full")

    monkeypatch.setattr(journal, "_append", full)
    with RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal) as executor, pytest.raises(JournalError):
        executor.rollout_batch([{"turns": 1, "ordinal": 0}], Chat())


def test_objects_in_a_task_that_no_journal_holds_are_said(tmp_path):
    journal = Journal(tmp_path)
    with RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal) as executor:
        executor.rollout_batch([{"turns": 1, "ordinal": 0, "image": object(), "size": torch.tensor(3)}], Chat())
    journal.close()
    (failed,) = replay(tmp_path, Chat(), 1)
    assert "its task is not in the journal (builtins.object is neither" in failed.why


def test_a_task_with_images_runs_again_with_those_of_its_dataset(tmp_path):
    images = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (10, 200)]
    seen = []

    class Look(Chat):
        async def arun_episode(self, engine, data):
            seen.append([image.getpixel((0, 0))[0] for image in data["images"]])
            return await super().arun_episode(engine, data)

    journal = Journal(tmp_path)
    with RolloutExecutor(EchoEngine(), RolloutConfig(), seed=3, journal=journal) as executor:
        executor.rollout_batch([{"turns": 1, "ordinal": 0, "images": images}], Look(), group_size=2)
    journal.close()
    assert journal.size < 64 * 8 * 8  # pixels are not in it
    by_digest = {digest_of(image): image for image in images}
    replayed = replay(tmp_path, Look(), find_image=by_digest.__getitem__)
    assert [(each.verdict, each.why) for each in replayed] == [("equal", "")] * 2
    assert seen == [[10, 200]] * 4
    (episode, _) = read_episodes(tmp_path)
    assert "RGB image of 8×8 pixels" in str(episode.task())


def test_an_answer_without_tokens_is_recorded(tmp_path):
    """As of a request for the log-probabilities of a prompt alone."""
    journal = Journal(tmp_path)
    episode, recorder = EpisodeWriter(journal), Recorder()
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
    episode.begin(ordinal=0, index=0, task=None, task_error="", **facts)
    for tokens in ([], [7]):
        request = ModelRequest(input_ids=[1, 2], gconfig=GCONFIG, rid=f"{tmp_path}/{len(tokens)}")
        response = ModelResponse(output_tokens=tokens, output_logprobs=[-1.0] * len(tokens), output_versions=[3] * len(tokens))
        episode.call(recorder.record(request, response, place=recorder.open_turn(request.rid)))
    journal.close()
    (read,) = read_episodes(tmp_path)
    assert [(each.output.tolist(), each.versions.tolist()) for each in read.calls] == [([], []), ([7], [3])]


def test_images_of_one_digest_look_the_same_in_every_mode():
    """A palette and its transparency are not among the pixels of an image."""
    red, blue, clear = (Image.new("P", (8, 8), 0) for _ in range(3))
    for image, colour in ((red, [255, 0, 0]), (blue, [0, 0, 255]), (clear, [255, 0, 0])):
        image.putpalette(colour)
    clear.info["transparency"] = 0
    assert len({digest_of(image) for image in (red, blue, clear, red.convert("RGB"), red.convert("RGBA"))}) == 5
    for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"):
        assert digest_of(Image.new(mode, (5, 3))) == digest_of(Image.new(mode, (5, 3)))


def test_an_image_that_cannot_be_read_ends_no_run(tmp_path):
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    task = {"turns": 1, "ordinal": 0, "image": Image.open(io.BytesIO(file.getvalue()[:800]))}
    journal = Journal(tmp_path)
    with RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal) as executor:
        assert len(executor.rollout_batch([task], Chat())["rewards"]) == 1  # which looks at no image
    journal.close()
    (failed,) = replay(tmp_path, Chat(), 1)
    assert "its task is not in the journal (an image that cannot be read: image file is truncated)" in failed.why


def test_calls_that_end_in_several_threads_are_numbered_as_they_are_written(tmp_path, monkeypatch):
    """A streamed answer ends on the front's loop, another one on the executor's."""
    journal = Journal(tmp_path)
    arguments = journal.arguments
    monkeypatch.setattr(journal, "arguments", lambda *given: time.sleep(0.0005) or arguments(*given))
    episode, recorder, asked = EpisodeWriter(journal), Recorder(), {}
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
    episode.begin(ordinal=0, index=0, task=None, task_error="", **facts)

    def converse(number):
        ids = [number]
        for turn in range(10):
            request = ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=f"{tmp_path}/{number}")
            place = recorder.open_turn(request.rid)
            asked[place] = list(ids)
            response = ModelResponse(output_tokens=[turn], output_logprobs=[-1.0], output_versions=[0])
            episode.call(recorder.record(request, response, place=place))
            ids = [*ids, turn, 100 * number]

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    (read,) = read_episodes(tmp_path)
    assert [each.call.index for each in read.calls] == list(range(40))
    assert {(each.call.conversation, each.call.turn): each.prompt.tolist() for each in read.calls} == asked


def test_a_checkpoint_in_the_background_is_noted_as_that_of_its_step(tmp_path):
    journal = Journal(tmp_path)
    rollout = SimpleNamespace(executor=SimpleNamespace(frontier=12))
    trainer = SimpleNamespace(step=3, rollout=rollout, journal=journal)
    commit = PPOTrainer.before_recover_visible(trainer)
    trainer.step, rollout.executor.frontier = 5, 20  # made while it was written
    commit()
    journal.close()
    (record,) = (record for _, record in read_records(tmp_path))
    assert (record.step, record.frontier) == (3, 12)


def test_a_replay_makes_no_call_that_was_not_recorded(tmp_path):
    """Neither the tool of changed code, nor one with other arguments: it would act on the world."""
    run(tmp_path, Chat())
    made = []
    other = durable("tool")(lambda turn: made.append(turn) or 7)
    replayed = replay(tmp_path, Chat(lambda turn: other(turn + 10)))
    failed = [each for each in replayed if each.verdict == "failed"]
    assert len(failed) == 8  # those of one turn call nothing
    assert all("the journal has no further call of tool" in each.why for each in failed)
    assert not made
