"""The board's page in a real browser: what a person clicks and presses, and what is then seen."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from headless import MISSING, Headless
from test_board import board_of, write_run

from headrace.durable.spelling import encode
from headrace.facts.facts import Warned, Withdrawn
from headrace.views.board.board_routes import make_board_app
from headrace.web.server import address_of, bind, make_server

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

CHARTS = "[...document.querySelectorAll('.live-chart')].filter((one) => one.querySelector('canvas')).map((one) => one.dataset.metric)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", config="[train]\nlr = 1e-5\n")
    write_run(root / "second", seed=1, end=False, config="[train]\nlr = 3e-5\n")
    return root


@pytest.fixture(scope="module")
def place(runs: Path) -> Iterator[str]:
    board, sock = board_of(runs), bind("127.0.0.1", 0)
    server = make_server(make_board_app(board))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    yield address_of(sock)
    board.closed = server.should_exit = True
    thread.join()
    sock.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Headless]:
    browser = Headless()
    yield browser
    browser.close()


@pytest.fixture
def browser(shared: Headless) -> Iterator[Headless]:
    """It complains about nothing."""
    shared.size(1200, 900)
    shared.prefers("light")
    shared.open("about:blank")
    shared.errors.clear()
    yield shared
    assert shared.errors == []


def opened(browser: Headless, place: str, view: str) -> None:
    browser.open("about:blank")
    browser.open(f"{place}/#{view}")
    browser.wait("document.querySelector('.run.here') && document.querySelector('#view > div > *')")


def test_a_run_is_drawn_without_a_question_and_two_are_compared(browser: Headless, place: str):
    browser.open(place)
    browser.wait("document.querySelector('.verdict b')")
    assert browser.evaluate("document.querySelector('.verdict b').innerText").startswith(
        ("Learning: held out", "Broken")
    )
    names = "[...document.querySelectorAll('.run')].map((one) => one.dataset.name)"
    assert sorted(browser.evaluate(names)) == ["first", "second"]
    assert browser.evaluate("document.querySelectorAll('.run .swatch[aria-pressed=true]').length") == 1
    browser.evaluate("document.querySelector('.swatch[aria-pressed=false]').click()")
    browser.wait("document.querySelector('.differences')")
    assert "train.lr" in browser.evaluate("document.querySelector('.differences').innerText")
    browser.wait("document.querySelector('[data-metric=\"reward/drawn\"] .legend')?.innerText.includes('second')")
    assert browser.evaluate("new URLSearchParams(location.hash.slice(1)).getAll('runs').length") == 2


def test_the_overview_draws_the_reward_over_minutes_and_each_row_leads_to_more(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&tab=overview")
    shown = "document.querySelector('#view [data-of]:not([hidden])')?.dataset.of"
    browser.wait(f"{shown} == 'step'")
    browser.evaluate("document.querySelector('[data-over=minutes]').click()")
    assert browser.evaluate(shown) == "minutes"
    browser.press("2")
    browser.wait(f"{CHARTS}.includes('reward/drawn')")
    browser.press("1")
    browser.wait(f"document.querySelector('#view .verdict') && {shown} == 'minutes'")
    assert browser.evaluate("document.querySelectorAll('#view .row').length") == 6
    browser.evaluate("document.querySelector('#view .row a').click()")
    browser.wait("location.hash.includes('tab=pools') && document.querySelector('#view .gantt')")


def test_a_link_opens_at_the_same_view(browser: Headless, place: str):
    opened(
        browser, place, "run=first&runs=first&runs=second&over=minutes&window=5&metrics=train%2Fkl&metrics=lag%2Fmean"
    )
    browser.wait(f"{CHARTS}.length == 2")
    assert browser.evaluate(CHARTS) == ["train/kl", "lag/mean"]
    assert browser.evaluate("[document.getElementById('over').value, document.getElementById('window').value]") == [
        "minutes",
        "5",
    ]
    opened(browser, place, "run=first&runs=first&over=lag%2Fmean&metrics=train%2Fkl")
    browser.wait(f"{CHARTS}.length == 1")
    assert browser.evaluate("document.getElementById('over').value") == "lag/mean"


def test_dragging_over_a_curve_zooms_all_of_them(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&metrics=train%2Fkl&metrics=lag%2Fmean")
    browser.wait(f"{CHARTS}.length == 2")
    left, top, width = browser.evaluate(
        "(({left, top, width}) => [left, top, width])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    browser.drag((left + 0.25 * width, top + 60), (left + 0.5 * width, top + 60))
    browser.wait("location.hash.includes('from=')")
    low, high = browser.evaluate(
        "['from', 'to'].map((one) => Number(new URLSearchParams(location.hash.slice(1)).get(one)))"
    )
    assert 7 < low < 9.5 and 14 < high < 17  # of steps 1 to 30
    browser.press("z")
    browser.wait("!location.hash.includes('from=')")


def test_labels_of_an_axis_are_whole_and_no_two_alike(browser: Headless, place: str):
    """Whatever the size of the numbers: `1.300e-14` lost its first digit."""
    opened(browser, place, "run=first&runs=first&tab=curves&metrics=train%2Fkl")
    browser.wait(f"{CHARTS}.length == 1")
    labels = "import('/static/curves.js').then((curves) => {} )"
    given = [
        [1.0e-14, 1.1e-14, 1.2e-14, 1.3e-14],
        [0, 0.05, 0.1],
        [0.9995, 0.9996, 0.9997],
        [0, 50_000, 100_000],
        [-2, 0, 2],
    ]
    shown = [browser.evaluate(labels.replace("{}", f"curves.tickLabels({ticks})")) for ticks in given]
    assert shown == [
        ["1.0e-14", "1.1e-14", "1.2e-14", "1.3e-14"],
        ["0", "0.05", "0.10"],
        ["0.9995", "0.9996", "0.9997"],
        ["0", "50,000", "100,000"],
        ["-2", "0", "2"],
    ]
    room, widest = browser.evaluate(
        "import('/static/curves.js').then((curves) => { const pen = document.createElement('canvas').getContext('2d');"
        "pen.font = '11px system-ui, sans-serif'; const labels = ['1,234,567.25', '0'];"
        "return [curves.roomForLabels({ ctx: pen }, labels), pen.measureText(labels[0]).width]; })"
    )
    assert widest < room < widest + 20


def test_a_chart_is_saved_as_a_picture(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&metrics=train%2Fkl")
    browser.wait(f"{CHARTS}.length == 1")
    browser.evaluate(
        "HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; };"
        "document.querySelector('.live-chart .buttons button').click()"
    )
    name, data = browser.evaluate("window.saved")
    png = base64.b64decode(data.partition(",")[2])
    width, height = struct.unpack(">II", png[16:24])
    assert name == "train-kl.png" and png[:8] == b"\x89PNG\r\n\x1a\n" and width > 300 and height > 200
    assert len(png) > 2000, "an empty picture"


def test_rollouts_are_searched_and_their_tokens_coloured(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&tab=samples")
    browser.wait("document.querySelector('.rollouts')")
    browser.evaluate(
        "(() => { const field = document.querySelector('.sieve [name=most]'); field.value = '0.5';"
        "field.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )
    rewards = "[...document.querySelectorAll('.rollouts td[data-head=reward]')].map((one) => one.firstChild.data)"
    browser.wait(f"{rewards}.length && {rewards}.every((one) => one == '0')")
    assert "most%3D0.5" in browser.evaluate("location.hash")
    before = browser.evaluate("document.querySelectorAll('.rollouts tbody tr').length")
    browser.evaluate("document.querySelector('.more-line button').click()")
    browser.wait(f"document.querySelectorAll('.rollouts tbody tr').length > {before}")


def test_two_clicks_compare_two_rollouts(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&tab=samples")
    browser.wait("document.querySelectorAll('.compare').length > 3")
    browser.evaluate("document.querySelectorAll('.compare')[0].click()")
    assert "choose another one" in browser.evaluate("document.querySelector('#compared').innerText")
    browser.evaluate("document.querySelectorAll('.compare')[0].click()")
    assert browser.evaluate("document.querySelector('#compared').innerText") == "", "a second click takes it back"
    browser.evaluate(
        "document.querySelectorAll('.compare')[0].click(); document.querySelectorAll('.compare')[3].click()"
    )
    browser.wait("document.querySelectorAll('#compared .look').length === 2")
    assert browser.evaluate("document.querySelectorAll('.compare[aria-pressed=true]').length") == 0


def test_tokens_take_the_colour_that_is_chosen(browser: Headless, place: str):
    """The synthetic run has no tokenizer, so the rows of the report are made here with one."""
    opened(browser, place, "run=first&runs=first&tab=setup")
    colours = browser.evaluate(
        "(() => { const part = document.createElement('div');"
        "part.innerHTML = '<select class=colour-by><option>lag<option>surprise<option>advantage<option>entropy</select><div class=\"text tokens\">'"
        "+ '<i class=lag0 data-p=-4.0 data-a=-1 data-e=1.5>a</i><i class=lag0 data-p=0.0 data-a=0.5>b</i><i class=between>c</i></div>"
        "<small class=unrecorded hidden>not recorded</small>';"
        "document.body.append(part); setUp(part); const choice = part.querySelector('select'), found = [];"
        "for (const how of ['surprise', 'advantage', 'entropy', 'lag']) { choice.value = how; choice.onchange();"
        "found.push([...part.querySelectorAll('i')].map((one) => one.style.background + one.className));"
        "found.at(-1).push(part.querySelector('small').hidden); } return found; })()"
    )
    assert "var(--c2) 100%" in colours[0][0] and "var(--c2) 0%" in colours[0][1]
    assert "var(--bad) 100%" in colours[1][0] and "var(--good) 50%" in colours[1][1]
    assert "var(--c4) 50%" in colours[2][0] and colours[2][1:] == ["lag0 unknown", "between unknown", False]
    assert colours[3] == ["lag0", "lag0", "between", True] and [colour[3] for colour in colours[:2]] == [True, True]


def test_keys_change_run_tab_theme_and_smoothing(browser: Headless, place: str):
    browser.open(place)
    browser.wait("document.querySelector('.verdict')")
    browser.press("2")
    browser.wait(f"{CHARTS}.length")
    names = browser.evaluate("[...document.querySelectorAll('.run')].map((one) => one.dataset.name)")
    here = "document.querySelector('.run.here').dataset.name"
    assert browser.evaluate(here) == names[0]
    browser.press("j")
    browser.wait(f"{here} == '{names[1]}'")
    browser.press("s")
    browser.wait("location.hash.includes('window=5')")
    browser.press("4")
    browser.wait("document.querySelector('.gantt')")
    browser.evaluate("document.querySelector('.gantt [data-do=all]').click()")
    whole = browser.evaluate("document.querySelector('.gantt-svg').viewBox.baseVal.width")
    browser.evaluate("document.querySelector('.gantt [data-do=in]').click()")
    assert browser.evaluate("document.querySelector('.gantt-svg').viewBox.baseVal.width") == pytest.approx(whole / 2)
    browser.press("t")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.press("?")
    assert browser.evaluate("document.getElementById('help').open") is True


def test_steps_of_a_long_run_are_chosen_by_field_button_and_strip(
    browser: Headless, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.views.board.board_parts.MAX_BARS", 20)
    opened(browser, place, "run=first&runs=first&tab=pools")
    shown = "[...document.querySelectorAll('.pager input')].map((one) => one.value).join('-')"
    browser.wait(f"{shown} == '1-30'")
    browser.evaluate(
        "(() => { const [first, last] = document.querySelectorAll('.pager input'); first.value = 5; last.value = 9;"
        "document.querySelector('.pager').requestSubmit(); })()"
    )
    bars = "document.querySelectorAll('.gantt rect.steps').length"
    browser.wait(f"{bars} == 5 && {shown} == '5-9' && location.hash.includes('steps=5-9')")
    browser.evaluate(
        "[...document.querySelectorAll('.pager button')].find((one) => one.innerText.includes('later')).click()"
    )
    browser.wait(f"{shown} == '10-14'")
    assert browser.evaluate(bars) == 5
    left, top, width = browser.evaluate(
        "(({left, top, width}) => [left, top, width])(document.querySelector('.strip svg').getBoundingClientRect())"
    )
    browser.drag((left + 0.501 * width, top + 10), (left + 0.501 * width, top + 10))
    browser.wait(f"{shown} == '14-18'")
    browser.drag((left + 0.71 * width, top + 10), (left + 0.99 * width, top + 10))
    browser.wait(f"{shown} == '22-30'")
    browser.evaluate("document.querySelector('[data-tab=drawn]').click()")
    browser.wait(f"{shown} == '22-30' && document.querySelector('.figures')")
    browser.evaluate("document.querySelector('.pager [data-steps=\"\"]').click()")
    browser.wait(f"{shown} == '1-30' && !location.hash.includes('steps')")


def test_lanes_are_filtered_zoomed_and_open_their_sample(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&tab=lanes&steps=8-12")
    browser.wait("document.querySelector('.swimlanes .lane')")
    lanes = "document.querySelectorAll('.swimlanes .lane').length"
    every = browser.evaluate(lanes)
    browser.evaluate(
        "(() => { const choice = document.querySelector('[name=show]'); choice.value = 'dropped'; choice.onchange({ target: choice }); })()"
    )
    browser.wait(f"location.hash.includes('show=dropped') && {lanes} < {every}")
    assert browser.evaluate(
        "[...document.querySelectorAll('.lane')].every((one) => one.dataset.gone || !('rollout' in one.dataset))"
    )
    browser.evaluate(
        "(() => { const choice = document.querySelector('[name=show]'); choice.value = 'all'; choice.onchange({ target: choice }); })()"
    )
    browser.wait(f"{lanes} == {every} && !location.hash.includes('show')")
    fill = "[...document.querySelectorAll('.lane rect[class*=lag]')].map((one) => getComputedStyle(one).fill).join()"
    by_version = browser.evaluate(fill)
    browser.evaluate(
        "(() => { const choice = document.querySelector('[name=colour]'); choice.value = 'lag'; choice.onchange(); })()"
    )
    assert browser.evaluate(fill) != by_version and "colour=lag" in browser.evaluate("location.hash")
    width = "document.querySelector('.gantt-svg').viewBox.baseVal.width"
    whole = browser.evaluate(width)
    browser.evaluate("document.querySelector('.gantt-svg').focus()")
    browser.press("+")
    assert browser.evaluate(width) == pytest.approx(whole / 2)
    left = browser.evaluate("document.querySelector('.gantt-svg').viewBox.baseVal.x")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.querySelector('.gantt-svg').viewBox.baseVal.x") < left
    browser.press("0")
    assert browser.evaluate(width) == pytest.approx(whole)
    ticket, x, y = browser.evaluate(
        "(() => { const lane = [...document.querySelectorAll('.lane[data-rollout=\"1\"]')].find((one) => !one.dataset.gone && one.getBoundingClientRect().top > 250);"
        "const { left, top, width, height } = lane.querySelector('rect[class*=lag]').getBoundingClientRect();"
        "return [lane.dataset.ticket, left + width / 2, top + height / 2]; })()"
    )
    browser.drag((x, y), (x + 40, y))
    assert browser.evaluate("!!document.querySelector('.swimlanes')"), "a drag opened a sample"
    browser.drag((x + 40, y), (x, y))
    browser.drag((x, y), (x, y))
    browser.wait("location.hash.includes('tab=samples') && document.querySelector('.rollouts')")
    assert f"ticket%3D{ticket}%26rollout%3D1" in browser.evaluate("location.hash")
    rows = browser.evaluate("[...document.querySelectorAll('.rollouts tbody tr')].map((one) => one.innerText)")
    assert len(rows) == 1 and f"ticket {ticket}" in rows[0]


def test_lanes_of_dropped_groups_lead_to_their_outcome(browser: Headless, place: str):
    opened(browser, place, "run=first&runs=first&tab=lanes&steps=1-30&show=dropped")
    browser.wait("document.querySelector('.lanes button')")
    ticket = browser.evaluate("document.querySelector('.lanes button').dataset.ticket")
    browser.evaluate("document.querySelector('.lanes button').click()")
    browser.wait("location.hash.includes('gone%3D1') && document.querySelector('#found table')")
    assert browser.evaluate("document.querySelector('#found tbody td').innerText") == ticket


@pytest.mark.parametrize(
    "tab", ["curves", "overview", "samples", "pools", "lanes", "drawn", "accounting", "warnings", "setup"]
)
def test_nothing_is_wider_than_a_phone_and_the_chosen_tab_is_in_sight(browser: Headless, place: str, tab: str):
    browser.size(390, 800, phone=True)
    opened(browser, place, f"run=first&runs=first&runs=second&tab={tab}")
    browser.wait(
        "!document.querySelector('#view .empty') || document.querySelector('#view .empty').innerText != 'Reading …'"
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    chosen = "document.querySelector('#tabs [aria-selected=true]').getBoundingClientRect()"
    assert 0 <= browser.evaluate(f"{chosen}.left") < browser.evaluate(f"{chosen}.right") <= 390


def test_what_a_model_writes_runs_no_script(browser: Headless, place: str, runs: Path):
    evil = write_run(
        runs / "<img src=x onerror=window.evil=1>", seed=2, config="note = '<script>window.evil = 1</script>'\n"
    )
    try:
        opened(browser, place, "tab=setup")
        browser.wait("document.querySelectorAll('.run').length == 3")
        browser.evaluate(
            "[...document.querySelectorAll('.run')].find((one) => one.dataset.name.startsWith('<')).click()"
        )
        browser.wait("document.querySelector('#view pre')")
        assert browser.evaluate("window.evil") is None
    finally:
        shutil.rmtree(evil)


def test_a_run_that_appears_grows_and_ends_is_seen_without_a_reload(browser: Headless, place: str, runs: Path):
    opened(browser, place, "run=first&runs=first&tab=overview")
    late = write_run(runs / "late", seed=3)
    data = (late / "metrics.jsonl").read_bytes()
    (late / "metrics.jsonl").write_bytes(data[: len(data) // 2])
    row = "[...document.querySelectorAll('.run')].find((one) => one.dataset.name == 'late')"
    browser.wait(row)
    browser.evaluate(f"{row}.click()")
    browser.wait("document.querySelector('#view .meta')?.innerText.includes('of 30')")
    with io.FileIO(late / "metrics.jsonl", "ab") as file:
        file.write(data[len(data) // 2 :])
    browser.wait("document.querySelector('#view .meta')?.innerText.includes('step 30 of 30')")
    browser.wait("[...document.querySelectorAll('.toast')].some((one) => one.innerText.includes('late'))")


@pytest.mark.whole
def test_a_toast_follows_its_warning_and_goes_with_it(browser: Headless, place: str, runs: Path):
    told = write_run(runs / "told", seed=4, end=False)
    opened(browser, place, "run=told&runs=told&tab=overview")
    browser.wait("document.querySelector('#view .verdict')")
    words = "[...document.querySelectorAll('.toast')].map((one) => one.innerText)"
    steps = (
        (Warned(999.0, "waited 120 s", "k"), f"{words}.some((one) => one.includes('waited 120 s'))"),
        (Warned(1000.0, "waited 240 s", "k"), f"{words}.some((one) => one.includes('waited 240 s'))"),
        (Withdrawn(1001.0, "k"), f"!{words}.some((one) => one.includes('waited'))"),
    )
    try:
        for fact, seen in steps:
            with io.FileIO(told / "metrics.jsonl", "ab") as file:
                file.write(encode(fact) + b"\n")
            browser.wait(seen)
            assert browser.evaluate(f"{words}.filter((one) => one.includes('waited')).length") <= 1
    finally:
        shutil.rmtree(told)
