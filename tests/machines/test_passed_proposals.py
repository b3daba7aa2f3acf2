"""An agent passes the leader's stored proposal on to workers as it was written, and reads its head alone."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.spec.plan import Plan

from elasticd.codec.decoding import tag_of
from elasticd.codec.message import encode
from elasticd.machines.agent.state import AgentSend, ProposalRead
from elasticd.records import PlanHead, Proposal, ProposalHead, Recovery, RecoveryHead, decode_proposal
from elasticd.wire.worker import PassedProposal, Propose, to_worker
from tests.machines.agent_scene import JOB, hello, proposal, run


def test_proposal_reaches_workers_as_the_leader_wrote_it_with_fields_of_a_newer_release() -> None:
    fields = msgspec.json.decode(msgspec.json.encode(proposal(2, {"n0/0": "i0"})))
    fields |= {"version": 2, "in_a_year": {"warm": [1, 2]}, "plan": {**fields["plan"], "later": "x"}}
    stored = msgspec.json.encode(fields)
    _, effects = run(hello(0), ProposalRead(job=JOB, proposal=decode_proposal(stored)))
    (order,) = [effect.body for effect in effects if isinstance(effect, AgentSend)]
    assert msgspec.json.decode(encode(order))["proposal"] == fields
    assert isinstance(to_worker(encode(order)), Propose)


@pytest.mark.parametrize("wrong", [b"{", b"\xff", b"[" * 10_000, b'"a\x80b"', b"", b"1 2"])
def test_bytes_that_no_worker_could_read_are_not_passed_on(wrong: bytes) -> None:
    stored = msgspec.json.encode(proposal(2, {"n0/0": "i0"}))
    for data in (wrong, stored[:-1] + b',"more":' + wrong + b"}", b'{"type":"proposal"}'):
        with pytest.raises(msgspec.DecodeError):
            decode_proposal(data)


def test_head_of_a_proposal_has_fields_of_the_proposal_alone() -> None:
    for head, record in ((ProposalHead, Proposal), (PlanHead, Plan), (RecoveryHead, Recovery)):
        fields = {field.name: field for field in msgspec.structs.fields(record)}
        for field in msgspec.structs.fields(head):
            of_record = fields[field.name]
            assert (field.encode_name, field.default) == (of_record.encode_name, of_record.default)
    assert tag_of(ProposalHead) == tag_of(Proposal)
    assert tag_of(PassedProposal) == tag_of(Propose)
