"""The experience store: what goes in once comes out as often as configured, in the order asked for."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_databases import new_database

pytest.importorskip("sqlalchemy")

from rollwright.errors import ConfigError, StoreError
from rollwright.experience.experience import Experience
from rollwright.store import PRIORITY_FUNCTIONS, ExperienceStore, Sampling, task_leases
from rollwright.store import database as store_database
from rollwright.store.task_leases import TaskLeases


def experience(marker: int = 0, *, version: int | None = 0, reward: float = 1.0) -> Experience:
    versions = None if version is None else [version, version]
    return Experience(tokens=[1, 2, 100 + marker], prompt_length=1, logprobs=[-0.5, -1.0], versions=versions, reward=reward)


def group(marker: int = 0, size: int = 2, version: int = 0) -> list[Experience]:
    return [experience(marker, version=version) for _ in range(size)]


def append_groups(store: ExperienceStore, *groups: list[Experience], first: int = 0) -> None:
    for ordinal, each in enumerate(groups, first):
        store.append(each, ordinal=ordinal)


@pytest.fixture
def store():
    with ExperienceStore(new_database(), run="run-1") as opened:
        yield opened


def flat(lists):
    return [item for each in lists for item in each]


def ordinals(batch):
    return None if batch is None else [each.ordinal for each in batch]


class TestAppend:
    def test_experiences_come_back_as_they_went_in(self, store):
        written = [experience(1, reward=0.25), [experience(2), experience(3)]]
        assert store.append(written, ordinal=7) == 3
        (stored,) = store.sample(groups=1)
        assert stored.experiences == [written[0], *written[1]]
        assert (stored.ordinal, stored.attempt, stored.version, stored.uses, stored.complete) == (7, 0, 0, 1, True)

    def test_appending_again_changes_nothing(self, store):
        first = group(1)
        assert store.append(first, ordinal=0) == 2
        assert store.append(first, ordinal=0) == 0
        assert store.append(group(9), ordinal=0, attempt=3) == 0
        assert store.status().experiences == 2
        assert store.sample(groups=1).experiences == first

    def test_a_group_without_ordinal_is_known_by_its_first_experience(self, store):
        first, second = group(1), group(1)
        assert [store.append(each) for each in (first, second, first)] == [2, 2, 0]

    def test_samples_of_a_group_come_one_by_one(self, store):
        for index in (2, 0, 0):
            store.append([experience(index)], ordinal=0, index=index, group_size=3)
        assert store.sample(groups=1) is None
        assert list(store.groups()) == []
        assert [len(each.experiences) for each in store.groups(partial=True)] == [2]
        store.append([experience(1), experience(1)], ordinal=0, index=1, group_size=3)
        assert [int(each.tokens[-1]) - 100 for each in store.sample(groups=1).experiences] == [0, 1, 1, 2]

    def test_a_newer_attempt_replaces_an_open_group(self, store):
        store.append([experience(1)], ordinal=0, index=0, group_size=2)
        store.append([experience(5)], ordinal=0, index=0, group_size=2, attempt=1)
        assert store.append([experience(1)], ordinal=0, index=1, group_size=2) == 0
        store.append([experience(6)], ordinal=0, index=1, group_size=2, attempt=1)
        assert [int(each.tokens[-1]) - 100 for each in store.sample(groups=1).experiences] == [5, 6]

    def test_version_is_that_of_the_oldest_token(self, store):
        mixed = Experience(tokens=[1, 2, 3, 4], prompt_length=1, versions=[4, -1, 3], action_mask=[1, 0, 1], reward=0.0)
        store.append([mixed, experience(version=9)], ordinal=0)
        store.append([experience(version=None)], ordinal=1)
        store.append([experience(version=None)], ordinal=2, version=6)
        assert [each.version for each in store.groups()] == [3, -1, 6]

    def test_a_sample_needs_a_group_to_belong_to(self, store):
        with pytest.raises(StoreError, match="needs both"):
            store.append(group(), ordinal=0, index=1)
        with pytest.raises(StoreError, match="without ordinal or name"):
            store.append(group(), index=1, group_size=2)


class TestSample:
    def fill(self, store, versions=(0, 2, 1, 2)):
        for ordinal, version in enumerate(versions):
            store.append(group(ordinal, version=version), ordinal=ordinal)

    def test_fifo(self, store):
        self.fill(store)
        assert ordinals(store.sample(groups=2)) == [0, 1]
        assert ordinals(store.sample(groups=2)) == [2, 3]
        assert store.sample(groups=1) is None

    def test_freshest_first(self, store):
        self.fill(store)
        assert ordinals(store.sample(groups=4, sampling=Sampling(order="freshest"))) == [1, 3, 2, 0]

    def test_uses(self, store):
        self.fill(store)
        drawn = [ordinals(store.sample(groups=2, sampling=Sampling(uses=3))) for _ in range(6)]
        assert sorted(flat(drawn)) == sorted(list(range(4)) * 3)
        assert store.sample(groups=1, sampling=Sampling(uses=3)) is None

    def test_linear_decay_prefers_fresh_and_unused(self, store):
        self.fill(store, versions=(0, 1, 2))
        sampling = Sampling(order="priority", uses=2, priority_fn_args={"decay": 1.5})
        # priorities 0, 1, 2 -> 2; then 0, 1, 0.5 -> 1; then 0, -0.5, 0.5 -> 2; then 0, -0.5 -> 0; then -1.5, -0.5 -> 1, 0
        assert [ordinals(store.sample(groups=1, sampling=sampling))[0] for _ in range(6)] == [2, 1, 2, 0, 1, 0]

    def test_a_priority_function_may_end_the_use_of_a_group(self, store, monkeypatch):
        self.fill(store)
        monkeypatch.setattr(PRIORITY_FUNCTIONS, "_entries", dict(PRIORITY_FUNCTIONS._entries))
        PRIORITY_FUNCTIONS["odd"] = lambda version, uses, generator: None if version == 2 else -version
        assert ordinals(store.sample(groups=2, sampling=Sampling(order="priority", priority_fn="odd"))) == [0, 2]
        assert store.sample(groups=1, sampling=Sampling(order="priority", priority_fn="odd")) is None

    def test_limited_uses_with_noise_repeat_with_the_seed(self, store):
        self.fill(store, versions=(0,) * 12)
        args = {"decay": 0.1, "use_count_limit": 2, "sigma": 1.0}
        sampling = Sampling(
            order="priority", uses=9, priority_fn="linear_decay_use_count_control_randomization", priority_fn_args=args
        )
        store.recover(None)
        first = [ordinals(store.sample(groups=3, sampling=sampling)) for _ in range(8)]
        assert sorted(flat(first)) == sorted(list(range(12)) * 2)
        assert store.sample(groups=1, sampling=sampling) is None
        store.recover(None)
        assert [ordinals(store.sample(groups=3, sampling=sampling)) for _ in range(8)] == first
        assert first[0] != [0, 1, 2]

    def test_uniform_draws_each_once_and_repeats_with_the_seed(self, store):
        self.fill(store, versions=range(20))
        first = [ordinals(store.sample(groups=5, sampling=Sampling(order="uniform", seed=3))) for _ in range(4)]
        assert sorted(flat(first)) == list(range(20))
        assert flat(first) != list(range(20))
        store.recover(None)
        assert [ordinals(store.sample(groups=5, sampling=Sampling(order="uniform", seed=3))) for _ in range(4)] == first

    def test_a_batch_that_is_not_full_waits(self, store):
        self.fill(store)
        assert store.sample(groups=5) is None
        assert store.status().unused_groups == 4
        assert ordinals(store.sample(groups=5, partial_batch=True)) == [0, 1, 2, 3]
        assert store.sample(groups=5, partial_batch=True) is None

    def test_rows_are_counted_in_whole_groups(self, store):
        for ordinal, size in enumerate((2, 3, 1, 2)):
            store.append(group(size=size), ordinal=ordinal)
        assert ordinals(store.sample(experiences=4)) == [0, 1]
        assert store.sample(experiences=4) is None
        store.append(group(size=1), ordinal=4)
        assert ordinals(store.sample(experiences=4)) == [2, 3, 4]

    def test_older_groups_can_be_left_out_or_dropped(self, store):
        self.fill(store)
        assert ordinals(store.sample(groups=2, min_version=2)) == [1, 3]
        assert store.drop_older_than(1) == 1
        assert store.status().drops == {"stale": 2}
        assert ordinals(store.sample(groups=1)) == [2]

    def test_cooldown(self, store):
        long, short = (Sampling(uses=2, cooldown_seconds=seconds) for seconds in (3600, 0.4))
        store.append(group(), ordinal=0)
        assert ordinals(store.sample(groups=1, sampling=long)) == [0]
        assert store.sample(groups=1, sampling=long) is None
        store.append(group(), ordinal=1)
        assert ordinals(store.sample(groups=1, sampling=short)) == [1]
        assert ordinals(store.sample(groups=1, sampling=short, timeout=60.0)) == [1]

    def test_partial_groups_only_when_asked(self, store):
        store.append(group(0), ordinal=0)
        store.append([experience(1)], ordinal=1, index=0, group_size=3)
        assert store.sample(groups=2) is None
        batch = store.sample(groups=2, partial_groups=True)
        assert [len(each.experiences) for each in batch] == [2, 1]
        assert store.append([experience(1)], ordinal=1, index=0, group_size=3) == 0
        assert store.append([experience(2)], ordinal=1, index=1, group_size=3) == 0
        assert store.status().drops == {"late": 1}

    def test_partial_groups_stay_open_where_the_batch_is_not_reached(self, store):
        store.append([experience(1)], ordinal=1, index=0, group_size=2)
        assert store.sample(groups=2, partial_groups=True) is None
        assert store.append([experience(1)], ordinal=1, index=1, group_size=2) == 1

    def test_a_reader_waits_for_a_writer(self, tmp_path):
        url = new_database(tmp_path / "store.db")
        with ExperienceStore(url) as reader, ExperienceStore(url) as writer:
            timer = threading.Timer(0.1, lambda: writer.append(group(), ordinal=0))
            timer.start()
            assert ordinals(reader.sample(groups=1, timeout=60)) == [0]
            timer.join()
            started = time.monotonic()
            assert reader.sample(groups=1, timeout=0.1) is None
            assert time.monotonic() - started >= 0.1

    def test_a_wait_ends_when_cancelled_or_when_no_more_can_come(self, store):
        assert store.sample(groups=1, timeout=None, cancelled=lambda: True) is None
        store.tasks.declare(1)
        (claim,) = store.tasks.claim("a", 5)
        store.tasks.finish(claim, group())
        assert store.sample(groups=2, timeout=None) is None
        assert ordinals(store.sample(groups=2, timeout=None, partial_batch=True)) == [0]


class TestTasks:
    def test_each_ordinal_is_claimed_once(self, store):
        store.tasks.declare(5)
        first, second = store.tasks.claim("a", 3), store.tasks.claim("b", 3)
        assert [claim.ordinal for claim in first] == [0, 1, 2]
        assert [claim.ordinal for claim in second] == [3, 4]
        assert store.tasks.claim("a", 1) == []

    def test_a_dead_explorers_claims_go_to_the_next(self, store):
        lost = store.tasks.claim("a", 2, lease_seconds=0.0)
        time.sleep(0.01)
        (again, more, fresh) = store.tasks.claim("b", 3)
        assert [(claim.ordinal, claim.attempt) for claim in (again, more, fresh)] == [(0, 1), (1, 1), (2, 0)]
        assert store.tasks.finish(lost[0], group(1)) is False
        assert store.tasks.finish(again, group(2)) is True
        assert store.tasks.finish(again, group(3)) is False
        (stored,) = store.groups()
        assert (stored.attempt, int(stored.experiences[0].tokens[-1])) == (1, 102)

    def test_a_late_explorer_may_finish_what_nobody_else_claimed(self, store):
        (claim,) = store.tasks.claim("a", 1, lease_seconds=0.0)
        time.sleep(0.01)
        assert store.tasks.finish(claim, group())

    def test_leases_are_renewed_while_the_explorer_lives(self):
        for seconds in (0.6, 2.4, 9.6):  # a machine that stands still for as long as one lease is given the next
            with ExperienceStore(new_database(), run="run-1") as store:
                with store.tasks.keeping_claims("a", lease_seconds=seconds):
                    store.tasks.claim("a", 2, lease_seconds=seconds)
                    time.sleep(1.3 * seconds)
                    others = [claim.ordinal for claim in store.tasks.claim("b", 1)]
                if others != [2]:
                    continue
                assert [(claim.ordinal, claim.attempt) for claim in store.tasks.claim("b", 2)] == [(0, 1), (1, 1)]
                return
        raise AssertionError("a lease was not renewed")

    def test_given_back_claims_are_free_at_once(self, store):
        store.tasks.claim("a", 3)
        assert store.tasks.release("a", [1]) == 1
        assert [claim.ordinal for claim in store.tasks.claim("b", 1)] == [1]
        assert store.tasks.release("a") == 2

    def test_a_finished_task_without_experiences_is_not_run_again(self, store):
        (claim,) = store.tasks.claim("a", 1, lease_seconds=0.0)
        assert store.tasks.finish(claim, [], drops={"reward_filter": 8})
        status = store.status()
        assert (status.finished_tasks, status.experiences, status.drops) == (1, 0, {"reward_filter": 8})
        assert [each.ordinal for each in store.tasks.claim("a", 1)] == [1]

    def test_samples_appended_before_the_task_is_finished_are_its_group(self, store):
        (claim,) = store.tasks.claim("a", 1)
        for index in range(2):
            store.append([experience(index)], ordinal=claim.ordinal, index=index, group_size=4, attempt=claim.attempt)
        assert store.tasks.finish(claim, None)
        assert [len(each.experiences) for each in store.sample(groups=1)] == [2]

    def test_a_rejected_task_leaves_nothing_behind(self, store):
        (first, second) = store.tasks.claim("a", 2)
        for claim in (first, second):
            store.append([experience()], ordinal=claim.ordinal, index=0, group_size=4, attempt=claim.attempt)
        store.tasks.release("a", [second.ordinal])
        (again,) = store.tasks.claim("b", 1)
        assert store.tasks.finish(first, [])
        assert store.tasks.finish(again, None)  # the attempt that appended something was another one
        assert store.status().experiences == 0
        assert list(store.groups(partial=True)) == []

    def test_admission_counts_running_ready_and_training(self, store):
        claims = store.tasks.claim("a", 10, max_outstanding=4)
        assert len(claims) == 4
        store.tasks.finish(claims[0], group(0))
        store.tasks.finish(claims[1], [])
        assert len(store.tasks.claim("a", 10, max_outstanding=4)) == 1
        assert ordinals(store.sample(groups=1)) == [0]
        assert store.tasks.claim("a", 10, max_outstanding=4) == []
        store.announcements.publish("weights/1", 1)
        assert len(store.tasks.claim("a", 10, max_outstanding=4)) == 1

    def test_a_run_may_be_made_longer_not_shorter(self, store):
        store.tasks.declare(3)
        store.tasks.declare(4)
        with pytest.raises(StoreError, match="longer, not shorter"):
            store.tasks.declare(2)


class TestCheckpoints:
    def test_a_restart_draws_again_what_was_not_committed(self, store):
        append_groups(store, *(group(i) for i in range(6)))
        assert ordinals(store.sample(groups=2)) == [0, 1]
        assert store.commit("step-1", version=1) == 2
        assert ordinals(store.sample(groups=2)) == [2, 3]
        assert store.recover("step-1") == 2
        assert ordinals(store.sample(groups=4)) == [2, 3, 4, 5]

    @pytest.mark.parametrize("sampling", [Sampling("freshest"), Sampling("priority", priority_fn_args={"decay": 0.5})])
    def test_what_was_used_after_the_checkpoint_competes_again_by_its_age(self, store, sampling):
        append_groups(store, *(group(i, version=i) for i in range(4)))
        assert ordinals(store.sample(groups=1, sampling=sampling)) == [3]
        store.commit("step-1", version=4)
        assert ordinals(store.sample(groups=2, sampling=sampling)) == [2, 1]
        store.append(group(9, version=5), ordinal=9)  # an explorer goes on while the trainer is gone
        assert store.recover("step-1") == 2
        assert ordinals(store.sample(groups=2, sampling=sampling)) == [9, 2]
        assert ordinals(store.sample(groups=3, sampling=sampling, partial_batch=True)) == [1, 0]

    def test_a_priority_that_falls_with_use_is_as_high_again_when_the_use_is_undone(self, store):
        sampling = Sampling("priority", uses=2, priority_fn_args={"decay": 1.5})
        append_groups(store, *(group(i, version=i) for i in range(3)))
        store.commit("step-0", version=3)
        drawn = [ordinals(store.sample(groups=1, sampling=sampling)) for _ in range(6)]
        assert drawn == [[2], [1], [2], [0], [1], [0]]
        assert store.recover("step-0") == 6
        assert [ordinals(store.sample(groups=1, sampling=sampling)) for _ in range(6)] == drawn

    def test_a_restart_from_an_older_checkpoint_forgets_the_newer(self, store):
        append_groups(store, *(group(i) for i in range(4)))
        store.commit("step-0")
        for step in (1, 2, 3):
            store.sample(groups=1)
            store.commit(f"step-{step}")
        assert store.recover("step-1") == 2
        with pytest.raises(StoreError, match=r"knows no checkpoint 'step-3' \(it knows step-0, step-1\)"):
            store.recover("step-3")
        assert ordinals(store.sample(groups=1)) == [1]
        store.commit("step-2")

    def test_drops_are_undone_with_the_checkpoint_that_made_them(self, store):
        append_groups(store, *(group(i, version=i) for i in range(3)))
        store.drop_older_than(1)
        store.commit("step-1")
        store.drop_older_than(2)
        store.recover("step-1")
        assert store.status().drops == {"stale": 2}
        assert ordinals(store.sample(groups=2)) == [1, 2]

    def test_uses_of_an_earlier_trainer_are_not_passed_over(self, tmp_path):
        url = new_database(tmp_path / "store.db")
        with ExperienceStore(url) as first:
            first.append(group(), ordinal=0)
            first.sample(groups=1)
        with ExperienceStore(url) as second:
            with pytest.raises(StoreError, match=r"call recover\(checkpoint\)"):
                second.sample(groups=1)
            second.recover(None)
            assert ordinals(second.sample(groups=1)) == [0]

    def test_a_store_has_one_trainer(self, tmp_path):
        url = new_database(tmp_path / "store.db")
        with ExperienceStore(url) as first, ExperienceStore(url) as second:
            append_groups(first, group(), group())
            first.sample(groups=1)
            second.recover(None)
            for action in (
                lambda: first.sample(groups=1),
                lambda: first.commit("x"),
                lambda: first.announcements.publish("w", 1),
            ):
                with pytest.raises(StoreError, match="another trainer has recovered"):
                    action()
            assert len(second.sample(groups=2)) == 2

    def test_a_checkpoint_has_a_name_of_its_own(self, store):
        store.commit("step-1")
        with pytest.raises(StoreError, match="has a checkpoint 'step-1' already"):
            store.commit("step-1")

    def test_dropped_rows_can_be_forgotten_once_no_checkpoint_brings_them_back(self, store):
        append_groups(store, *(group(i, version=i) for i in range(3)))
        assert store.drop_older_than(1) == 1
        assert store.forget_used(keep_checkpoints=1) == 0  # there is no checkpoint yet
        store.commit("step-1")
        assert store.drop_older_than(2) == 1
        assert store.forget_used(keep_checkpoints=1) == 2  # the second drop is not committed
        assert store.recover("step-1") == 0
        assert ordinals(store.sample(groups=2)) == [1, 2]

    def test_used_rows_can_be_forgotten_once_no_checkpoint_needs_them(self, store):
        append_groups(store, *(group(i) for i in range(4)))
        for step in (1, 2, 3):
            store.sample(groups=1)
            store.commit(f"step-{step}")
        assert store.forget_used(keep_checkpoints=2) == 4  # groups 0 and 1: both committed by step-2, the oldest kept
        assert store.recover("step-2") == 1
        assert [(each.ordinal, len(each.experiences)) for each in store.sample(groups=2)] == [(2, 2), (3, 2)]


class TestVersions:
    def test_the_newest_weights_are_announced(self, store):
        assert store.announcements.newest() is None
        assert store.announcements.wait_for(1, timeout=0.02) is None
        store.announcements.publish("weights/1", 1)
        store.announcements.publish("weights/1", 1)
        store.announcements.publish("weights/2", 2)
        newest = store.announcements.wait_for(1)
        assert (newest.version, newest.path) == (2, "weights/2")
        with pytest.raises(StoreError, match="versions only grow"):
            store.announcements.publish("weights/other", 2)

    def test_a_restart_withdraws_later_weights_and_says_so_by_the_epoch(self, store):
        store.announcements.publish("weights/1", 1)
        store.commit("step-1", version=1)
        store.announcements.publish("weights/2", 2)
        before = store.announcements.newest()
        store.recover("step-1")
        assert store.announcements.newest().version == 1
        store.announcements.publish("weights/2", 2)
        after = store.announcements.newest()
        assert (after.version, after.path) == (before.version, before.path)
        assert after.epoch != before.epoch
        assert (before.since, after.since) == (1, 2)  # version 1 is the same in both

    def test_the_highest_version_is_remembered_when_it_is_withdrawn(self, store):
        assert store.announcements.highest_version() == -1
        store.announcements.publish("weights/1", 1)
        store.commit("step-1", version=1)
        store.announcements.publish("weights/5", 5)
        store.recover("step-1")
        assert store.announcements.highest_version() == 5
        store.announcements.publish("weights/2", 2)
        assert (store.announcements.newest().version, store.announcements.highest_version()) == (2, 5)


class TestIdentity:
    def test_a_store_of_another_run_is_refused(self, tmp_path):
        url = new_database(tmp_path / "store.db")
        ExperienceStore(url, run="one").close()
        ExperienceStore(url, run="one").close()
        ExperienceStore(url).close()
        with pytest.raises(StoreError, match="belongs to run 'one', not to 'two'"):
            ExperienceStore(url, run="two")

    def test_a_missing_store_is_not_made_by_a_reader(self, tmp_path):
        with pytest.raises(StoreError, match="does not exist"):
            ExperienceStore(f"sqlite:///{tmp_path}/none.db", create=False)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_is_no_database(self, tmp_path):
        (tmp_path / "store.db").write_text("this is a text that is long enough to be no database " * 50)
        with pytest.raises(StoreError, match="cannot be used as an experience store"):
            ExperienceStore(f"sqlite:///{tmp_path}/store.db")

    def test_a_database_of_something_else(self, tmp_path):
        with sqlite3.connect(tmp_path / "store.db") as connection:
            connection.execute("CREATE TABLE groups (id INTEGER)")
        connection.close()
        with pytest.raises(StoreError, match="that no experience store made"):
            ExperienceStore(f"sqlite:///{tmp_path}/store.db")

    def test_damaged_bytes_name_the_group(self, tmp_path):
        with ExperienceStore(f"sqlite:///{tmp_path}/store.db") as store:
            store.append(group(), ordinal=4)
            with sqlite3.connect(tmp_path / "store.db") as connection:
                connection.execute("UPDATE experiences SET data = x'00ff'")
            connection.close()
            with pytest.raises(StoreError, match="row 0 of group 'task/4' cannot be read"):
                list(store.groups())

    def test_each_byte_of_a_row_that_is_damaged_is_noticed(self, tmp_path):
        """A token that was 11 came back as 4123."""
        with ExperienceStore(f"sqlite:///{tmp_path}/store.db") as store:
            store.append(group(), ordinal=4)
            assert store.damaged() == []
            connection = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
            (number, data) = connection.execute("SELECT id, data FROM experiences").fetchone()
            for place in range(0, len(data), 7):
                damaged = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
                connection.execute("UPDATE experiences SET data = ? WHERE id = ?", (damaged, number))
                with pytest.raises(StoreError, match="row 0 of group 'task/4' cannot be read"):
                    list(store.groups())
                assert len(store.damaged()) == 1
            connection.execute("UPDATE experiences SET data = ?, reward = reward + 1 WHERE id = ?", (data, number))
            with pytest.raises(StoreError, match="the column has"):
                list(store.groups())
            connection.close()

    def test_pages_that_are_damaged_are_said_with_what_to_do(self, tmp_path):
        with ExperienceStore(f"sqlite:///{tmp_path}/store.db") as store:
            append_groups(store, *(group(i) for i in range(60)))
        path = tmp_path / "store.db"
        data = bytearray(path.read_bytes())
        data[4096 * 3 :] = bytes(len(data) - 4096 * 3)
        path.write_bytes(data)
        with (
            pytest.raises(StoreError, match="restore it from a copy, or start a new store"),
            ExperienceStore(f"sqlite:///{path}") as store,
        ):
            list(store.groups())

    @pytest.mark.parametrize("url", ["mysql://host/x", "nonsense"])
    def test_urls_that_are_not_supported(self, url):
        with pytest.raises(ConfigError, match=r"store\.url"):
            ExperienceStore(url)

    @pytest.mark.parametrize("arguments", [{"order": "lifo"}, {"uses": 0}, {"order": "priority", "priority_fn": "none"}])
    def test_wrong_sampling_is_refused(self, arguments):
        with pytest.raises(ConfigError):
            Sampling(**arguments)


class TestPrioritiesThatRefuse:
    """A priority function may say that a group is not to be used again, though it has uses left."""

    SAMPLING = Sampling(
        order="priority",
        uses=None,
        priority_fn="linear_decay_use_count_control_randomization",
        priority_fn_args={"use_count_limit": 1},
    )

    def test_the_wait_is_for_groups_that_may_be_drawn(self, store):
        append_groups(store, *(group(i) for i in range(2)))
        assert store.sample(groups=2, sampling=self.SAMPLING) is not None
        started = time.monotonic()
        assert store.sample(groups=2, sampling=self.SAMPLING, timeout=0.2) is None
        assert time.monotonic() - started >= 0.2
        append_groups(store, group(2), group(3), first=2)
        assert ordinals(store.sample(groups=2, sampling=self.SAMPLING, timeout=0.2)) == [2, 3]
        assert store.sample(experiences=1, sampling=self.SAMPLING) is None

    def test_arguments_that_it_does_not_take_are_told_before_the_first_draw(self):
        with pytest.raises(ConfigError, match="decai"):
            Sampling(order="priority", priority_fn_args={"decai": 1.0})


def test_claims_are_renewed_again_after_a_failure(store, monkeypatch, caplog):
    """A database that refuses once must not cost an explorer all that it holds."""
    renew, calls = TaskLeases.renew, []

    def sometimes(self, owner, **options):
        calls.append(owner)
        if len(calls) == 1:
            raise StoreError("disk full")
        return renew(self, owner, **options)

    monkeypatch.setattr(TaskLeases, "renew", sometimes)
    with caplog.at_level("WARNING"), store.tasks.keeping_claims("e1", lease_seconds=0.15):
        store.tasks.claim("e1", 1, lease_seconds=0.15)
        deadline = time.monotonic() + 60
        while len(calls) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "could not be renewed: disk full" in caplog.text


def test_many_threads_that_write_at_once_wait_for_their_turn(tmp_path, monkeypatch):
    """An explorer's tasks end in bursts, and a large group takes its time: nobody's wait is over before its turn comes."""
    monkeypatch.setattr(store_database, "BUSY_SECONDS", 0.2)
    write = task_leases.write_group

    def slowly(*arguments, **keywords):
        time.sleep(0.03)
        return write(*arguments, **keywords)

    monkeypatch.setattr(task_leases, "write_group", slowly)
    with ExperienceStore(f"sqlite:///{tmp_path}/store.db") as store:
        claims = store.tasks.claim("e1", 40)
        with ThreadPoolExecutor(40) as pool:
            assert all(pool.map(lambda claim: store.tasks.finish(claim, group()), claims))
        assert store.status().finished_tasks == 40
