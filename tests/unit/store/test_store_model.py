"""The experience store against a model: whatever happens in whatever order, nothing is lost and nothing is repeated.

The machine plays two explorers and a trainer on one store, with crashes of each at any point between two calls: a crashed
explorer forgets its claims, a crashed trainer goes back to the newest checkpoint that became visible.
"""

import pytest

pytest.importorskip("sqlalchemy")

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_databases import new_database

from rollwright.experience.experience import Experience
from rollwright.store import ExperienceStore, Sampling

TASKS = 24


def group(ordinal: int, attempt: int) -> list[Experience]:
    return [
        Experience(tokens=[1, 2 + ordinal, 2 + attempt, 2 + row], prompt_length=1, versions=[ordinal] * 3) for row in range(2)
    ]


def identity(stored) -> tuple[int, int]:
    tokens = [experience.tokens.tolist() for experience in stored.experiences]
    assert [each[3] - 2 for each in tokens] == [0, 1], "a group is whole and in order"
    (key,) = {(each[1] - 2, each[2] - 2) for each in tokens}
    return key


class StoreMachine(RuleBasedStateMachine):
    @initialize(uses=st.sampled_from([1, 2]), order=st.sampled_from(["fifo", "freshest", "priority", "uniform"]))
    def begin(self, uses, order):
        self.store = ExperienceStore(new_database(), run="model")
        self.store.tasks.declare(TASKS)
        self.sampling = Sampling(order=order, uses=uses)
        self.claims = {"a": [], "b": []}  # what each explorer believes it holds
        self.dead = []  # claims of explorers that died
        self.finished = {}  # ordinal -> attempt that was stored, or None where rejected
        self.trained = []  # what the trainer's weights have seen
        self.checkpoints = [(None, [])]
        self.names = 0

    def teardown(self):
        if hasattr(self, "store"):
            self.drain()
            self.store.close()

    @rule(owner=st.sampled_from("ab"), count=st.integers(1, 3))
    def claim(self, owner, count):
        held = {claim.ordinal for claims in self.claims.values() for claim in claims}
        for claim in self.store.tasks.claim(owner, count):
            assert claim.ordinal not in held
            assert claim.ordinal not in self.finished
            self.claims[owner].append(claim)

    @rule(owner=st.sampled_from("ab"), count=st.integers(1, 4), rejected=st.sampled_from([True, False, False]))
    def work(self, owner, count, rejected):
        self.claim(owner, count)
        for _ in range(count):
            self.finish(owner, 0, rejected)

    @rule(owner=st.sampled_from("ab"), pick=st.integers(0, 99), rejected=st.booleans())
    def finish(self, owner, pick, rejected):
        if self.claims[owner]:
            claim = self.claims[owner].pop(pick % len(self.claims[owner]))
            samples = [] if rejected else group(claim.ordinal, claim.attempt)
            assert self.store.tasks.finish(claim, samples)
            self.finished[claim.ordinal] = None if rejected else claim.attempt

    @rule(owner=st.sampled_from("ab"), pick=st.integers(0, 99), index=st.integers(0, 1))
    def append_one_sample(self, owner, pick, index):
        if self.claims[owner]:
            claim = self.claims[owner][pick % len(self.claims[owner])]
            sample = group(claim.ordinal, claim.attempt)[index]
            self.store.append([sample], ordinal=claim.ordinal, index=index, group_size=3, attempt=claim.attempt)

    @precondition(lambda self: any(self.claims.values()))
    @rule(owner=st.sampled_from("ab"))
    def kill_explorer(self, owner):
        self.dead += self.claims[owner]
        self.claims[owner] = []
        self.store.tasks.release(owner)

    @precondition(lambda self: self.dead)
    @rule(pick=st.integers(0, 99), reclaimed=st.sampled_from([True, True, False]))
    def a_dead_explorers_message_arrives_late(self, pick, reclaimed):
        if reclaimed:
            self.claim("b", len(self.dead))
        claim = self.dead.pop(pick % len(self.dead))
        before = self.store.status()
        assert not self.store.tasks.finish(claim, group(claim.ordinal, 50))
        assert self.store.status() == before

    @precondition(lambda self: self.finished)
    @rule(count=st.sampled_from([1, 1, 2, 4]))
    def train(self, count):
        batch = self.store.sample(groups=count, sampling=self.sampling)
        if batch is not None:
            assert len(batch) == count
            self.trained += [identity(stored) for stored in batch]

    @precondition(lambda self: self.trained)
    @rule(visible=st.sampled_from([True, True, False]))
    def checkpoint(self, visible):
        self.names += 1
        self.store.commit(f"step-{self.names}")
        if visible:  # else the trainer dies between the commit and the rename
            self.checkpoints.append((f"step-{self.names}", list(self.trained)))
        else:
            self.kill_trainer(back=0)

    @precondition(lambda self: self.trained)
    @rule(back=st.integers(0, 2))
    def kill_trainer(self, back):
        del self.checkpoints[max(1, len(self.checkpoints) - back) :]
        name, trained = self.checkpoints[-1]
        undone = self.store.recover(name)
        assert undone == len(self.trained) - len(trained)
        self.trained = list(trained)

    @invariant()
    def no_group_is_used_too_often(self):
        if hasattr(self, "store"):
            assert all(count <= self.sampling.uses for count in Counter(self.trained).values())
            assert set(self.trained) <= set(self.finished.items())

    def drain(self):
        for owner in "ab":
            self.store.tasks.release(owner)
            self.claims[owner] = self.store.tasks.claim(owner, TASKS)
            while self.claims[owner]:
                self.finish(owner, 0, False)
        while (batch := self.store.sample(groups=3, sampling=self.sampling, partial_batch=True)) is not None:
            self.trained += [identity(stored) for stored in batch]
        wanted = Counter({item: self.sampling.uses for item in self.finished.items() if item[1] is not None})
        assert Counter(self.trained) == wanted
        assert sorted(self.finished) == list(range(TASKS))


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
