"""The page of explore.py: what it records, and what a browser makes of it."""
import contextlib
import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_train import TINY, make_book, trained

import explore
from exits import EXITS, Exit, loop_until_exit, make_exit

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}}\u202eabc \u05d0\u05d1 $&'


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """A page of a text with nasty tokens in it, and one of a task."""
    folder = tmp_path_factory.mktemp('explore')
    with contextlib.chdir(folder):
        make_book()
        trained(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=96')
        trained(*TINY, '--n_layer=2', '--groups=[]', '--max_iters=1', '--out_dir=out-plain')
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

@pytest.mark.parametrize('norm_inside', [True, False])
def test_the_record_is_the_model(tiny, idx, norm_inside):
    model, tokens = tiny(norm_inside=norm_inside), idx[0]
    model.rules = dict(mine=Exit(lambda x0, x1, memo, read: (read(x1).mean(-1), None)))
    right = torch.cat((tokens[1:], torch.tensor([-1])))
    right[3] = 0
    recorded = explore.record(model, tokens, right, 6)
    trace = []
    with torch.no_grad():
        logits, _ = model(tokens[None], n_loop=6, trace=trace)
    # its last step is the model's output
    log_p = logits[0].log_softmax(-1)
    assert [row[0][0] for row in recorded[-1]['top'][-1]] == log_p.argmax(-1).tolist()
    nats = [-log_p[t, right[t]].item() for t in range(15)]
    np.testing.assert_allclose(recorded[-1]['nats'][-1][:15], nats, atol=1e-4)
    assert recorded[-1]['nats'][-1][15] is None
    for of_group, entry in zip(recorded, trace):
        states = entry['states'][:, 0]
        distance = (states - states[-1]).norm(dim=-1)
        np.testing.assert_allclose(of_group['distance'], distance, rtol=1e-3, atol=1e-6)
        step = (states[1:] - states[:-1]).norm(dim=-1)
        assert np.array_equal(np.float32(of_group['signals']['norm']), step.numpy())
        assert of_group['signals']['accel'][0] is None
        assert of_group['signals'].keys() == {*EXITS, 'mine'}
        mine = model.readout(states[1:]).mean(-1).detach()
        np.testing.assert_allclose(of_group['signals']['mine'], mine, atol=1e-5)


def test_text_is_data(pages):
    """No < of the prompt stands in the page's code, whatever it holds."""
    text = pages.text.read_text(encoding='utf-8')
    assert len(text) < 2e6
    assert text.count('<script') == 2 and text.count('</script>') == 2
    assert 'alert(1)' not in text.replace('FILE:prompt.txt', '')
    record = record_of(pages.text)
    prompt = b''.join(record['texts'][str(token)].encode('latin1', 'backslashreplace')
                      for token in record['tokens'])
    assert prompt.decode('latin1').startswith('<script>alert(1)</script>&amp;')


def test_the_page_needs_no_network():
    with open(os.path.join(ROOT, 'explore.html'), encoding='utf-8') as f:
        template = f.read()
    assert "default-src 'none'" in template
    addresses = set(re.findall(r'\bhttps?://[^\'"]*|\b(?:src|href)="[^"]*', template))
    assert addresses == {'http://www.w3.org/2000/svg', 'href="data:,'}


# what a browser makes of it -----------------------------------------------------------------------

def in_browser(page, script, width=1400, view=''):
    """The value of a JavaScript expression on the page; view: the # part of its address."""
    if not CHROMIUM:
        pytest.skip('there is no Chromium here: apt-get install chromium')
    text = page.read_text(encoding='utf-8')
    text = text.replace('<title>', '<script>const errors = [];'
                        'onerror = message => errors.push(message);</script><title>', 1)
    text += f"""<script>document.body.append(make('pre', {{id: 'result'}}, JSON.stringify([errors,
                {script}])))</script>"""
    copy = page.with_name('copy.html')
    copy.write_text(text, encoding='utf-8')
    done = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
         '--hide-scrollbars', f'--user-data-dir={page.parent / "profile"}',
         f'--window-size={width},1000', '--dump-dom', f'file://{copy}{view}'],
        capture_output=True, text=True, timeout=60)
    result = re.search('<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    errors, value = json.loads(html.unescape(result[1]))
    assert not errors
    return value


def steps_by_exits(record, g, name, tau, past, hits):
    """loop_until_exit of exits.py on the recorded signals."""
    values = iter(record['groups'][g]['signals'][name])

    def signal(x0, x1, memo, read):
        value = next(values)
        return None if value is None else torch.tensor([value]), None
    rule = replace(make_exit(name, tau, hits, past=past), signal=signal)
    x = torch.zeros(1, len(record['tokens']), 1)
    return loop_until_exit(lambda x, *_: x, x, record['loops'], rule)[1][0].tolist()


STEPS = "[...$('tokens').children].map(button => +button.dataset.steps)"
TURN = """%s.map(([g, rule, tau, past, hits]) => {
  const set = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
  set('group', g, 'input'); set('rule', rule, 'change'); set('past', past ? 1 : 0, 'input');
  set('hits', hits, 'input'); set('tau', tau, 'input');
  return """ + STEPS + """;
})"""


@pytest.mark.parametrize('which, names', [('text', ['kl', 'accel']), ('task', list(EXITS))])
def test_the_controls_give_the_steps_of_exits(pages, which, names):
    """Every group and rule, own and past, thresholds, one hit and the rule's own."""
    page = getattr(pages, which)
    record = record_of(page)
    settings = [[g, name, tau, past, hits] for g in range(len(record['groups'])) for name in names
                for tau in (-6, -1.5, -0.5, 0.25, 2) for past in (False, True)
                for hits in sorted({1, EXITS[name].hits})]
    shown = in_browser(page, TURN % json.dumps(settings))
    for (g, name, tau, past, hits), steps in zip(settings, shown):
        expected = steps_by_exits(record, g, name, 10 ** tau, past, hits)
        assert steps == expected, (g, name, tau, past, hits)
    assert {len(set(steps)) > 1 for steps in shown} == {True, False}


def test_a_chosen_token_shows_its_predictions(pages):
    """Chosen by a link, a click and an arrow key: the five likeliest tokens at every loop step."""
    record = record_of(pages.task)
    table = """[...document.querySelectorAll('#think tr')].slice(1).map(row =>
        [...row.querySelectorAll('td')].slice(1).map(cell => +cell.dataset.token))"""
    linked, steps, *rows = in_browser(pages.task, f"""[$('chosen').textContent, {STEPS},
        ($('tokens').children[5].click(), {table}),
        ($('tokens').children[5].dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowLeft'}})),
         {table})]""", view='#rule=accel&past=1&tau=0.25&token=7')
    assert linked.startswith('Token 7,')
    assert steps == steps_by_exits(record, 0, 'accel', 10 ** 0.25, True, 2)
    for t, shown in zip((5, 4), rows):
        assert shown == [[token for token, _ in step[t]] for step in record['groups'][-1]['top']]


@pytest.mark.parametrize('width', [500, 1400])
def test_tokens_appear_as_they_are_and_nothing_overlaps(pages, width):
    record = record_of(pages.text)
    shown, scripts, wide, inner, boxes = in_browser(pages.text, """[
        [...document.querySelectorAll('#tokens bdi')].map(b => b.textContent),
        document.querySelectorAll('#tokens script').length,
        document.documentElement.scrollWidth, innerWidth,
        [...document.querySelectorAll('h1, body > p, form, #tokens, h2, main svg, .scroll, main p')]
        .map(node => node.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])]""",
                                                    width)
    signs = {'\t': '\u2409', '\n': '\u21b5', '\x07': '\u2407', '\x7f': '\u2421', ' ': '\u00b7'}
    texts = [record['texts'][str(token)] for token in record['tokens']]
    assert shown == [signs.get(text, text) for text in texts] and scripts == 0
    assert wide <= inner == width
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
    (['--start=FILE:none.txt'], 'cannot read the prompt file')])
def test_bad_input(pages, monkeypatch, args, words):
    monkeypatch.chdir(pages.folder)
    done = conftest.run(*args, script='explore.py')
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert words in done.stderr
