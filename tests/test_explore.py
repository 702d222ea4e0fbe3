"""The page of explore.py: in a browser, the model of model.js is that of model.py."""
import contextlib
import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, finished, make_book, refused

import explore
import tasks
from common.checkpoint import load_checkpoint
from exits import EXITS, make_exit
from geometry import logits_of, paths

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """A page for a text with nasty characters in it, and one for a task."""
    folder = tmp_path_factory.mktemp('explore')
    with contextlib.chdir(folder):
        make_book()
        finished(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=96')
        finished(*TINY, '--n_layer=2', '--groups=[]', '--max_iters=1', '--out_dir=out-plain')
        finished(*TINY, '--injection=add', '--max_iters=1', '--out_dir=out-add')
        (folder / 'prompt.txt').write_text(NASTY, encoding='utf-8')
        shutil.copytree(wave / 'out', folder / 'out-wave')
        finished('--start=FILE:prompt.txt', '--n_loop=9', script='explore.py')
        finished('--out_dir=out-wave', '--n_loop=12', '--seed=3', script='explore.py')
    return SimpleNamespace(text=folder / 'out' / 'explore.html',
                           task=folder / 'out-wave' / 'explore.html', folder=folder)


def model_of(page):
    """The model behind a page, with its weights rounded as the page has them."""
    model, _ = load_checkpoint(page.with_name('ckpt.pt'))
    for p in model.parameters():
        p.data = p.data.half().float()
    return model


def record_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def in_browser(page, script):
    """The value of a JavaScript expression on the page."""
    if not CHROMIUM:
        pytest.skip('there is no Chromium here: apt-get install chromium')
    text = page.read_text(encoding='utf-8')
    text = text.replace('<title>', '<script>const errors = [];'
                        'onerror = message => errors.push(message);</script><title>', 1)
    text += f"""<script>
        const set = (id, value) => {{ $(id).value = value; update(); }};
        const type = text => {{ $('text').value = text; take_text(); }};
        const value = {script};
        document.body.append(make('pre', {{id: 'result'}}, JSON.stringify([errors, value])));
        </script>"""
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


READ = """%s.map(tokens => [reader(lens)(tokens, {n_loop: %d, rule: null})].map(found => ({
    states: found.map(one => one.groups.map(group => group.states.map(x => [...x]))),
    lens: found.map(one => one.log_p.map(steps => steps.map(x => [...x]))),
    path: found.map(one => pca_2d(one.groups.flatMap(group => group.states.slice(1)))),
    logits: found.map(one => [...one.logits])}))[0])"""


@pytest.mark.parametrize('name', ['text', 'task'])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(pages, name):
    """With learned and with rotary positions: states, logits, predictions, principal axes."""
    page = getattr(pages, name)
    model, rng = model_of(page), np.random.default_rng(0)
    V, T = model.config.vocab_size, model.config.block_size
    texts = [rng.integers(V, size=n).tolist() for n in (1, 7, min(T, 30))]
    for tokens, found in zip(texts, in_browser(page, READ % (texts, 5))):
        trace = []
        logits, _ = model(torch.tensor([tokens]), n_loop=5, trace=trace)
        states = torch.cat([one['states'] for one in trace], dim=1)             # (K+1, G, T, C)
        near = dict(atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(found['logits'], logits[0], **near)
        np.testing.assert_allclose(found['states'], states.permute(2, 1, 0, 3), **near)
        lens = torch.stack([logits_of(model, g, x) for g in range(states.shape[1])
                            for x in states[1:, g]]).log_softmax(-1)            # (G * K, T, V)
        found_lens = np.reshape(found['lens'], (len(tokens), -1, V)).swapaxes(0, 1)
        np.testing.assert_allclose(found_lens, lens, **near)
        path = paths(states.transpose(0, 1))[0].flatten(0, 1).transpose(0, 1)   # (T, G * K, 2)
        np.testing.assert_allclose(found['path'], path, atol=1e-2)


def rules_for(taus):
    return [dict(name=name, tau=tau, hits=hits, past=past, keep=EXITS[name].keep)
            for name in EXITS for tau in taus for hits in (1, 2) for past in (False, True)]


@pytest.mark.parametrize('name', ['text', 'task'])
@torch.no_grad()
def test_tokens_exit_as_in_the_model(pages, name):
    """Every rule, own and past, one hit and two: the steps kept, and what comes out."""
    page = getattr(pages, name)
    model, rules = model_of(page), rules_for((1e-3, 0.03, 0.3, 0.9))
    tokens = np.random.default_rng(1).integers(model.config.vocab_size, size=12).tolist()
    found = in_browser(page, f"""{json.dumps(rules)}.map(rule => reader()({tokens},
        {{n_loop: 9, rule: {{...rule, signal: EXITS[rule.name]}}}}).map(one =>
        [one.groups.map(group => group.steps), [...one.logits]]))""")
    seen = set()
    for rule, of_rule in zip(rules, found):
        trace = []
        exit = make_exit(rule['name'], rule['tau'], rule['hits'], past=rule['past'])
        logits, _ = model(torch.tensor([tokens]), n_loop=9, exit=exit, trace=trace)
        steps, at = zip(*of_rule)
        assert [list(one) for one in zip(*steps)] == [
            one['steps_used'][0].tolist() for one in trace], rule
        np.testing.assert_allclose(at, logits[0], atol=2e-5, rtol=1e-5)
        seen |= {step for one in steps for step in one}
    assert len(seen) > 5


def test_it_writes_what_the_model_writes(pages):
    """Greedily, with a rule, past the end of the window; each tile has the steps of its token."""
    model = model_of(pages.text)
    text, steps, written = in_browser(pages.text, """(type('12 and 144'),
        $('temperature').value = 0, $('rule').value = 'accel',
        set('hits', 2), set('tau', -0.5), set('loops', 8), [...Array(100)].forEach(write_token),
        [ids, [...$('tokens').children].map(tile => +tile.dataset.steps),
         document.querySelectorAll('.written').length])""")
    prompt = torch.tensor([[*b'12 and 144']])
    out, used = model.generate(prompt, 100, temperature=0, n_loop=8,
                               exit=make_exit('accel', 10 ** -0.5, 2))
    assert text == out[0].tolist() and written == 100
    # tokens 48 to 95 were read again when the window moved; the last one's prediction is not used
    used = [None] * 9 + used[0, :, -1].tolist()
    assert steps[9:48] == used[9:48] and steps[96:-1] == used[96:]
    assert len({*steps}) > 1


def test_it_reads_only_what_is_new(pages):
    """Reading on after a change gives what reading anew gives."""
    one, other = in_browser(pages.text, """
        [['The sane thing', 'The', 'The sbme'], []].map(before => {
        const rule = {name: 'kl', signal: EXITS.kl, tau: .01, hits: 1, keep: true, past: true};
        const read = reader(), how = {n_loop: 6, rule};
        for (const text of before) read(encode(text), how);
        return read(encode('The same'), how).map(one => [...one.logits]); })""")
    assert one == other


@pytest.mark.parametrize('text', ['', '\U0001f600 caf\u00e9', 'x' * 200, 'a\n\n\tb\r\n', NASTY])
def test_any_text_can_be_typed(pages, text):
    """Tokens are the bytes of the text; none of it becomes part of the page. Narrow window."""
    tokens, shown, scripts, wide, inner, rows = in_browser(pages.text, f"""(type({json.dumps(text)
        .replace('<', chr(92) + 'u003c')}), [ids,
        [...document.querySelectorAll('#tokens bdi')].map(b => b.textContent),
        document.querySelectorAll('#tokens script, #think script, #heat script').length,
        document.documentElement.scrollWidth, innerWidth,
        document.querySelectorAll('#think tr').length])""")
    expected = [*text.replace('\r\n', '\n').encode()] or [256]
    assert tokens == expected and len(shown) == len(expected)
    assert scripts == 0 and wide <= inner == 500 and rows == 10
    signs = {'\t': '\u2409', '\n': '\u21b5', '\x07': '\u2407', '\x7f': '\u2421', ' ': '\u00b7'}
    assert shown == [signs.get(chr(token), chr(token)) if token < 128 else
                     f'\\x{token:x}' if token < 256 else '<|endoftext|>' for token in expected]


def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages.text.read_text(encoding='utf-8')
    assert text.count('<script') == 3 and text.count('</script>') == 3
    assert record_of(pages.text)['start'] == NASTY
    assert explore.page(NASTY, NASTY, NASTY).count('<script') == 3
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\bhttps?://[^\'"]*|\b(?:src|href)="[^"]*', text))
    assert addresses == {'http://www.w3.org/2000/svg', 'href="data:,'}


def test_a_problem_keeps_the_answers_before_a_change(pages):
    x, y, depth = tasks.Problems('calc:p=2,reset=0.1').make(np.random.default_rng(3), 1, 12)
    dots = "document.querySelectorAll('#heat circle').length"
    tokens, before, after = in_browser(pages.task, f"""[ids, {dots},
        (type(decode(ids.slice(0, 6)) + '?' + R.words[1 - ids[6] % 2]), {dots})]""")
    assert tokens == x[0].tolist()
    assert [before, after] == [(y >= 0).sum(), 6]


def test_the_tiles_choose_a_token_and_play_hides_later_steps(pages):
    """By a click and an arrow key: its likeliest tokens at every step."""
    table = """[...document.querySelectorAll('#think tr')].slice(1).map(row =>
        [...row.querySelectorAll('td')].slice(1).map(cell => +cell.dataset.token))"""
    press = "new KeyboardEvent('keydown', {key: 'ArrowLeft'})"
    *rows, log_p, hidden = in_browser(pages.text, f"""(type('The quick brown'), [
        ($('tokens').children[5].click(), {table}),
        ($('tokens').children[5].dispatchEvent({press}), {table}),
        read_all(ids, {{n_loop: 9, rule: null}}).slice(4, 6).map(
            one => one.log_p[1].map(x => [...x])),
        (show_up_to(4), [...document.querySelectorAll('[data-k]')].map(mark =>
            [+mark.dataset.k, +mark.style.opacity]))])""")
    for shown, of_token in zip(rows, reversed(log_p)):
        order = np.argsort(-np.array(of_token), axis=1, kind='stable')
        assert shown == order[:, :5].tolist()
    assert {opacity == 1 for k, opacity in hidden if k <= 4} == {True}
    assert {opacity == 1 for k, opacity in hidden if k > 4} == {False}


def test_every_setting_has_a_page(pages):
    """From one loop to thirty; tiles have the steps of the chosen group."""
    settings = [[loops, rule, tau, past, g] for loops in (1, 2, 30) for rule in ('', *EXITS)
                for tau in (-6, 2) for past in (0, 1) for g in (0, 1)]
    found = in_browser(pages.text, f"""{json.dumps(settings)}.map(values => {{
        ['loops', 'rule', 'tau', 'past'].forEach((id, i) => {{ $(id).value = values[i]; }});
        set('group', values[4]);
        return [[...$('tokens').children].map(tile => +tile.dataset.steps),
                $('heat').querySelectorAll('rect').length];
    }})""")
    for (loops, rule, tau, *_), (steps, cells) in zip(settings, found):
        assert cells == len(steps) * (loops + 2)
        assert rule or {*steps} == {loops}
        assert loops < 30 or tau < 0 or not rule or {*steps} <= {1}


@pytest.mark.parametrize('flag, words', [
    ('--path=.', 'is a directory'), ('--n_loop=0', 'n_loop must lie between 1 and 30'),
    ('--out_dir=out-plain', 'no recurrent groups'), ('--seed=1', '--seed does nothing'),
    ('--out_dir=out-add', 'without injection = add')])
def test_bad_input(pages, monkeypatch, flag, words):
    monkeypatch.chdir(pages.folder)
    assert words in refused(flag, script='explore.py')
