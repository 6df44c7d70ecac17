"""Beam search as a pure function: which candidates go on, which end, and when it is over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from engine.interface.request import EarlyStopping
from engine.scheduling.search import BeamSearch, BeamStep, Hypothesis, sample, settled_lengths

EOS = 0


def rules(
    num_beams: int = 2,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    stop_ids: frozenset[int] = frozenset({EOS}),
    max_tokens: int = 100,
) -> BeamSearch:
    return BeamSearch(num_beams, length_penalty, early_stopping, stop_ids, max_tokens)


def advance(
    beam: BeamSearch,
    rows: Sequence[Sequence[tuple[int, float]]],
    *,
    scores: Sequence[float] | None = None,
    length: int = 4,
    kept: Sequence[float] = (),
) -> BeamStep:
    """One step; rows hold (token, log-probability) pairs, best first."""
    hypotheses = [Hypothesis((9,) * 4, score, score * 4, False) for score in kept]
    return beam.advance(
        [0.0] * len(rows) if scores is None else scores,
        length,
        hypotheses,
        np.array([[token for token, _ in row] for row in rows], dtype=np.int32),
        np.array([[logprob for _, logprob in row] for row in rows], dtype=np.float32),
    )


def going_on(step: BeamStep) -> list[tuple[int, int]]:
    return [(continuation.parent, continuation.token) for continuation in step.live]


class TestCandidates:
    @pytest.mark.parametrize(("stops", "factor"), [((), 2), ((0,), 2), ((0, 1), 3), ((0, 1, 2), 4)])
    def test_enough_are_asked_for_to_leave_num_beams_alive(self, stops: tuple[int, ...], factor: int) -> None:
        assert rules(3, stop_ids=frozenset(stops)).num_candidates == 3 * factor

    def test_the_best_over_all_beams_go_on_best_first(self) -> None:
        rows = [[(1, -1.0), (2, -3.0), (3, -9.0), (4, -9.0)], [(5, -0.5), (6, -2.0), (7, -9.0), (8, -9.0)]]
        step = advance(rules(3, stop_ids=frozenset()), rows)
        assert going_on(step) == [(1, 5), (0, 1), (1, 6)]
        assert [c.score for c in step.live] == [-0.5, -1.0, -2.0]
        assert [c.column for c in step.live] == [0, 0, 1]
        assert not step.done

    def test_beam_scores_are_added(self) -> None:
        rows = [[(1, -1.0), (2, -2.0), (3, -9.0), (4, -9.0)]] * 2
        step = advance(rules(), rows, scores=[-5.0, -0.25])
        assert going_on(step) == [(1, 1), (1, 2)]
        assert [c.score for c in step.live] == [-1.25, -2.25]

    def test_equal_scores_keep_the_order_of_beams(self) -> None:
        rows = [[(1, -1.0), (2, -1.0), (3, -1.0), (4, -1.0)]] * 2
        assert going_on(advance(rules(), rows)) == [(0, 1), (0, 2)]

    def test_columns_that_wider_neighbours_brought_are_not_looked_at(self) -> None:
        rows = [[(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, 99.0), (6, 99.0)]]
        assert going_on(advance(rules(2), rows)) == [(0, 1), (0, 2)]

    def test_impossible_candidates_do_not_go_on(self) -> None:
        rows = [[(1, -1.0), (2, -math.inf), (3, -math.inf), (4, -math.inf)]]
        assert going_on(advance(rules(), rows)) == [(0, 1)]

    def test_when_nothing_is_possible_it_is_over(self) -> None:
        step = advance(rules(), [[(1, -math.inf)] * 4])
        assert (step.live, step.endings, step.done) == ((), (), True)


class TestEndings:
    def test_an_ending_within_the_first_num_beams_is_kept(self) -> None:
        step = advance(rules(), [[(1, -0.5), (EOS, -1.0), (2, -1.5), (3, -2.0)]])
        assert going_on(step) == [(0, 1), (0, 2)]
        (ending,) = step.endings
        assert ending.continuation.token == EOS
        assert ending.continuation.score == -1.0
        assert not ending.by_length

    def test_an_ending_beyond_them_is_dropped(self) -> None:
        step = advance(rules(), [[(1, -0.5), (2, -1.0), (EOS, -1.5), (3, -2.0)]])
        assert going_on(step) == [(0, 1), (0, 2)]
        assert step.endings == ()

    def test_its_length_counts_the_ending_token(self) -> None:
        step = advance(rules(length_penalty=2.0), [[(EOS, -10.0), (1, -11.0), (2, -12.0), (3, -13.0)]], length=4)
        assert step.endings[0].score == pytest.approx(-10.0 / 5**2)

    def test_several_stop_ids_all_end(self) -> None:
        beam = rules(2, early_stopping="never", stop_ids=frozenset({0, 1}))
        step = advance(beam, [[(0, -0.1), (1, -0.2), (2, -0.3), (3, -0.4), (4, -0.5), (5, -0.6)]])
        assert [ending.continuation.token for ending in step.endings] == [0, 1]
        assert going_on(step) == [(0, 2), (0, 3)]

    def test_at_max_tokens_every_candidate_ends(self) -> None:
        row = [(1, -0.5), (EOS, -1.0), (2, -1.5), (3, -2.0)]
        step = advance(rules(max_tokens=5), [row], length=4)
        assert step.done
        assert step.live == ()
        assert [(e.continuation.token, e.by_length) for e in step.endings] == [(1, True), (EOS, False)]
        assert not advance(rules(max_tokens=6), [row], length=4).done


class TestTheEnd:
    """best live -8 at length 5; two kept hypotheses."""

    ROW = ((1, -8.0), (2, -8.5), (3, -9.0), (4, -9.5))

    @pytest.mark.parametrize(
        ("early_stopping", "length_penalty", "worst", "done"),
        [
            # True: enough hypotheses are enough, however bad they are
            (True, 1.0, -100.0, True),
            # False: compare with the best live beam at its present length: -8 / 5 = -1.6
            (False, 1.0, -1.5, True),
            (False, 1.0, -1.7, False),
            # "never", positive penalty: at the greatest length it might reach: -8 / 20 = -0.4
            ("never", 1.0, -1.5, False),
            ("never", 1.0, -0.5, False),
            ("never", 1.0, -0.3, True),
            # "never", otherwise longer is never better: as False
            ("never", 0.0, -7.9, True),
            ("never", 0.0, -8.1, False),
            (False, 0.0, -7.9, True),
            (False, 0.0, -8.1, False),
            ("never", -1.0, -39.0, True),  # -8 * 5 = -40
            ("never", -1.0, -41.0, False),
            (False, -1.0, -39.0, True),
            (False, -1.0, -41.0, False),
        ],
    )
    def test_when_the_live_cannot_beat_the_kept(
        self, early_stopping: EarlyStopping, length_penalty: float, worst: float, done: bool
    ) -> None:
        beam = rules(2, length_penalty, early_stopping, max_tokens=20)
        assert advance(beam, [self.ROW], length=4, kept=[-0.1, worst]).done is done

    @pytest.mark.parametrize("early_stopping", [True, False, "never"])
    def test_never_before_num_beams_hypotheses_are_kept(self, early_stopping: EarlyStopping) -> None:
        assert not advance(rules(2, 1.0, early_stopping), [self.ROW], kept=[-0.0001]).done

    def test_equality_is_no_improvement(self) -> None:
        assert advance(rules(2), [self.ROW], length=4, kept=[-0.1, -1.6]).done

    def test_this_step_s_endings_count(self) -> None:
        row = [(EOS, -0.1), (1, -8.0), (2, -8.5), (3, -9.0)]
        assert advance(rules(2), [row], length=4, kept=[-1.0]).done
        assert advance(rules(2, early_stopping=True), [row], length=4, kept=[-100.0]).done

    def test_the_comparison_is_with_the_num_beams_th_best(self) -> None:
        """A new ending pushes the worst one out before the comparison."""
        row = [(EOS, -0.5), (1, -8.0), (2, -8.5), (3, -9.0)]
        assert not advance(rules(2), [self.ROW], length=4, kept=[-0.1, -50.0]).done
        assert advance(rules(2), [row], length=4, kept=[-0.1, -50.0]).done

    def test_over_is_over(self) -> None:
        """The stop is sticky: what is live at that moment is gone, even where it would look better later."""
        step = advance(rules(2, length_penalty=2.0), [self.ROW], length=4, kept=[-0.01, -0.02])
        assert step.done
        assert step.live == ()


class TestScores:
    def test_merging_keeps_the_best_and_prefers_earlier_ones(self) -> None:
        first, second = Hypothesis((1,), -1.0, -1.0, False), Hypothesis((2,), -2.0, -2.0, False)
        equal, better = Hypothesis((3,), -1.0, -1.0, False), Hypothesis((4,), -0.5, -0.5, False)
        assert rules(2).merge([first, second], [equal, better]) == [better, first]
        assert rules(3).merge([first, second], [equal, better]) == [better, first, equal]

    @pytest.mark.parametrize(("penalty", "expected"), [(0.0, -6.0), (1.0, -2.0), (2.0, -2.0 / 3), (-1.0, -18.0)])
    def test_length_penalty(self, penalty: float, expected: float) -> None:
        assert rules(length_penalty=penalty).final_score(-6.0, 3) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("penalty", [-1e308, -1e4, 1e4, 1e308])
    @pytest.mark.parametrize("total", [-50.0, 0.0])
    def test_absurd_length_penalties_stay_numbers(self, penalty: float, total: float) -> None:
        """A request may ask for them; the search must neither fail nor yield NaN."""
        score = rules(length_penalty=penalty).final_score(total, 1000)
        assert not math.isnan(score)
        assert score <= 0.0
        row = [(1, -0.5), (EOS, -1.0), (2, -1.5), (3, -2.0)]
        for early_stopping in (True, False, "never"):
            advance(rules(2, penalty, early_stopping), [row], length=999, kept=[-1.0])


class TestSampling:
    def test_each_sequence_is_its_own_parent(self) -> None:
        tokens = np.array([[5, 0], [6, 0]], dtype=np.int32)
        logprobs = np.array([[-1.0, 0.0], [-2.0, 0.0]], dtype=np.float32)
        children = sample([-10.0, -20.0], tokens, logprobs, 1)
        assert [(c.parent, c.token, c.score, c.column) for c in children] == [(0, 5, -11.0, 0), (1, 6, -22.0, 0)]

    def test_the_prompt_s_row_has_all_draws(self) -> None:
        tokens = np.array([[5, 6, 5]], dtype=np.int32)
        children = sample([0.0], tokens, np.array([[-1.0, -2.0, -1.0]], dtype=np.float32), 3)
        assert [(c.parent, c.token, c.score, c.column) for c in children] == [
            (0, 5, -1.0, 0),
            (0, 6, -2.0, 1),
            (0, 5, -1.0, 2),
        ]


class TestSettledPrefix:
    def test_it_is_what_all_live_beams_share(self) -> None:
        assert settled_lengths([[1, 2, 3], [1, 2, 4]], [], [0]) == [2]

    def test_one_live_beam_settles_everything(self) -> None:
        assert settled_lengths([[1, 2, 3]], [], [0]) == [3]

    def test_kept_ones_ranked_at_or_above_hold_it_back(self) -> None:
        live, kept = [[1, 2, 3, 4], [1, 2, 3, 5]], [[1, 2, 9], [7]]
        assert settled_lengths(live, kept, [0, 0]) == [2, 0]

    def test_a_short_hypothesis_limits_the_length(self) -> None:
        assert settled_lengths([[1, 2, 3]], [[1, 2]], [0]) == [2]

    def test_what_was_settled_stays_so(self) -> None:
        assert settled_lengths([[1, 2, 3], [1, 2, 4]], [], [1, 2]) == [2, 2]
