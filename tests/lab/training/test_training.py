"""The commands that train the small members: which processes they begin."""

from __future__ import annotations

import sys

from hf_adafuse.lab.training import demo_members


def test_a_member_that_is_named_twice_is_trained_once(monkeypatch, tmp_path):
    jobs = []
    monkeypatch.setattr(demo_members, "in_processes", jobs.extend)
    monkeypatch.setattr(sys, "argv", ["train", "--folder", str(tmp_path), "--members", "2", "0", "2", "0"])
    demo_members.main()
    assert [index for _, index, *_ in jobs] == [2, 0]
