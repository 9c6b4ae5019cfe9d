"""Who waits for whom: made-up members that read what they are told, and prompts written as small generators."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.waiting import until

from hf_adafuse.decoding.batch_slots import BatchSlots
from hf_adafuse.decoding.requests import ForwardRequest, ParallelMembers, merge_requests, with_sizes
from hf_adafuse.decoding.scheduler import Scheduler
from hf_adafuse.members.local_member import LocalMember
from hf_adafuse.members.passes import Pass
from hf_adafuse.members.served_member import ServedMember
from hf_adafuse.servers.daemon_threads import map_at_once
from hf_adafuse.trees.pass_policy import Policy, pays_side_by_side

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _keeping_share(monkeypatch):
    monkeypatch.setattr(Policy, "keeping_share", 0.4)


class FakeMember:
    """Reads at most so many of the nodes that each prompt waits for; nodes are any values."""

    runs_elsewhere, device_key, device = False, "here", torch.device("cpu")

    def __init__(self, name, log, most=100):
        self.name, self.log, self.most = name, log, most

    def begin_pass(self, needs, likely):
        return Pass(lambda: self.read(needs, likely), lambda result: result())

    def read(self, needs, likely):
        assert len(self.log) < 50, "it never ends"
        self.log.append((self.name, {prompt: list(nodes) for prompt, (nodes, _) in needs.items()}))
        self.useful = {prompt: useful for prompt, (_, useful) in needs.items()}
        self.likely = likely
        return [node for nodes, _ in needs.values() for node in nodes[: self.most]]


def prompt(*requests, events=None, name=""):
    """What a prompt does: these requests, as pairs of a member's index and nodes, one after the other."""
    for member_index, nodes in requests:
        yield ForwardRequest(member_index, list(nodes))
        if events is not None:
            events.append(name)


def run(prompts, num_members=2, most=100, refill=lambda ready: {}):
    """The passes: of which member, and what each prompt waited for."""
    log = []
    members = [FakeMember("AB"[index], log, most) for index in range(num_members)]
    Scheduler(members, [None] * num_members, refill).run(prompts)
    return log


@pytest.mark.parametrize(("num_left", "first"), [(lambda row: 10 if row == 7 else 2, "B"), (lambda row: None, "A")])
def test_who_has_most_left_to_do_is_waited_for_least(num_left, first):
    log = []
    members = [FakeMember(name, log) for name in "AB"]
    prompts = {row: prompt((0, "a")) for row in (3, 5)} | {7: prompt((1, "b"))}
    Scheduler(members, [None, None], lambda ready: {}, num_left).run(prompts)
    assert log[0][0] == first


def test_prompts_that_need_the_same_member_share_a_pass():
    prompts = {3: prompt((0, "ab")), 5: prompt((0, "c")), 8: prompt((0, "d"))}
    assert run(prompts) == [("A", {3: ["a", "b"], 5: ["c"], 8: ["d"]})]


def test_each_goes_on_when_it_has_been_served():
    prompts = {0: prompt((0, "a"), (0, "b"), (0, "c")), 1: prompt((0, "d"))}
    assert run(prompts) == [("A", {0: ["a"], 1: ["d"]}), ("A", {0: ["b"]}), ("A", {0: ["c"]})]


def test_a_prompt_that_is_partly_served_waits_for_the_rest():
    events = []
    prompts = {0: prompt((0, "abc"), events=events, name=0), 1: prompt((0, "d"), (0, "e"), events=events, name=1)}
    # Two nodes each: prompt 1 goes on at once, prompt 0 only with all its nodes.
    assert run(prompts, most=2) == [("A", {0: ["a", "b", "c"], 1: ["d"]}), ("A", {0: ["c"], 1: ["e"]})]
    assert events == [1, 0, 1]


def test_what_is_read_for_another_prompt_or_by_chance_need_not_be_read_again():
    log = []

    class Generous(FakeMember):
        def read(self, needs, likely):
            super().read(needs, likely)
            return ["a", "b", "x"]

    member = Generous("A", log)
    Scheduler([member], [None], lambda ready: {}).run({0: prompt((0, "ab")), 1: prompt((0, "b"))})
    assert log == [("A", {0: ["a", "b"], 1: ["b"]})]


def test_the_member_goes_on_while_many_wait_for_it_then_the_most_wanted():
    prompts = {
        0: prompt((0, "a"), (0, "b"), (1, "c")),
        1: prompt((0, "d"), (1, "e")),
        2: prompt((0, "f"), (1, "g")),
    }
    assert run(prompts) == [
        ("A", {0: ["a"], 1: ["d"], 2: ["f"]}),
        # One of three waits for A, no more than 0.4 of them: B is next.
        ("B", {1: ["e"], 2: ["g"]}),
        ("A", {0: ["b"]}),
        ("B", {0: ["c"]}),
    ]


def test_in_turns_a_member_goes_on_until_no_prompt_waits_for_it():
    prompts = {
        0: prompt((0, "a"), (0, "b"), (0, "c"), (1, "d")),
        1: prompt((0, "e"), (1, "f")),
        2: prompt((0, "g"), (1, "h")),
    }
    log = []
    Scheduler([FakeMember("A", log), FakeMember("B", log)], [None, None], lambda ready: {}, is_in_turns=True).run(
        prompts
    )
    assert log == [
        ("A", {0: ["a"], 1: ["e"], 2: ["g"]}),
        ("A", {0: ["b"]}),
        ("A", {0: ["c"]}),
        ("B", {1: ["f"], 2: ["h"], 0: ["d"]}),
    ]


def test_a_member_for_which_half_of_them_wait_goes_on():
    prompts = {0: prompt((0, "a"), (0, "b")), 1: prompt((0, "d"), (1, "e"))}
    assert run(prompts) == [("A", {0: ["a"], 1: ["d"]}), ("A", {0: ["b"]}), ("B", {1: ["e"]})]


def test_a_later_member_goes_on_likewise():
    prompts = {0: prompt((1, "a"), (1, "b")), 1: prompt((1, "d"), (0, "e"))}
    assert run(prompts) == [("B", {0: ["a"], 1: ["d"]}), ("B", {0: ["b"]}), ("A", {1: ["e"]})]


def test_the_first_pass_is_the_most_wanted_members():
    assert run({0: prompt((1, "b")), 1: prompt((0, "a"))}) == [("A", {1: ["a"]}), ("B", {0: ["b"]})]  # of equals
    assert run({0: prompt((1, "a"))}) == [("B", {0: ["a"]})]
    # Two of three wait for B.
    prompts = {0: prompt((0, "a")), 1: prompt((1, "b")), 2: prompt((1, "c"))}
    assert run(prompts) == [("B", {1: ["b"], 2: ["c"]}), ("A", {0: ["a"]})]


def test_prompts_with_nothing_to_ask_are_done():
    done = []

    def silent():
        done.append(True)
        return
        yield

    assert run({0: silent(), 1: silent()}) == [] and done == [True, True]
    assert run({}) == []


def test_refill_is_called_before_each_pass():
    told, log = [], []
    members = [FakeMember("A", log), FakeMember("B", log, most=1)]
    prompts = {0: prompt((0, "a"), (1, "bc")), 1: prompt((0, "d")), 2: prompt((0, "e"), (1, "f"))}
    scheduler = Scheduler(members, [None, None], lambda ready: told.append((list(ready), len(log))) or {})
    scheduler.run(prompts)
    # Who has moved on, and how many passes had been run by then: at first all; of the second pass prompt 0 waits on for
    # its second node; and once more at the end.
    assert told == [([0, 1, 2], 0), ([0, 1, 2], 1), ([2], 2), ([0], 3)]


def test_the_prompts_of_the_pass_that_is_run_are_known():
    served = []

    class Watched(FakeMember):
        def read(self, needs, likely):
            served.append(scheduler.prompts_in_pass)
            return super().read(needs, likely)

    scheduler = Scheduler([Watched("A", []), Watched("B", [])], [None, None], lambda ready: {})
    assert scheduler.prompts_in_pass == []
    scheduler.run({4: prompt((0, "a"), (1, "b")), 7: prompt((0, "c"))})
    assert served == [[4, 7], [4]]


def test_what_is_useful_and_likely_goes_with_the_pass():
    def asks():
        yield ForwardRequest(0, ["a"], ("u", "v"))
        yield ForwardRequest(1, ["b"])

    members, likely = [FakeMember("A", []), FakeMember("B", [])], [lambda row: ["x"], lambda row: ["y"]]
    Scheduler(members, likely, lambda ready: {}).run({6: asks()})
    assert (members[0].useful, members[1].useful) == ({6: ["u", "v"]}, {6: []})
    assert [member.likely for member in members] == likely  # each its own


def test_an_error_of_a_member_comes_through():
    class Broken(FakeMember):
        def read(self, needs, likely):
            raise RuntimeError("no memory left")

    scheduler = Scheduler([Broken("A", [])], [None], lambda ready: {})
    with pytest.raises(RuntimeError, match="no memory left"):
        scheduler.run({2: prompt((0, "a"))})
    assert scheduler.prompts_in_pass == [2]


# Members that work at the same time


class Elsewhere(FakeMember):
    """A member in a place of its own. Its passes note when they begin and end; they end when `may_end` allows it."""

    def __init__(self, name, log, may_end=lambda: True, runs_elsewhere=True):
        super().__init__(name, log)
        self.may_end, self.runs_elsewhere, self.device_key = may_end, runs_elsewhere, name

    def begin_pass(self, needs, likely):
        def work():
            self.log.append(f"{self.name} begins")
            until(self.may_end)
            self.log.append(f"{self.name} ends")
            return [node for nodes, _ in needs.values() for node in nodes]

        return Pass(work, lambda result: result())


def num_passes(log, name):
    """The passes of a member here."""
    return sum(entry[0] == name for entry in log if not isinstance(entry, str))


@pytest.mark.parametrize("runs_elsewhere", [True, False])
def test_members_in_different_places_work_at_the_same_time(runs_elsewhere):
    log = []
    have_begun = lambda: {"A begins", "B begins"} <= set(log)  # noqa: E731
    members = [Elsewhere(name, log, have_begun, runs_elsewhere) for name in "AB"]
    Scheduler(members, [None, None], lambda ready: {}).run({0: prompt((0, "a")), 1: prompt((1, "b"))})
    assert sorted(log) == ["A begins", "A ends", "B begins", "B ends"]


def test_what_becomes_ready_while_a_server_works_goes_in_its_next_pass():
    """Prompt 0 is with A; prompts 1 and 2, which come from B meanwhile, are then together."""
    log, asked = [], []

    def asking(*requests):
        for member_index, nodes in requests:
            asked.append(nodes)
            yield from prompt((member_index, nodes))

    members = [Elsewhere("A", log, lambda: {"c", "f"} <= set(asked)), Elsewhere("B", log)]
    prompts = {0: prompt((0, "a")), 1: asking((1, "b"), (0, "c")), 2: asking((1, "d"), (1, "e"), (0, "f"))}
    Scheduler(members, [None, None], lambda ready: {}).run(prompts)
    assert [entry for entry in log if entry.startswith("A")] == ["A begins", "A ends"] * 2
    assert log.index("A ends") > log.index("B ends")


def test_a_member_here_goes_on_while_one_behind_a_server_works():
    log = []
    members = [FakeMember("A", log), Elsewhere("B", log, lambda: num_passes(log, "A") == 2)]
    prompts = {0: prompt((1, "b")), 1: prompt((0, "c"), (0, "d"), (1, "e"))}
    Scheduler(members, [None, None], lambda ready: {}).run(prompts)
    assert [entry if isinstance(entry, str) else entry[0] for entry in log if entry != "B begins"] == [
        "A", "A", "B ends", "B ends",
    ]  # fmt: skip


def test_parts_side_by_side_go_on_each_at_its_own_pace():
    log, made = [], []

    def part(*requests, returns):
        yield from prompt(*requests)
        return returns

    def whole():
        found = yield ParallelMembers([part((0, "a"), (0, "b"), (0, "c"), returns=1), part((1, "d"), returns=2)])
        made.append(found)
        made.append((yield ParallelMembers([part(returns=3), part((0, "e"), returns=4)])))
        yield ForwardRequest(0, ["f"])

    members = [FakeMember("A", log), Elsewhere("B", log, lambda: num_passes(log, "A") == 3)]
    Scheduler(members, [None, None], lambda ready: {}).run({0: whole()})
    assert made == [[1, 2], [3, 4]]
    passes = [entry[1][0] for entry in log if not isinstance(entry, str)]
    assert passes == [["a"], ["b"], ["c"], ["e"], ["f"]] and log.index("B ends") == 4  # A did not wait for B


def test_an_error_of_a_member_elsewhere_comes_through():
    class Broken(Elsewhere):
        def begin_pass(self, needs, likely):
            return Pass(lambda: 1 / 0, lambda result: result())

    members = [FakeMember("A", []), Broken("B", [])]
    scheduler = Scheduler(members, [None, None], lambda ready: {})
    with pytest.raises(ZeroDivisionError):
        scheduler.run({0: prompt((1, "a")), 3: prompt((0, "b"), (1, "c"))})
    assert scheduler.prompts_in_pass in ([0], [3])


def test_members_under_autocast_work_in_one_thread():
    here = SimpleNamespace(device=torch.device("cpu"), backend="its own")
    assert LocalMember.device_key.fget(here) == "cpu"
    with torch.autocast("cpu"):
        assert LocalMember.device_key.fget(here) == "this thread"
        assert ServedMember.device_key.fget(here) == "its own"


def test_side_by_side_where_it_is_less_waiting():
    assert not pays_side_by_side([[0.02, 0.02]], Policy)  # in one place nothing is gained
    assert pays_side_by_side([[0.05], [0.05]], Policy)
    assert pays_side_by_side([[0.05], [0.05], [0.05]], Policy)
    # A small member here is no wait worth naming before a large one that is asked in any case.
    assert not pays_side_by_side([[0.01], [0.5]], Policy)


def test_requests_of_one_member_go_together():
    def asks(*requests, returns):
        for nodes in requests:
            yield ForwardRequest(1, list(nodes), ("u",))
        return returns

    parts = [asks("ab", "c", returns="x"), asks("bd", returns="y"), asks(returns="z")]
    asked, returned = drain(merge_requests(1, parts))
    assert asked == [ForwardRequest(1, ["a", "b", "d"], ("u",)), ForwardRequest(1, ["c"], ("u",))]
    assert returned == ["x", "y", "z"]


# Requests


def drain(requests):
    """All that is asked for, and what is returned."""
    asked = []
    while True:
        try:
            asked.append(next(requests))
        except StopIteration as stop:
            return asked, stop.value


def test_with_sizes_counts_the_nodes_of_each_request():
    def asks():
        yield ForwardRequest(0, ["a", "b", "c"])
        yield ForwardRequest(1, ["d"], ("u", "v"))
        return "done"

    asked, returned = drain(with_sizes(asks()))
    assert asked == [ForwardRequest(0, ["a", "b", "c"]), ForwardRequest(1, ["d"], ("u", "v"))]
    assert returned == ("done", [3, 1])


def test_with_sizes_counts_before_the_request_is_served():
    requests = with_sizes(prompt((0, "abc"), (0, "d")))
    next(requests).nodes.clear()  # as the scheduler does, once they are read
    assert drain(requests) == ([ForwardRequest(0, ["d"])], (None, [3, 1]))


def test_with_sizes_of_nothing():
    assert drain(with_sizes(prompt())) == ([], (None, []))


def test_with_sizes_hands_an_error_on():
    def fails():
        yield ForwardRequest(0, ["a"])
        raise RuntimeError("it went wrong")

    requests = with_sizes(fails())
    next(requests)
    with pytest.raises(RuntimeError, match="it went wrong"):
        next(requests)


class Asking:
    """A member behind a server: a pass, or the prompts, take many requests, which `is_refused` lets go on."""

    runs_elsewhere, device_key, num_active = True, "there", 0

    def __init__(self):
        self.asked, self.is_refused, self.is_over = [], threading.Event(), threading.Event()

    def ask(self, number):
        self.asked.append(number)
        self.is_refused.wait(60)
        time.sleep(0.001)

    def read_prompts(self, number=0):
        try:
            return map_at_once(self.ask, range(100), 4)
        finally:
            self.is_over.set()

    def begin_pass(self, needs, likely):
        return Pass(self.read_prompts, lambda result: result())


class Failing:
    """A member here, which fails when the other one has asked."""

    runs_elsewhere, device_key, device, num_active = False, "here", torch.device("cpu"), 0

    def __init__(self, other, error):
        self.other, self.error = other, error

    def read_prompts(self, number=0):
        until(lambda: len(self.other.asked) == 4)
        raise self.error

    def begin_pass(self, needs, likely):
        return Pass(self.read_prompts, lambda result: result())


@pytest.mark.parametrize("error", [ValueError("enough"), KeyboardInterrupt("enough")])
@pytest.mark.parametrize(
    "work",
    [
        lambda members: Scheduler(members, [None] * 2, lambda ready: {}).run(
            {0: prompt((0, "a")), 1: prompt((1, "b"))}
        ),
        lambda members: BatchSlots(members, [None], None, None, False).fill(),
    ],
    ids=["passes", "prompts"],
)
def test_a_server_is_asked_nothing_more_after_an_error_of_another_member(error, work):
    served = Asking()
    members = [Failing(served, error), served]
    with pytest.raises(type(error), match="enough"):
        work(members)
    served.is_refused.set()
    until(served.is_over.is_set)
    assert len(served.asked) < 10
