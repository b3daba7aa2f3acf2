"""What every transport must do: checks that all ranks of one run at the same time."""

from collections.abc import Callable
from functools import partial

import torch
from elasticd_migration.transport import Transport

Check = Callable[[Transport], None]


def neighbours(transport: Transport) -> tuple[int, int]:
    """The ranks before and after this one in a ring."""
    return (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size


def members_are_known_by_rank(transport: Transport) -> None:
    assert transport.size == len(transport.members) == len(set(transport.members))
    assert 0 <= transport.rank < transport.size


def messages_of_a_channel_arrive_in_order(transport: Transport) -> None:
    before, after = neighbours(transport)
    for i in range(20):
        transport.send(after, torch.full((3,), 100 * transport.rank + i))
    for i in range(20):
        into = torch.empty(3, dtype=torch.int64)
        transport.receive(before, into).wait()
        assert into.tolist() == [100 * before + i] * 3


def receives_take_messages_in_the_order_of_posting(transport: Transport) -> None:
    before, after = neighbours(transport)
    into = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    handles = [transport.receive(before, tensor) for tensor in into]
    for i in range(3):
        transport.send(after, torch.tensor([i]))
    for handle in reversed(handles):
        handle.wait()
    assert [int(tensor) for tensor in into] == [0, 1, 2]


def channels_are_apart(transport: Transport) -> None:
    before, after = neighbours(transport)
    for channel in (0, 1, 2):
        transport.send(after, torch.tensor([channel]), channel=channel)
    for channel in (2, 0, 1):
        into = torch.empty(1, dtype=torch.int64)
        transport.receive(before, into, channel=channel).wait()
        assert int(into) == channel


def every_dtype_and_size_arrives_as_it_was(transport: Transport) -> None:
    before, after = neighbours(transport)
    sent = [
        torch.arange(7).to(torch.bfloat16),
        torch.arange(6).reshape(2, 3).to(torch.float8_e4m3fn),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.arange(1 << 20, dtype=torch.float32),
        torch.arange(24).reshape(6, 4)[2:5],
        torch.arange(5.0).to(torch.complex64),
    ]
    into = [torch.empty_like(tensor) for tensor in sent]
    handles = [transport.receive(before, tensor) for tensor in into]
    for tensor in sent:
        transport.send(after, tensor)
    for handle, tensor, expected in zip(handles, into, sent, strict=True):
        handle.wait()
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def many_large_messages_pass_both_ways_at_once(transport: Transport) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    into = {rank: [torch.empty(1 << 18) for _ in range(8)] for rank in others}
    for i in range(8):
        for rank in others:
            transport.send(rank, torch.full((1 << 18,), float(transport.rank + i)))
    for rank in others:
        for i, tensor in enumerate(into[rank]):
            transport.receive(rank, tensor).wait()
            assert bool((tensor == rank + i).all())


def messages_of_rounds_arrive_side_by_side_beside_words(transport: Transport) -> None:
    """Two rounds are begun before the first is waited for, as a move does."""
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    before, after = neighbours(transport)
    place, start = transport.device, transport.bytes_sent
    turns = [(turn, rank) for turn in range(2) for rank in others]
    into = {(turn, rank): [torch.empty(5 + turn, device=place) for _ in range(2)] for turn, rank in turns}
    begun = []
    for turn in range(2):
        sends = [
            (rank, torch.full((5 + turn,), 100.0 * transport.rank + 10 * turn + number, device=place))
            for rank in others
            for number in range(2)
        ]
        begun.append(transport.round(sends, [(rank, tensor) for rank in others for tensor in into[turn, rank]]))
        transport.send(after, torch.tensor([turn]), channel=2)
    for turn, (tickets, handles) in enumerate(begun):
        assert len(set(tickets)) == len(handles) == 2 * len(others)
        for handle in reversed(handles):
            handle.wait()
        word = torch.empty(1, dtype=torch.int64)
        transport.receive(before, word, channel=2).wait()
        assert int(word) == turn
        for rank in others:
            for number, tensor in enumerate(into[turn, rank]):
                assert tensor.tolist() == [100.0 * rank + 10 * turn + number] * (5 + turn)
    assert transport.bytes_sent - start == len(others) * 2 * 4 * (5 + 6) + 2 * 8
    transport.all_gather(b"received")
    transport.drain(begun[0][0])
    transport.drain()


def a_rank_may_have_nothing_in_a_round(transport: Transport) -> None:
    value = torch.arange(3.0, device=transport.device)
    into = torch.empty(3, device=transport.device)
    sends = [(1, value)] if transport.rank == 0 else []
    receives = [(0, into)] if transport.rank == 1 else []
    _, handles = transport.round(sends, receives)
    for handle in handles:
        handle.wait()
        assert into.tolist() == [0, 1, 2]
    transport.all_gather(b"received")
    transport.drain()


def payloads_of_any_length_are_gathered_in_rank_order(transport: Transport) -> None:
    for length in (0, 1, 1000, 4095, 4096, 4097, 10_000):
        wanted = [bytes((rank + i) % 251 for i in range(length * rank)) for rank in range(transport.size)]
        assert transport.all_gather(wanted[transport.rank]) == wanted


def bytes_are_counted_where_they_are_sent(transport: Transport) -> None:
    before, after = neighbours(transport)
    start = transport.bytes_sent
    transport.send(after, torch.zeros(5, dtype=torch.float64))
    transport.send(after, torch.zeros(3, dtype=torch.bfloat16), channel=1)
    assert transport.bytes_sent - start == 46
    transport.receive(before, torch.empty(5, dtype=torch.float64)).wait()
    transport.receive(before, torch.empty(3, dtype=torch.bfloat16), channel=1).wait()
    transport.all_gather(b"x" * 100)
    assert transport.bytes_sent - start == 46


def draining_after_proof_of_receipt_loses_nothing(transport: Transport) -> None:
    before, after = neighbours(transport)
    tickets = [transport.send(after, torch.full((1000,), i)) for i in range(4)]
    assert len(set(tickets)) == 4
    into = [torch.empty(1000, dtype=torch.int64) for _ in range(4)]
    for tensor in into:
        transport.receive(before, tensor).wait()
    transport.all_gather(b"received")
    transport.drain(tickets[:2])
    transport.drain()
    transport.drain(tickets)
    assert [int(tensor[0]) for tensor in into] == [0, 1, 2, 3]


def what_cannot_be_sent_is_refused(transport: Transport) -> None:
    _, after = neighbours(transport)
    attempts: list[Callable[[], object]] = [
        partial(transport.send, transport.rank, torch.zeros(1)),
        partial(transport.receive, transport.rank, torch.zeros(1)),
        partial(transport.send, transport.size, torch.zeros(1)),
        partial(transport.send, after, torch.zeros(4, 4)[:, 1]),
        partial(transport.receive, after, torch.zeros(4, 4)[:, 1]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except ValueError:
            continue
        raise AssertionError(f"{attempt} was not refused")


CHECKS: tuple[Check, ...] = (
    members_are_known_by_rank,
    messages_of_a_channel_arrive_in_order,
    receives_take_messages_in_the_order_of_posting,
    channels_are_apart,
    every_dtype_and_size_arrives_as_it_was,
    many_large_messages_pass_both_ways_at_once,
    messages_of_rounds_arrive_side_by_side_beside_words,
    a_rank_may_have_nothing_in_a_round,
    payloads_of_any_length_are_gathered_in_rank_order,
    bytes_are_counted_where_they_are_sent,
    draining_after_proof_of_receipt_loses_nothing,
    what_cannot_be_sent_is_refused,
)
