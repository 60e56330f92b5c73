"""What a rank concludes from what it knows of the others: who is gone, who failed, who is late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from graphfuse.comm.peers import DIFFERENCE_AFTER, SILENCE, Beat, Call, Peer, Place, late, trouble

NOW = 1000.0
HERE = Call(7, "forward", "[1, 5]")


def peer(rank=1, call=HERE, there=True, **beat):
    known = Peer(rank, Place("host", 4711, 1), call=call, in_sight=True, there=there)
    known.hear(Beat(**{"count": 1, "failures": 0, **beat}), NOW)
    return known


def concluded(*peers, mine=HERE, failures=0, now=NOW, waited=0.0):
    found = trouble(0, mine, failures, {p.rank: p for p in peers}, now, waited)
    return None if found is None else found.message


def test_ranks_that_are_there_are_waited_for_wherever_they_are():
    assert concluded(peer(), peer(2, Call(3, "forward")), peer(3, Call()), Peer(4)) is None


def test_a_process_that_is_gone_is_named_with_its_last_call():
    message = concluded(peer(), peer(2, Call(6, "decode", "[4, 1]"), there=False))
    assert message.startswith("Rank 2 (process 4711) is gone without an error, last in call 6 (decode of [4, 1]).")


def test_several_that_are_gone_are_all_named():
    message = concluded(peer(1, there=False), peer(3, there=False))
    assert "Rank 1 (process 4711) is gone" in message and "rank 3 (process 4711) is gone" in message


def test_other_shapes_in_the_same_call_explain_why_a_rank_is_gone():
    message = concluded(peer(call=Call(7, "forward", "[1, 9]"), there=False))
    assert message.startswith("The ranks gave different shapes in call 7 (forward): [1, 5] on rank 0, [1, 9] on rank 1")


def test_other_shapes_of_a_rank_that_is_there_explain_a_call_that_does_not_end():
    other = peer(call=Call(7, "forward", "[1, 9]"))
    assert concluded(other, waited=DIFFERENCE_AFTER) is None
    message = concluded(other, waited=DIFFERENCE_AFTER + 1)
    assert message.endswith("[1, 9] on rank 1. Give every rank inputs of the same shapes.")
    assert concluded(peer(), peer(2, Call(6, "forward", "[1, 9]")), waited=100) is None


def test_other_shapes_in_another_call_explain_nothing():
    assert "is gone" in concluded(peer(call=Call(6, "forward", "[1, 9]"), there=False))


def test_a_failure_is_told_with_its_error():
    message = concluded(peer(failures=1, failure="OutOfMemoryError: CUDA out of memory."))
    assert message == (
        "Rank 1 failed in call 7 (forward of [1, 5]): OutOfMemoryError: CUDA out of memory. See the error there first."
    )


def test_a_failure_that_this_rank_had_too_is_no_reason_to_stop():
    assert concluded(peer(failures=1, failure="TypeError: no"), failures=1) is None


def test_a_rank_that_failed_and_goes_on_is_waited_for():
    assert concluded(peer(failures=1, failure=None)) is None


def test_the_first_cause_comes_before_errors_about_others():
    first, second = peer(1, failures=1, failure="GroupError: Rank 2 …"), peer(2, failures=1, failure="MemoryError")
    assert concluded(first, second).startswith("Rank 2 failed")
    assert concluded(first, peer(3, there=False)).startswith("Rank 3 (process 4711) is gone")


def test_a_rank_that_ended_its_program_is_no_crash():
    message = concluded(peer(there=False, left=True), mine=Call(8, "forward"))
    assert message.startswith("Rank 1 ended the program after call 7, and this rank waits in call 8 (forward).")


def test_silence_counts_only_where_the_process_cannot_be_looked_at():
    seen, elsewhere = peer(), peer()
    elsewhere.in_sight = False
    later = NOW + SILENCE + 1
    assert concluded(seen, now=later) is None
    assert "Rank 1 (process 4711) is gone" in concluded(elsewhere, now=later)
    elsewhere.hear(Beat(2, 0), later - 1)
    assert concluded(elsewhere, now=later) is None


def test_late_ranks_are_those_that_have_not_come_to_the_call():
    message = late(HERE, {1: peer(), 2: peer(2, Call(6, "decode", "[4, 1]")), 3: Peer(3)}, 31.2)
    assert message.startswith(
        "Ranks 2, 3 did not come to call 7 (forward of [1, 5]) within 31 s: rank 2 (process 4711)"
    )
    assert "is at call 6 (decode of [4, 1])" in message
    assert "rank 3 has not begun to trace or to generate" in message
    assert late(HERE, {1: peer()}, 31.2) is None


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_there_until_it_ends_and_a_zombie_is_not(child):
    known = Peer(1, Place("host", child.pid, started=_started(child.pid)))
    known.look("host")
    assert known.in_sight and known.there
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    known.look("host")
    assert not known.there


def test_another_process_under_the_same_number_is_not_the_rank(child):
    known = Peer(1)
    known.place = Place("host", child.pid, started=_started(child.pid) - 1)
    known.look("host")
    assert not known.there


def test_a_process_that_nobody_ever_saw_is_gone_and_one_of_another_host_is_not_looked_for():
    near, elsewhere = Peer(1, Place("host", 1 << 22, 1)), Peer(2, Place("other", 1 << 22, 1))
    for known in (near, elsewhere):
        known.look("host")
    assert not near.there
    assert elsewhere.there and not elsewhere.in_sight


def test_this_process_is_there():
    here = Place.here("host")
    assert here.pid == os.getpid() and here.started > 0 and here.is_there()


def _started(pid: int) -> int:
    from graphfuse.comm.peers import _stat

    return _stat(pid)[1]
