"""The page of explore.py, what it records, and what a browser makes of it."""
import contextlib
import json
import os
import shutil
import subprocess
import time
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, SYSTEMS
from test_train import TINY, make_book, trained

import explore
from exits import EXITS, loop_until_exit, make_exit

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}}\u202eabc \u05d0\u05d1 $&'


class Browser:
    """A headless Chromium, spoken to through a pipe (its DevTools protocol)."""

    def __init__(self, folder):
        read, self.out = os.pipe()
        self.into, write = os.pipe()

        def pipes():        # the protocol is on descriptors 3 and 4
            os.dup2(read, 103)
            os.dup2(write, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)
        self.process = subprocess.Popen(
            [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
             '--remote-debugging-pipe', f'--user-data-dir={folder}', '--no-first-run',
             '--disable-dev-shm-usage', '--disable-background-networking'],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.number, self.buffer, self.events, self.session = 0, b'', [], None
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        self.session = self.ask('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')

    def message(self):
        while b'\0' not in self.buffer:
            part = os.read(self.into, 2 ** 16)
            assert part, 'the browser is gone'
            self.buffer += part
        text, self.buffer = self.buffer.split(b'\0', 1)
        return json.loads(text)

    def ask(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params)
        if self.session:
            message['sessionId'] = self.session
        os.write(self.out, json.dumps(message).encode() + b'\0')
        while True:
            answer = self.message()
            if answer.get('id') == self.number:
                assert 'error' not in answer, answer
                return answer['result']
            self.events.append(answer)

    def open(self, path, width=1400):
        self.events.clear()
        self.ask('Emulation.setDeviceMetricsOverride', width=width, height=1000,
                 deviceScaleFactor=1, mobile=width < 500)
        self.ask('Page.navigate', url=f'file://{os.path.abspath(path)}')
        for _ in range(200):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.05)
        raise AssertionError('the page did not open')

    def run(self, script):
        result = self.ask('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def close(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip('there is no Chromium here: apt-get install chromium')
    one = Browser(tmp_path_factory.mktemp('profile'))
    yield one
    one.close()


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """A page of a text with nasty tokens in it, and one of a task."""
    folder = tmp_path_factory.mktemp('explore')
    with contextlib.chdir(folder):
        make_book()
        trained(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=96')
        (folder / 'prompt.txt').write_text(NASTY, encoding='utf-8')
        done = conftest.run('--start=FILE:prompt.txt', '--n_loop=9', script='explore.py')
        assert done.returncode == 0, done.stderr
        shutil.copytree(wave / 'out', folder / 'out-wave')
        done = conftest.run('--out_dir=out-wave', '--n_loop=12', script='explore.py')
        assert done.returncode == 0, done.stderr
    return SimpleNamespace(text=folder / 'out' / 'explore.html',
                           task=folder / 'out-wave' / 'explore.html', folder=folder)


def record_of(page):
    text = page.read_text(encoding='utf-8').split('id="record">')[1].split('</script>')[0]
    return json.loads(text)


# what is recorded ---------------------------------------------------------------------------------

@pytest.mark.parametrize('system', SYSTEMS)
def test_the_record_is_the_model(tiny, idx, system):
    model, tokens = tiny(**SYSTEMS[system]), idx[0]
    right = torch.cat((tokens[1:], torch.tensor([-1])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, 'n_loop', 6)
        found = explore.record(model, tokens, right)
    assert ('gate' in found[0]['signals']) == (model.gate is not None)
    trace = []
    with torch.no_grad():
        logits, _ = model(tokens[None], n_loop=6, trace=trace)
    # its last step is the model's output
    log_p = logits[0].log_softmax(-1)
    assert [row[0][0] for row in found[-1]['top'][-1]] == log_p.argmax(-1).tolist()
    nats = [-log_p[t, right[t]].item() for t in range(15)]
    np.testing.assert_allclose(found[-1]['nats'][-1][:15], nats, atol=1e-4)
    assert found[-1]['nats'][-1][15] is None
    for of_group, entry in zip(found, trace):
        states = entry['states'][:, 0]
        distance = (states - states[-1]).norm(dim=-1)
        np.testing.assert_allclose(of_group['distance'], distance, rtol=1e-3, atol=1e-6)
        step = (states[1:] - states[:-1]).norm(dim=-1)
        assert np.array_equal(np.float32(of_group['signals']['norm']), step.numpy())
        assert of_group['signals']['accel'][0] is None


def test_text_is_data(pages):
    """No < of the prompt stands in the page's code, whatever it holds."""
    text = pages.text.read_text(encoding='utf-8')
    assert text.count('<script') == 2 and text.count('</script>') == 2
    assert 'alert(1)' not in text.replace('FILE:prompt.txt', '')
    record = record_of(pages.text)
    said = b''.join(record['texts'][str(token)].encode('latin1', 'backslashreplace')
                    for token in record['tokens'])
    assert said.decode('latin1').startswith('<script>alert(1)</script>&amp;')


def test_size_and_time(pages):
    assert pages.text.stat().st_size < 2e6


# what a browser makes of it -----------------------------------------------------------------------

def steps_by_exits(record, g, name, tau, past, hits):
    """loop_until_exit of exits.py on the recorded signals."""
    values, rule = record['groups'][g]['signals'][name], make_exit(name, tau, hits, past=past)
    tokens, K = len(record['tokens']), record['loops']
    seen = iter(values)

    def signal(x0, x1, memo, readout):
        value = next(seen)
        return None if value is None else torch.tensor([value]), None
    rule = rule.__class__(**vars(rule) | dict(signal=signal))
    x = torch.zeros(1, tokens, 1)
    return loop_until_exit(lambda x, *_: x, x, K, rule)[1][0].tolist()


TURN = """(settings => settings.map(([g, rule, tau, past, hits]) => {
  const set = (id, value, event) => {
    const node = document.getElementById(id);
    node.value = value;
    node.dispatchEvent(new Event(event, {bubbles: true}));
  };
  set('group', g, 'input'); set('rule', rule, 'change'); set('past', past ? 1 : 0, 'input');
  set('hits', hits, 'input'); set('tau', tau, 'input');
  return [...document.getElementById('tokens').children].map(b => +b.dataset.steps);
}))(%s)"""


@pytest.mark.parametrize('which', ['text', 'task'])
def test_the_slider_gives_the_steps_of_exits(browser, pages, which):
    """Every rule, own and past, three thresholds and the ends, one hit and the rule's own."""
    page = getattr(pages, which)
    record = record_of(page)
    browser.open(page)
    settings = [[g, name, tau, past, hits] for g in range(len(record['groups'])) for name in EXITS
                for tau in (-6, -1.5, -0.5, 0.25, 2) for past in (False, True)
                for hits in sorted({1, EXITS[name][1]})]
    shown = browser.run(TURN % json.dumps(settings))
    kinds = set()
    for (g, name, tau, past, hits), steps in zip(settings, shown):
        wanted = steps_by_exits(record, g, name, 10 ** tau, past, hits)
        assert steps == wanted, (g, name, tau, past, hits)
        kinds.add(len(set(steps)) > 1)
    assert kinds == {True, False}
    complaints = [event for event in browser.events if event.get('method') in (
        'Runtime.exceptionThrown', 'Log.entryAdded', 'Runtime.consoleAPICalled')]
    assert not complaints
    asked = [event['params']['request']['url'] for event in browser.events
             if event.get('method') == 'Network.requestWillBeSent']
    assert all(url.startswith(('file:', 'data:')) for url in asked) and len(asked) <= 2


def test_a_token_shows_the_right_words(browser, pages):
    """Chosen by a click or the arrow keys: its five likeliest tokens at every loop step."""
    record = record_of(pages.task)
    browser.open(pages.task)
    for t in (0, 5, 11):
        rows = browser.run(f"""document.getElementById('tokens').children[{t}].click(),
            [...document.querySelectorAll('#think tr')].slice(1).map(row =>
            [...row.querySelectorAll('td')].slice(1).map(cell => +cell.dataset.token))""")
        assert rows == [[token for token, _ in of_token[t]] for of_token in
                        record['groups'][-1]['top']]
    focus = """document.getElementById('tokens').children[%d].dispatchEvent(
        new KeyboardEvent('keydown', {key: 'ArrowLeft'})), document.activeElement.ariaPressed"""
    assert browser.run(focus % 11) == 'true'
    assert 'Token 10' in browser.run("document.getElementById('chosen').textContent")


def test_a_view_to_share(browser, pages):
    browser.open('/dev/null')
    path = os.path.abspath(pages.task)
    browser.ask('Page.navigate', url=f'file://{path}#rule=accel&past=1&tau=0.25&token=7')
    for _ in range(100):
        if browser.run("document.readyState === 'complete' && !!document.getElementById('chosen')"):
            break
        time.sleep(0.05)
    steps = browser.run("""[...document.getElementById("tokens").children].map(
        button => +button.dataset.steps)""")
    assert steps == steps_by_exits(record_of(pages.task), 0, 'accel', 10 ** 0.25, True, 2)
    assert browser.run("document.getElementById('chosen').textContent").startswith('Token 7,')


def test_tokens_appear_as_they_are(browser, pages):
    browser.open(pages.text)
    shown = browser.run("[...document.querySelectorAll('#tokens bdi')].map(b => b.textContent)")
    record = record_of(pages.text)
    signs = {'\t': '\u2409', '\n': '\u21b5', '\x07': '\u2407', '\x7f': '\u2421', ' ': '\u00b7'}
    wanted = [record['texts'][str(token)] for token in record['tokens']]
    assert shown == [signs.get(text, text) for text in wanted]
    assert browser.run('document.querySelectorAll("#tokens script").length') == 0


@pytest.mark.parametrize('width', [400, 1400])
@pytest.mark.parametrize('which', ['text', 'task'])
def test_nothing_overlaps(browser, pages, which, width):
    browser.open(getattr(pages, which), width)
    wide = browser.run('document.documentElement.scrollWidth')
    assert wide <= width
    boxes = browser.run("""[...document.querySelectorAll(
        'h1, body > p, form, #tokens, h2, main svg, .scroll, main p')]
        .map(node => node.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])""")
    for i, a in enumerate(boxes):
        assert a[2] > a[0] and a[3] >= a[1]
        for b in boxes[i + 1:]:
            apart = (a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 1 or b[3] <= a[1] + 1)
            assert apart, (a, b)


# bad input ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    (['--start=' + 'x' * 97], 'the prompt has 97 tokens'),
    (['--n_loop=1'], 'n_loop must be at least 2'),
    (['--n_loop=9000'], 'more than a page holds'),
    (['--path=no/such/folder/page.html'], 'No such file'),
    (['--out_dir=out-plain'], 'no recurrent groups'),
    (['--out_dir=nothing'], 'no checkpoint'),
    (['--start=FILE:none.txt'], 'cannot read the prompt file')])
def test_bad_input(pages, monkeypatch, args, words):
    monkeypatch.chdir(pages.folder)
    if 'out-plain' in args[0] and not os.path.exists('out-plain'):
        trained(*TINY, '--n_layer=2', '--groups=[]', '--max_iters=1', '--out_dir=out-plain')
    done = conftest.run(*args, script='explore.py')
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert words in done.stderr


def test_the_template_stands_beside_it():
    with open(os.path.join(ROOT, 'explore.html'), encoding='utf-8') as f:
        lines = f.read().splitlines()
    assert len(lines) <= 350 and not any('http' in line for line in lines
                                         if 'www.w3.org/2000/svg' not in line
                                         and 'http-equiv' not in line)
