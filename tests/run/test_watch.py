"""Hangs: who is missed, when, and how long a step may take."""

from __future__ import annotations

import math
from collections import deque

from ds_sft.run import watch
from ds_sft.run.watch import Peers, step_limit


def test_a_peer_is_missed_within_a_minute() -> None:
    # Its last beat may be just before its end, and be read just before our next look.
    assert watch.SILENT_SECONDS + 2 * watch.BEAT_SECONDS < 60


def heard(peers: Peers, beats: list[str], now: float) -> str:
    peers.hear(beats, now)
    return peers.problem(now)


def test_a_rank_whose_beat_goes_on_is_alive_however_long_it_takes() -> None:
    peers = Peers(0, 2, now=0.0)
    for second in range(0, 1000, 5):
        assert heard(peers, ["1", str(second)], now=float(second)) == ""


def test_a_rank_whose_beat_stands_still_is_missed_and_named() -> None:
    peers = Peers(0, 3, now=0.0)
    assert heard(peers, ["1", "7", "7"], now=1.0) == ""
    assert heard(peers, ["2", "8", "7"], now=45.0) == ""
    assert heard(peers, ["3", "9", "7"], now=46.0) == "rank 2 has been silent for 45 s"


def test_a_store_that_does_not_answer_is_its_hosts_silence() -> None:
    """Rank 0 keeps it; whoever waits for its answer hears nothing from anybody."""
    peers = Peers(1, 2, now=0.0)
    assert heard(peers, ["5", "5"], now=1.0) == ""
    assert peers.problem(now=45.0) == ""
    assert peers.problem(now=47.0) == "rank 0 has been silent for 46 s"


def test_who_was_stopped_itself_counts_silence_anew() -> None:
    peers = Peers(0, 2, now=0.0)
    peers.forgive(now=500.0)
    assert peers.problem(now=544.0) == ""
    assert peers.problem(now=546.0) == "rank 1 has been silent for 46 s"


def test_its_own_silence_is_nobodys_news() -> None:
    peers = Peers(1, 2, now=0.0)
    for second in (0.0, 40.0, 80.0):
        assert heard(peers, [str(second), "same"], now=second) == ""


def test_a_rank_that_left_in_order_is_never_missed() -> None:
    peers = Peers(0, 2, now=0.0)
    assert heard(peers, ["1", watch.DONE], now=1.0) == ""
    assert heard(peers, ["2", watch.DONE], now=1e6) == ""


def test_a_failed_rank_gives_the_others_time_to_fail_by_themselves() -> None:
    peers = Peers(0, 2, now=0.0)
    assert heard(peers, ["1", watch.FAILED], now=1.0) == ""
    assert heard(peers, ["2", watch.FAILED], now=12.0) == "rank 1 has failed"


def test_a_step_may_take_ten_times_the_median_and_at_least_half_an_hour() -> None:
    assert step_limit(0, deque()) == math.inf
    assert step_limit(0, deque([1.0, 2.0, 90.0])) == 30 * 60
    assert step_limit(0, deque([600.0, 700.0, 9000.0])) == 7000
    assert step_limit(2.5, deque([600.0])) == 150


def test_the_stacks_are_one_text_that_names_who_waits() -> None:
    assert "in test_the_stacks_are_one_text_that_names_who_waits" in watch.stacks()
