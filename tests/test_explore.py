"""The page of explore.py: what it records, and what a browser makes of it."""
import contextlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, finished, loop, make_book, refused

import decode
import explore
import tasks
from common.checkpoint import load_checkpoint
from exits import EXITS, Exit, make_exit

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}}\u202eabc \u05d0\u05d1 $&'


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """A page of a text with nasty tokens in it, and one of a task."""
    folder = tmp_path_factory.mktemp('explore')
    with contextlib.chdir(folder):
        make_book()
        finished(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=96')
        finished(*TINY, '--n_layer=2', '--groups=[]', '--max_iters=1', '--out_dir=out-plain')
        (folder / 'prompt.txt').write_text(NASTY, encoding='utf-8')
        shutil.copytree(wave / 'out', folder / 'out-wave')
        finished('--start=FILE:prompt.txt', '--n_loop=9', script='explore.py')
        finished('--out_dir=out-wave', '--n_loop=12', '--seed=3', script='explore.py')
    return SimpleNamespace(text=folder / 'out' / 'explore.html',
                           task=folder / 'out-wave' / 'explore.html', folder=folder)


def record_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def test_the_wave_continues_the_prompt(pages):
    """What leaves the wave is what follows the prompt and its first new token."""
    record = record_of(pages.text)
    prompt, passes = torch.tensor([record['tokens']]), record['wave']
    model, _ = load_checkpoint(pages.folder / 'out' / 'ckpt.pt')
    waved, _ = model.generate(prompt, 20, temperature=0, wave=8, exit=make_exit('norm_rel', 0.01))
    left = [token for one in passes for token in one['tokens'][:one['leave']]]
    assert left == waved[0, prompt.shape[1] + 1:].tolist()
    assert passes[0]['position'] == prompt.shape[1]
    assert all(len(one['tokens']) == len(one['age']) <= 8 for one in passes)


def test_the_noise_seed_is_that_of_the_wave_too(pages, monkeypatch):
    monkeypatch.chdir(pages.folder)
    seeds = []
    monkeypatch.setattr(decode, 'stream', lambda *args, noise_seed=0, **how: seeds.append(
        noise_seed) or [])
    finished('--n_loop=2', '--start=The', '--noise_seed=5', '--path=seed.html', script='explore.py')
    assert seeds == [5]


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
    nats = [*(-log_p[t, right[t]].item() for t in range(15)), 0]
    np.testing.assert_allclose(recorded[-1]['nats'][-1], nats, atol=1e-4)
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


def test_text_is_data_and_the_page_needs_no_network(pages):
    """No < of the prompt stands in the page's code, whatever it holds."""
    text = pages.text.read_text(encoding='utf-8')
    assert len(text) < 2e6
    assert text.count('<script') == 2 and text.count('</script>') == 2
    record = record_of(pages.text)
    assert record['right'] == record['tokens'][1:] + [-1]
    prompt = ''.join(record['texts'][str(token)] for token in record['tokens'])
    assert prompt.startswith('<script>alert(1)</script>&amp;')
    assert explore.page(NASTY, NASTY, NASTY).count('<script') == 2
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\bhttps?://[^\'"]*|\b(?:src|href)="[^"]*', text))
    assert addresses == {'http://www.w3.org/2000/svg', 'href="data:,'}


def test_a_problem_has_its_answers_and_their_depth(pages):
    record = record_of(pages.task)
    x, y, depth = tasks.Problems('calc:p=2,reset=0.1').make(np.random.default_rng(3), 1, 12)
    assert [record['tokens'], record['depth']] == [x[0].tolist(), depth[0].tolist()]
    assert record['right'] == y[0].clip(-1).tolist()
    dots = in_browser(pages.task, "document.querySelectorAll('#heat circle').length")
    assert dots == (y >= 0).sum()


def in_browser(page, script):
    """The value of a JavaScript expression on the page."""
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
         '--window-size=500,1000', '--dump-dom', f'file://{copy}'],
        capture_output=True, text=True, timeout=240)
    result = re.search('<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    errors, value = json.loads(html.unescape(result[1]))
    assert not errors
    return value


def steps_by_exits(record, g, name, tau, past, hits):
    """exits.loop on the recorded signals."""
    values = iter(record['groups'][g]['signals'][name])

    def signal(x0, x1, memo, read):
        value = next(values)
        return None if value is None else torch.tensor([value]), None
    rule = replace(make_exit(name, tau, hits, past=past), signal=signal)
    x = torch.zeros(1, len(record['tokens']), 1)
    return loop(lambda x, *_: x, x, record['loops'], rule)[1][0].tolist()


STEPS = "[...$('tokens').children].map(button => +button.dataset.steps)"
TURN = """%s.map(([g, rule, tau, past, hits]) => {
  const set = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
  set('group', g, 'input'); set('rule', rule, 'change'); set('past', past ? 1 : 0, 'input');
  set('hits', hits, 'input'); set('tau', tau, 'input');
  return """ + STEPS + """;
})"""


def test_the_controls_give_the_steps_of_exits(pages):
    """Every group and rule, own and past, thresholds, one hit and two; the signals are random."""
    record, rng, taus = record_of(pages.text), np.random.default_rng(0), (-6, -1.5, -0.5)
    for group in record['groups']:
        for name, signals in group['signals'].items():
            values = rng.lognormal(-2, 2, (len(signals), len(signals[-1]))).astype(np.float32)
            values[rng.random(values.shape) < 0.1] = 10 ** -0.5         # no less than the threshold
            group['signals'][name] = [
                row and new for row, new in zip(signals, values.astype(float).tolist())]
    page = pages.folder / 'random.html'
    page.write_text(explore.page(record, '', ''), encoding='utf-8')
    settings = [[g, name, tau, past, hits] for g in range(2) for name in EXITS for tau in taus
                for past in (False, True) for hits in (1, 2)]
    shown = in_browser(page, TURN % json.dumps(settings))
    for (g, name, tau, past, hits), steps in zip(settings, shown):
        expected = steps_by_exits(record, g, name, 10 ** tau, past, hits)
        assert steps == expected, (g, name, tau, past, hits)
    assert {len(set(steps)) > 1 for steps in shown} == {True, False}


def test_a_chosen_token_shows_its_predictions(pages):
    """Chosen by a click and an arrow key: the five likeliest tokens at every loop step."""
    record = record_of(pages.text)
    table = """[...document.querySelectorAll('#think tr')].slice(1).map(row =>
        [...row.querySelectorAll('td')].slice(1).map(cell => +cell.dataset.token))"""
    steps, *rows, hits = in_browser(pages.text, f"""[{STEPS},
        ($('tokens').children[5].click(), {table}),
        ($('tokens').children[5].dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowLeft'}})),
         {table}),
        ($('rule').value = 'accel', $('rule').dispatchEvent(new Event('change')),
         $('hits').value)]""")
    # the page opens with the last group and norm_rel, and each rule brings its own number of hits
    assert steps == steps_by_exits(record, -1, 'norm_rel', 0.1, False, EXITS['norm_rel'].hits)
    assert int(hits) == EXITS['accel'].hits == 2
    for t, shown in zip((5, 4), rows):
        assert shown == [[token for token, _ in step[t]] for step in record['groups'][-1]['top']]


def test_the_zooms_follow_the_token_the_rule_and_the_slider(pages):
    """One for each group, with its exit, and its points where the recorded path has them."""
    record = record_of(pages.text)
    zooms = """[...document.querySelectorAll('#path svg')].slice(1).map(svg => [+svg.dataset.steps,
        [...svg.querySelectorAll('circle')].slice(0, 9).map(c => [+c.getAttribute('cx'),
                                                                  +c.getAttribute('cy')])])"""
    turned = TURN.replace('hits]', 'hits, t]').replace(
        'return ' + STEPS, f"$('tokens').children[t].click(); return {zooms}")
    settings = [[0, 'norm_rel', -1, False, 1, 9], [1, 'accel', -2, True, 2, 20],
                [1, 'norm', 0, False, 1, 0]]
    drawn = in_browser(pages.text, turned % json.dumps(settings))
    seen = set()
    for (_, name, tau, past, hits, token), panels in zip(settings, drawn):
        for g, (steps, at) in enumerate(panels):
            assert steps == steps_by_exits(record, g, name, 10 ** tau, past, hits)[token]
            path = np.array(record['groups'][g]['path'])[:, token]
            half = 1.2 * abs(path[1:] - path[-1]).max()
            expected = 75 + 75 * (path - path[-1]) * [1, -1] / half
            np.testing.assert_allclose(at, expected, rtol=1e-6, atol=1e-6)
            seen.add(steps)
    assert len(seen) > 2


def test_tokens_appear_as_they_are(pages):
    """In a narrow window, which they do not overflow."""
    record = record_of(pages.text)
    shown, scripts, wide, inner = in_browser(pages.text, """[
        [...document.querySelectorAll('#tokens bdi')].map(b => b.textContent),
        document.querySelectorAll('#tokens script').length,
        document.documentElement.scrollWidth, innerWidth]""")
    signs = {'\t': '\u2409', '\n': '\u21b5', '\x07': '\u2407', '\x7f': '\u2421', ' ': '\u00b7'}
    texts = [record['texts'][str(token)] for token in record['tokens']]
    assert shown == [signs.get(text, text) for text in texts] and scripts == 0
    assert wide <= inner == 500


@pytest.mark.parametrize('flag, words', [
    ('--start=' + 'x' * 97, 'the prompt has 97 tokens'), ('--path=.', 'is a directory'),
    ('--n_loop=1', 'n_loop must be at least 2'), ('--n_loop=9000', 'more than a page holds'),
    ('--out_dir=out-plain', 'no recurrent groups')])
def test_bad_input(pages, monkeypatch, flag, words):
    monkeypatch.chdir(pages.folder)
    assert words in refused(flag, script='explore.py')
