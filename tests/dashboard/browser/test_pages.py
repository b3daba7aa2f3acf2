"""The pages over a real job: what is slow, replanned, killed or away is shown without a reload; who may act."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from click.testing import CliRunner

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from playwright.sync_api import Browser, expect

from elasticd.cli.app import elasticd
from elasticd.client import ApiClient
from elasticd.testing.waiting import until
from elasticd.wire.node_health import DeviceHealth
from tests.dashboard.browser.pages import Person, figure
from tests.dashboard.browser.stage import JOB, OPERATOR, VIEWER, Stage

#: How many times slower a device is made: on a busy machine much of an emulated slowness is lost.
SLOW = 8.0
OVER, FAILED = "old", "plain"
PAGES = (
    "/",
    "/jobs",
    f"/jobs/{JOB}",
    f"/jobs/{FAILED}",
    f"/jobs/{JOB}/plans/1",
    f"/jobs/{JOB}/switch",
    "/devices/alpha/1",
    "/events",
    "/act",
)


@pytest.fixture(scope="module")
def stage(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage"), coordinators=2) as made:
        made.start_job_that_is_over(OVER)
        made.fail_in_restart_mode(FAILED)
        made.start_job()
        yield made


@pytest.fixture
def alice(browser: Browser, stage: Stage) -> Iterator[Person]:
    """An operator, when no device is slow."""
    if stage.asked(lambda api: any(d.pace > 1 for n in api.status().nodes for d in n.devices)):
        before = settled(stage)
        stage.chaos(lambda chaos: chaos.recover("alpha/1"))
        settled(stage, before)
    with Person(browser, stage.url) as person:
        person.sign_in(OPERATOR)
        yield person


def plan_number(api: ApiClient) -> int:
    found = api.status().job(JOB)
    return found.plan.number if found is not None and found.plan is not None else 0


def settled(stage: Stage, above: int = 0) -> int:
    """Waits until the job trains under a plan above this one; its number."""

    def trains() -> int:
        found = stage.job()
        ready = (
            found is not None and found.phase == "running" and found.proposal is None and found.plan is not None
        )
        return found.plan.number if ready and found.plan.number > above else 0  # type: ignore[union-attr]

    return until(trains, lambda: stage.asked(lambda api: [event.text for event in api.events()])[-12:])


@pytest.mark.slow
@pytest.mark.full
def test_keyboard_alone_drains_a_node_and_takes_it_back(alice: Person, stage: Stage) -> None:
    settled(stage)
    keys = alice.page.keyboard
    alice.to("link", "Act")
    keys.press("Enter")
    expect(alice.page.get_by_role("heading", level=1)).to_have_text("Act")
    alice.to("combobox", "node")
    keys.press("b")  # beta, by its first letter
    alice.to("button", "Drain")
    keys.press("Enter")
    expect(alice.page.get_by_text("Done: elasticd drain beta")).to_be_visible()
    until(lambda: stage.asked(lambda api: all(n.draining == (n.node == "beta") for n in api.status().nodes)))
    alice.go("/")
    expect(alice.row("node beta")).to_contain_text("drain")
    (told,) = [each for each in stage.asked(lambda api: api.events()) if each.kind == "drained"][-1:]
    assert told.data["draining"]
    until(lambda: stage.asked(lambda api: next(n.members for n in api.status().nodes if n.node == "beta") == 0))
    stage.asked(lambda api: api.drain("beta", on=False))
    expect(alice.row("node beta")).to_have_count(0)


@pytest.mark.slow
@pytest.mark.full
def test_killed_worker_is_a_fault_a_recovery_and_steps_that_go_on(alice: Person, stage: Stage) -> None:
    number, page = settled(stage), alice.page
    alice.go(f"/jobs/{JOB}")
    expect(page.locator("ed-chart canvas").first).to_be_visible()
    found = stage.job()
    assert found is not None
    victim = next(member for member in found.members if member.device == "beta/1")
    stage.chaos(lambda chaos: chaos.kill("beta/1"))
    alice.go("/events")
    lost = page.locator(".events > li").filter(has_text=f"{victim.device}").filter(has_text="worker lost")
    expect(lost.first).to_be_visible()
    after = settled(stage, number)
    alice.go(f"/jobs/{JOB}")
    plan = page.locator("xpath=//dt[normalize-space()='plan']/following-sibling::dd[1]")
    expect(plan).to_have_text(str(after))
    expect(page.get_by_label("Marks")).to_contain_text("✕")
    step = figure(page.locator(".facts dd").first.inner_text())
    until(lambda: figure(page.locator(".facts dd").first.inner_text()) > step + 3)
    expect(page.get_by_role("row").filter(has_text="recovery")).to_be_visible()
    assert not alice.reloaded


@pytest.mark.slow
@pytest.mark.full
def test_leader_that_is_killed_costs_no_event_no_history_and_no_reload(alice: Person, stage: Stage) -> None:
    """A banner says so meanwhile; the next leader's events follow those of the one before, each once."""
    settled(stage)
    page = alice.page
    alice.go("/events")
    expect(page.locator(".events > li").first).to_be_visible()
    known = [each.id for each in stage.asked(lambda api: api.events())]
    killed = stage.kill_leader()
    expect(page.locator(".banner")).to_contain_text("No coordinator leads")
    expect(page.locator(".banner")).to_contain_text("last heard")
    stage.asked(lambda api: True)
    stage.start_coordinator()
    expect(page.locator(".banner")).to_have_count(0)
    expect(page.locator(".topbar")).not_to_contain_text(f"leader {killed} ")
    stage.asked(lambda api: api.change({"policy.horizon_steps": 1234}, by="test"))
    expect(page.locator(".events > li").filter(has_text="configured").first).to_be_visible()

    def complete() -> bool:
        told = [each.id for each in stage.asked(lambda api: api.events()) if each.id >= known[0]]
        return sorted(alice.events()) == told

    until(complete, lambda: (alice.events(), known), seconds=60)
    assert len(set(alice.events())) == len(alice.events())
    assert set(known) <= set(alice.events()), "the history is still there"
    alice.go(f"/jobs/{JOB}")
    expect(page.locator("ed-chart canvas").first).to_be_visible()
    assert not alice.reloaded
    stage.asked(lambda api: api.change({"policy.horizon_steps": None}, by="test"))


@pytest.mark.slow
@pytest.mark.full
def test_etcd_that_is_away_is_said_and_what_was_known_stays(alice: Person, stage: Stage) -> None:
    settled(stage)
    stage.etcd.freeze()
    try:
        expect(alice.page.locator(".banner").first).to_contain_text("etcd does not answer")
        behind = alice.page.locator(".banner", has_text="etcd has not taken what was decided")
        expect(behind).to_be_visible()
        expect(alice.page.get_by_role("rowheader", name=JOB)).to_be_visible()
        expect(alice.page.locator('[data-device="alpha/1"]')).to_be_visible()
    finally:
        stage.etcd.thaw()
    expect(alice.page.locator(".banner")).to_have_count(0)
    assert not alice.reloaded
    settled(stage)


@pytest.mark.slow
@pytest.mark.full
def test_dashboard_that_is_away_is_said_and_the_page_goes_on_by_itself(alice: Person, stage: Stage) -> None:
    """Its history is a file: after a restart the events of before are there."""
    settled(stage)
    alice.go("/events")
    before = alice.events()
    stage.stop_dashboard()
    expect(alice.page.locator(".banner")).to_contain_text("The dashboard's server does not answer")
    expect(alice.page.locator(".banner")).to_contain_text("last heard")
    alice.watched.said.clear()  # the browser itself writes into its console that nobody answers
    stage.start_dashboard(port=urlsplit(stage.url).port or 0)
    alice.page.get_by_label("Token").or_(alice.page.locator(".topbar .chip.ok")).first.wait_for()
    alice.watched.said.clear()
    assert not alice.reloaded
    if alice.page.get_by_label("Token").count():
        alice.page.get_by_label("Token").fill(OPERATOR)
        alice.page.get_by_role("button", name="Sign in").click()
    expect(alice.page.locator(".topbar .chip")).to_contain_text("live")
    until(lambda: set(before) <= set(alice.events()))


@pytest.mark.slow
@pytest.mark.full
def test_viewer_sees_everything_and_can_do_nothing(browser: Browser, stage: Stage) -> None:
    settled(stage)
    with Person(browser, stage.url) as bob:
        bob.sign_in(VIEWER, "/act")
        buttons = bob.page.locator("ed-act button:not(.quiet)")
        expect(buttons.first).to_be_visible()
        assert all(buttons.evaluate_all("all => all.map(each => each.disabled)"))
        expect(bob.page.get_by_text("it needs the token of an operator").first).to_be_visible()
        for path in PAGES[:-1]:
            bob.go(path)
            expect(bob.page.locator("main h1").first).to_be_visible()
        # What the page does not offer the server refuses: a request like the page's own.
        ask = "path => fetch(path, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'})"
        assert bob.page.evaluate(f"{ask}.then(answer => answer.status)", "/api/act/pause") == 403
        bob.watched.said.clear()  # the browser writes a refused request into its console
    assert not stage.asked(lambda api: api.status().paused)


@pytest.mark.slow
@pytest.mark.full
def test_wrong_token_is_said_and_a_right_one_becomes_a_cookie(browser: Browser, stage: Stage) -> None:
    with Person(browser, stage.url) as somebody:
        somebody.page.goto(f"/jobs/{JOB}")
        expect(
            somebody.page.get_by_text("The token stays in the memory of the dashboard's server")
        ).to_be_visible()
        somebody.page.get_by_label("Token").fill("not-a-token-of-anybody")
        somebody.page.get_by_role("button", name="Sign in").click()
        expect(somebody.page.get_by_role("alert")).to_contain_text("token")
        somebody.watched.said.clear()  # the browser writes a refused request into its console
        somebody.page.get_by_label("Token").fill(VIEWER)
        somebody.page.get_by_role("button", name="Sign in").click()
        expect(somebody.page.get_by_role("heading", level=1)).to_have_text(JOB)
        (cookie,) = somebody.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert VIEWER not in str(cookie["value"])
        kept = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, location.href])"
        assert VIEWER not in somebody.page.evaluate(kept)
        assert somebody.page.evaluate("document.cookie") == ""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_violation_that_axe_knows(browser: Browser, stage: Stage, scheme: str) -> None:
    settled(stage)
    with Person(browser, stage.url, color_scheme=scheme, reduced_motion="reduce") as person:
        person.page.goto("/")
        expect(person.page.get_by_label("Token")).to_be_visible()
        assert not person.violations()
        person.sign_in(OPERATOR)
        for path in PAGES:
            person.go(path)
            expect(person.page.locator("main .panel").first).to_be_visible()
            person.page.wait_for_timeout(500)  # charts and tables that are asked for after the page itself
            assert not (found := person.violations()), (path, found)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, pytest.param(640, marks=pytest.mark.full)])
def test_no_page_is_wider_than_a_narrow_window(browser: Browser, stage: Stage, width: int) -> None:
    """A phone's window, and one of 1,280 pixels at 200 %."""
    settled(stage)
    until(lambda: stage.asked(lambda api: api.status().nodes[0].health))
    with Person(browser, stage.url, viewport={"width": width, "height": 480}) as person:
        person.sign_in(OPERATOR)
        for path in PAGES:
            person.go(path)
            expect(person.page.locator("main .panel").first).to_be_visible()
            person.page.wait_for_timeout(300)
            assert person.overflow() <= 0, path
        person.go("/devices/alpha/1")
        charts = person.page.locator("section[aria-labelledby=health-title] ed-chart")
        expect(charts.nth(1)).to_be_visible()
        boxes = charts.evaluate_all("all => all.map(each => each.getBoundingClientRect().toJSON())")
        columns = {round(box["left"]) for box in boxes}
        assert len(columns) == (1 if width < 600 else 2)
        assert all(box["width"] > 250 for box in boxes), "each can be read"


@pytest.mark.slow
def test_each_device_has_the_memory_and_the_load_of_its_workers_process(alice: Person, stage: Stage) -> None:
    """As the agents of a real job tell it, in the status, in its table and on the device's page."""

    def told() -> dict[str, DeviceHealth]:
        nodes = stage.asked(lambda api: api.status().nodes)
        known = {device.name: device for node in nodes if node.health for device in node.health.devices}
        ready = len(known) == 4 and all(device.utilisation is not None for device in known.values())
        return known if ready else {}

    known, job = until(told), stage.job()
    assert job is not None
    assert {name: device.pid for name, device in known.items()} == {
        member.device: member.pid for member in job.members
    }
    assert all((device.memory_used or 0) > 50 << 20 for device in known.values()), "torch alone takes more"
    table = call("status", "--config", str(stage.configuration("operator")))
    (line,) = [line for line in table.splitlines() if line.startswith("alpha/0 ")]
    assert re.match(rf"alpha/0 +{JOB} +\d+ +[\d.]+ MiB / 1 GiB +\d+% +- +\d\.\d\dx +emulated", line), line
    alice.go("/devices/alpha/0")
    health = alice.page.locator("section[aria-labelledby=health-title]")
    expect(health).to_contain_text("utilisation")
    expect(health).to_contain_text("memory used")


@pytest.mark.slow
def test_a_job_that_is_over_has_no_tab_and_no_row_among_those_that_run(alice: Person, stage: Stage) -> None:
    tabs = alice.page.get_by_label("Pages").get_by_role("link")
    expect(tabs).to_have_text(["Cluster", JOB, "Jobs", "Events", "Act"])
    expect(alice.row(OVER)).to_have_count(0)
    alice.page.get_by_role("link", name="2 jobs are over").click()
    expect(alice.page.get_by_role("heading", level=1)).to_have_text("Jobs")
    expect(alice.row(OVER)).to_contain_text("stopped")
    expect(alice.row(FAILED)).to_contain_text("failed")
    expect(alice.row(JOB)).to_have_count(1)
    alice.row(OVER).get_by_role("link", name=OVER).click()
    expect(alice.page.get_by_role("heading", level=1)).to_have_text(OVER)
    expect(alice.page.get_by_label("Pages").locator("[aria-current=page]")).to_have_text("Jobs")
    assert not alice.page.get_by_role("button", name=f"by place in {OVER}").count()
    assert not alice.reloaded


@pytest.mark.slow
def test_a_failure_is_news_on_the_clusters_page_and_a_job_that_was_stopped_is_not(
    alice: Person, stage: Stage
) -> None:
    abnormal = alice.page.locator("section[aria-labelledby=abnormal-title]")
    expect(abnormal.get_by_role("rowheader", name=f"job {FAILED}")).to_be_visible()
    expect(abnormal.get_by_role("rowheader", name=f"job {OVER}")).to_have_count(0)
    expect(alice.page.locator(".head, header").first).to_be_visible()
    expect(alice.page.get_by_text(f"job {FAILED} failed")).to_be_visible()
    expect(alice.page.get_by_text(f"Job {JOB} trains.")).to_be_visible()


@pytest.mark.slow
def test_a_job_in_restart_mode_has_its_devices_its_failure_and_what_each_worker_wrote(alice: Person) -> None:
    page = alice.page
    alice.go(f"/jobs/{FAILED}")
    expect(page.get_by_text("ValueError: planted").first).to_be_visible()
    panels = page.locator("main section.panel h2")
    expect(panels).to_have_text(
        ["The last failure of a worker", "Devices", "What the worker of alpha/0 writes"]
    )
    output = page.locator("ed-output pre")
    expect(output).to_contain_text("written by 0")
    alice.row("alpha/1").get_by_role("button", name="show").click()
    expect(output).to_contain_text("written by 1")
    expect(output).not_to_contain_text("written by 0")
    shown = page.locator("main").inner_text()
    assert not re.search(r"(?<![\w.-])-1\b", shown), shown
    assert not [word for word in ("predicted", "Loss", "Snapshots", "tokens") if word in shown]


@pytest.mark.slow
def test_the_page_of_a_device_has_the_output_of_its_newest_worker_alone(alice: Person) -> None:
    """Not that of a job before, whose own page has it."""
    alice.go("/devices/alpha/0")
    output = alice.page.locator("ed-output")
    expect(output).to_contain_text("What its worker writes")
    expect(output).to_contain_text(f"job {JOB}, the newest last")
    expect(output).not_to_contain_text("written by")


@pytest.mark.slow
def test_a_guess_moves_no_axis_and_figures_have_no_zeros_that_say_nothing(alice: Person, stage: Stage) -> None:
    settled(stage)
    top = """async (guess) => {
        const app = document.querySelector("script[src$='app.js']").src;
        await import(new URL("chart.js", app).href);
        const chart = document.createElement("ed-chart");
        chart.x = [0, 1, 2];
        chart.curves = [
            { label: "measured", hue: 1, values: [100, 110, 120] },
            { label: "predicted", hue: 2, values: [100000, 100000, 130], guess },
        ];
        document.querySelector("main").append(chart);
        await chart.updateComplete;
        const most = chart.plot.scales.y.max;
        chart.remove();
        return most;
    }"""
    assert 120 < alice.page.evaluate(top, True) < 200
    assert alice.page.evaluate(top, False) > 100_000, "the same curve does, where it is none"
    written = """async (values) => {
        const app = document.querySelector("script[src$='app.js']").src;
        const { figure } = await import(new URL("format.js", app).href);
        return values.map(figure);
    }"""
    shown = alice.page.evaluate(written, [0, 0.3, 0.03125, 1, 2.5, 31.25, 3125, -0.5, None])
    assert shown == ["0", "0.3", "0.0313", "1.00", "2.50", "31.3", "3,125", "-0.5", "–"]


@pytest.mark.slow
@pytest.mark.full
def test_numbers_of_the_page_are_those_of_metrics_and_of_status(alice: Person, stage: Stage) -> None:
    """While the job stands still: stopped by a frozen worker, so that both say the same moment."""
    settled(stage)
    alice.go("/")
    cells = alice.row(JOB).get_by_role("cell")

    def agree() -> bool:
        status, told = stage.asked(lambda api: (api.status(), metrics(api)))
        job = status.job(JOB)
        assert job is not None
        shown = [cells.nth(at).inner_text() for at in range(1, 4)]
        again = stage.job()
        if again is None or again.step != job.step:
            return False  # a step was made between the two looks
        return (
            figure(shown[0]) == job.step == told[f'elasticd_job_step{{job="{JOB}"}}']
            and abs(figure(shown[1]) - told[f'elasticd_job_loss{{job="{JOB}"}}']) < 1e-4
            and abs(figure(shown[2]) - told[f'elasticd_job_tokens_per_second{{job="{JOB}"}}']) < 1
        )

    until(agree, lambda: [cells.nth(at).inner_text() for at in range(4)], seconds=60)
    slow = stage.asked(lambda api: {d.name: d.rate for n in api.status().nodes for d in n.devices})
    alice.go("/devices/alpha/0")
    expect(alice.page.locator(".facts dd").first).to_have_text(f"{slow['alpha/0']:.2f}x")


@pytest.mark.slow
@pytest.mark.full
def test_text_of_others_is_never_html(alice: Person, stage: Stage) -> None:
    """Who changed a setting is free text; a job of release 0.1 may have any name."""
    name = "<img src=x onerror=alert(1)>"
    stage.asked(lambda api: api.change({"policy.horizon_steps": 777}, by=name))
    alice.go("/act")
    expect(alice.page.get_by_role("cell", name=name).first).to_be_visible()
    alice.go("/events")
    expect(alice.page.locator(".events > li").filter(has_text=name).first).to_be_visible()
    alice.go(f"/jobs/{quote(name, safe='')}")
    expect(alice.page.get_by_role("heading", level=1)).to_have_text(name)
    alice.watched.said[:] = [said for said in alice.watched.said if "404" not in said]  # there is no such job
    assert alice.page.locator("main img").count() == 0
    stage.asked(lambda api: api.change({"policy.horizon_steps": None}, by="test"))


@pytest.mark.slow
@pytest.mark.full
def test_report_opens_from_disk_without_a_network(browser: Browser, stage: Stage, tmp_path: Path) -> None:
    """All pages of the job, from one file; nothing is asked of anybody."""
    number, file = settled(stage), tmp_path / "run.html"
    options = ["report", "--out", str(file), "--config", str(stage.configuration("operator"))]
    options += ["--history", str(stage.folder / "history.db"), JOB]
    call(*options)
    stage_url, page_url = stage.url, f"file://{file}"
    with Person(browser, page_url, offline=True) as reader:
        reader.page.goto(page_url)
        expect(reader.page.get_by_role("heading", level=1)).to_have_text(JOB)
        expect(reader.page.locator("ed-chart canvas").first).to_be_visible()
        reader.page.get_by_role("link", name=f"Plan {number}, and why").click()
        expect(reader.page.locator("pre.why")).to_contain_text(f"plan {number}")
        reader.page.get_by_role("navigation").get_by_role("link", name="Events").click()
        expect(reader.page.locator(".events > li").first).to_be_visible()
        reader.page.get_by_role("navigation").get_by_role("link", name="Cluster").click()
        expect(reader.row(JOB)).to_be_visible()
        assert not reader.violations()
        assert not [asked for asked in reader.watched.asked if not asked.startswith(("file:", "data:"))]
        reader.watched.asked.clear()  # of its own file and of what stands in it
    assert stage_url not in file.read_text()
    assert "there is no job 'no-such-job'" in call(*options[:-1], "no-such-job", code=1)


@pytest.mark.slow
@pytest.mark.full
def test_report_of_a_recording_has_what_happened(browser: Browser, stage: Stage, tmp_path: Path) -> None:
    """Steps, a straggler, the plan that answers it, and why; from the recording alone."""
    before, file, html = settled(stage), tmp_path / "run.jsonl.gz", tmp_path / "run.html"
    command = ["record", "--config", str(stage.configuration("operator")), "--seconds", "40", str(file)]
    with ThreadPoolExecutor(1) as beside:
        recorded = beside.submit(call, *command)
        stage.chaos(lambda chaos: chaos.slow("beta/0", SLOW))
        number = settled(stage, before)
        assert recorded.result(120)
    stage.chaos(lambda chaos: chaos.recover("beta/0"))
    call("report", "--recorded", str(file), "--out", str(html), JOB)
    with Person(browser, f"file://{html}", offline=True) as reader:
        reader.page.goto(f"file://{html}")
        expect(reader.page.get_by_label("Marks")).to_contain_text("beta/0 is slow")
        expect(reader.page.locator("ed-bars").first).to_be_visible()
        reader.page.get_by_label("Marks").get_by_text(f"plan {number} is recorded").click()
        expect(reader.page.get_by_role("heading", level=1)).to_have_text("Events")
        reader.page.goto(f"file://{html}#/jobs/{JOB}/plans/{number}")
        expect(reader.page.locator("pre.why")).to_contain_text(f"plan {number}")
        reader.page.goto(f"file://{html}#/devices/beta/0")
        expect(reader.page.locator("ed-chart canvas").first).to_be_visible()
        reader.watched.asked.clear()  # of its own file and of what stands in it
    settled(stage, number)


@pytest.mark.slow
def test_slow_device_is_shown_and_replanned_around_without_a_reload(alice: Person, stage: Stage) -> None:
    """On the heat map, in the table, among the events; then the plan, its mark and its reason.

    The last: what comes after it waits until the device has recovered and the job has another plan.
    """
    page, before = alice.page, settled(stage)
    expect(page.get_by_role("rowheader", name=JOB)).to_be_visible()
    stage.chaos(lambda chaos: chaos.slow("alpha/1", SLOW))
    row = alice.row("alpha/1")
    expect(row).to_contain_text("slow")
    expect(row).to_contain_text(re.compile(r"\d\.\d\dx"))
    expect(page.locator('[data-device="alpha/1"]')).to_have_class(re.compile("device s[1-5]"))
    number = settled(stage, before)
    rate = stage.asked(lambda api: {d.name: d.rate for n in api.status().nodes for d in n.devices})["alpha/1"]
    expect(row).to_contain_text(f"{rate:.2f}x")
    told = next(each for each in stage.asked(lambda api: api.events())[::-1] if each.kind == "slow")
    alice.go("/events")
    expect(page.locator(f"#event-{told.id}")).to_contain_text("alpha/1")
    alice.go(f"/jobs/{JOB}")
    expect(page.get_by_label("Marks")).to_contain_text(f"plan {number}")
    page.get_by_role("link", name=f"Plan {number}, and why").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Plan {number}")
    expect(page.locator("pre.why")).to_contain_text(f"plan {number}")
    assert first_lines(page.locator("pre.why").inner_text()) == first_lines(why(stage, number))
    assert not alice.reloaded


def call(*arguments: str, code: int = 0) -> str:
    """What a command says. In a thread of its own: playwright's loop runs in this one."""
    runner = CliRunner(env={"COLUMNS": "200"})
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(runner.invoke, elasticd, arguments).result()
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def why(stage: Stage, number: int) -> str:
    """What the command says of a plan."""
    return call("why", "--job", JOB, str(number), "--config", str(stage.configuration("operator")))


def first_lines(text: str) -> list[str]:
    """What does not change with further steps: the plan, its reason, and what was measured then."""
    return [" ".join(line.split()) for line in text.splitlines()[:2]]


def metrics(api: ApiClient) -> dict[str, float]:
    """The leader's, by name and labels beside that of the cluster."""
    text = re.sub(r'cluster="[^"]*",?', "", api._ask("GET", "/metrics").decode())
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[:1] not in ("#", ""))
    }
