import itertools

import pytest

from benchmarks import paired


def test_spread_of_known_ratios():
    spread = paired.spread([2.0, 4.0, 1.0, 3.0, 5.0])
    assert spread == paired.Spread(median=3.0, low=2.0, high=4.0)


@pytest.mark.parametrize(("ratios", "undecided"), [([0.9, 0.95, 1.1], True), ([0.5, 0.51, 0.52], False)])
def test_a_loss_within_its_range_is_undecided(ratios, undecided):
    assert paired.spread(ratios).undecided is undecided
    assert not paired.spread([1 / r for r in ratios if r < 1]).undecided  # a gain is never in doubt of being a loss


class Clockwork:
    """Steps that take a stated time on a clock of their own, and that record their order."""

    def __init__(self, **seconds):
        self.now, self.order = 0.0, []
        self.steps = {name: lambda name=name, each=each: self.step(name, next(each)) for name, each in seconds.items()}

    def step(self, name, seconds):
        self.order.append(name)
        self.now += seconds


def test_rounds_alternate_and_ratios_are_taken_inside_each():
    # the machine gets ten times slower from round to round: only ratios inside a round stay 2
    slow = Clockwork(a=iter([2.0, 2.0, 2.0, 20.0, 200.0]), b=iter([1.0, 1.0, 1.0, 10.0, 100.0]))
    timing = paired.measure(slow.steps, rounds=3, seconds=1e9, clock=lambda: slow.now)
    assert timing.speedup("b", "a") == paired.Spread(2.0, 2.0, 2.0)
    assert timing.rounds == 3  # two rounds of warm-up are not kept
    assert "".join(slow.order) == "abba" + "abbaab"  # order reversed every second round


def test_share_tells_that_others_ran():
    # two variants of 1 + 3 seconds with two threads could have used 8 processor seconds
    assert paired.Timing({"a": [0.5, 0.5], "b": [2.0, 1.0]}, processor=4.0).share(threads=2) == 0.5


def test_time_ends_a_measurement_before_its_rounds():
    slow = Clockwork(a=itertools.repeat(10.0))
    assert paired.measure(slow.steps, rounds=15, seconds=35, clock=lambda: slow.now).rounds == 4


def test_an_undecided_loss_is_measured_again_with_five_times_the_rounds(monkeypatch):
    asked = []

    def measured(steps, *, rounds, seconds):
        asked.append((sorted(steps), rounds, seconds))
        return paired.Timing({"dense": [1.0, 1.0, 1.0], "near": [1.02, 1.1, 0.9], "far": [2.0, 2.0, 2.0]})

    monkeypatch.setattr(paired, "measure", measured)
    steps = dict.fromkeys(("dense", "near", "far"), lambda: None)
    paired.compare(steps, "dense", rounds=3, seconds=7)
    # only the loss that is smaller than its range gets more rounds, beside its baseline
    assert asked == [(["dense", "far", "near"], 3, 7), (["dense", "near"], 15, 35)]
