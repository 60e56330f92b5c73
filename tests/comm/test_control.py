"""The control channel: values in rank order, failing together, and a clear error when a rank stays away."""

import time
from datetime import timedelta

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphfuse.comm.control import PeerFailed, control_channel
from graphfuse.errors import GroupError


def exchange_rank(group):
    channel = control_channel(group)
    assert control_channel(group) is channel
    with FakeTensorMode():  # compilers call from inside one
        return channel.exchange({"rank": channel.rank, "text": "x" * (1 + 1000 * channel.rank)})


def fail_on_last(group):
    channel = control_channel(group)
    started = time.monotonic()
    if channel.rank == channel.size - 1:
        seen = channel.fail("out of memory")
    else:
        try:
            channel.exchange("fine")
            seen = "nothing"
        except PeerFailed as failure:
            seen = str(failure)
    after = channel.exchange(channel.rank)  # all are in step again
    return seen, after, time.monotonic() - started


def time_out(group):
    channel = control_channel(group)
    if channel.rank == 1:
        time.sleep(3)
        return None
    started = time.monotonic()
    try:
        channel.exchange(None, timedelta(seconds=1))
    except GroupError as error:
        return str(error), time.monotonic() - started


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_values_arrive_in_rank_order(ranks, tp):
    for answer in ranks.run(tp, exchange_rank):
        assert [value["rank"] for value in answer] == list(range(tp))
        assert [len(value["text"]) for value in answer] == [1 + 1000 * rank for rank in range(tp)]


@pytest.mark.parametrize("tp", [2, 4])
def test_one_failure_reaches_every_rank_at_once_and_the_channel_stays_usable(ranks, tp):
    for seen, after, seconds in ranks.run(tp, fail_on_last):
        assert seen == f"rank {tp - 1}: out of memory"
        assert after == list(range(tp))
        assert seconds < 10


def test_a_rank_that_stays_away_is_an_error_with_what_to_do():
    from tests.distributed.pool import RankPool

    pool = RankPool()  # its own: the channel is of no use afterwards
    try:
        message, seconds = pool.run(2, time_out)[0]
    finally:
        pool.close()
    assert "did not answer within 1 s" in message
    assert "Look for the first error of the other ranks" in message
    assert seconds < 10


def test_torch_distributed_must_be_initialised():
    class Group:
        group_name = "nowhere"

    with pytest.raises(GroupError, match="No control channel could be made"):
        control_channel(Group())
    assert not torch.distributed.is_initialized()
