"""The lead of a step: on a fake device it takes the host's time out of the figures, exactly."""

from collections.abc import Callable

import pytest
import torch

from stepscope.core.run import Settings
from stepscope.recording import leads
from stepscope.recording.leads import Leads, LedCall, launches_hidden, median_call_s
from stepscope.recording.timer import Measurement, measure
from tests.conftest import FakeClock, FakeDevice

FIXED = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0)
ISSUE_S, OWN_S = 1.0, 0.25


def machine(fill_host_s: float = 0.001, fill_s: float = 0.01) -> tuple[FakeClock, FakeDevice, LedCall, Leads]:
    clock = FakeClock()
    device = FakeDevice(clock)

    def work(host_s: float, device_s: float) -> None:
        clock.pass_s(host_s)
        device.give(device_s)

    call = LedCall(lambda: work(ISSUE_S, OWN_S))
    return clock, device, call, Leads(device, lambda: work(fill_host_s, fill_s), clock)


def timed(clock: FakeClock, device: FakeDevice, call: LedCall) -> Measurement:
    return measure({"call": call}, device=device, settings=FIXED, clock=clock)["call"]


def test_without_a_lead_a_short_call_takes_as_long_as_its_launches():
    clock, device, call, _ = machine()
    found = timed(clock, device, call)
    assert found.samples["call"].values_s == pytest.approx([ISSUE_S + OWN_S] * 3)
    assert not launches_hidden(found)


def test_with_a_lead_it_takes_the_devices_own_time():
    clock, device, call, leads = machine()
    leads.give("call", call)
    found = timed(clock, device, call)
    assert found.samples["call"].values_s == pytest.approx([OWN_S] * 3)
    assert found.samples["lead"].median_s == pytest.approx(2 * ISSUE_S, rel=0.02)
    assert launches_hidden(found)


def test_a_lead_has_an_end_and_what_it_does_not_hide_is_said():
    """Fills too short for the host's time: as many as there may be."""
    clock, device, call, leads = machine(fill_host_s=0.0001, fill_s=0.001)
    leads.give("call", call)
    found = timed(clock, device, call)
    assert found.samples["lead"].median_s == pytest.approx(400 * 0.001, rel=0.02)
    assert not launches_hidden(found)


def test_a_second_lead_is_measured_without_the_first():
    clock, device, call, leads = machine()
    leads.give("call", call)
    before = call.lead
    leads.give("call", call)
    assert call.lead is not before
    assert timed(clock, device, call).samples["lead"].median_s == pytest.approx(2 * ISSUE_S, rel=0.02)


def test_a_call_on_a_cpu_has_its_time_and_its_errors():
    cpu = torch.device("cpu")
    ran: list[int] = []
    assert median_call_s(lambda: ran.append(1), cpu, FIXED) > 0
    assert len(ran) == 4

    def fails() -> None:
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        median_call_s(fails, cpu, FIXED)

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        median_call_s(stopped, cpu, FIXED)


def test_on_a_gpu_a_call_gets_a_lead(monkeypatch: pytest.MonkeyPatch):
    clock, device, call, _ = machine()

    def fill(_: torch.device) -> Callable[[], object]:
        return lambda: (clock.pass_s(0.001), device.give(0.01))

    monkeypatch.setattr(leads, "timing_device", lambda _: device)
    monkeypatch.setattr(leads, "overwrite_cache", fill)
    monkeypatch.setattr("stepscope.recording.timer.HostClock", lambda: clock)
    (run,) = [phase.run for phase in call.phases]
    assert median_call_s(run, torch.device("cuda", 0), FIXED) == pytest.approx(OWN_S)
