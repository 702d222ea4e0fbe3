// The page: its text and controls, and when the model reads, writes and is drawn.
//
//     ids         the tokens of the text
//     chosen      the position of the one that is looked at
//     view        what is drawn: {tokens, shown, how, start, at, layer, labels, guesses, ...}
//       tokens    those in the model's sight, read as the controls say; see model.js
//       shown     of a text: the same, read without exits, so that all loop steps can be looked at
//       start     the position of the first of them in the text; at: of the chosen one among them
//       layer     the layer of the group that is shown
//       labels    {answer, depth}: the right answer and how deep it is, -1 where it is unknown
//     shown_step  the loop step that is shown; Infinity: the end
'use strict';
const $ = id => document.getElementById(id);
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const argmax = x => x.reduce((best, value, i) => value > x[best] ? i : best, 0);
const count = (n, word) => `${n} ${word}${n === 1 ? '' : 's'}`;

// text <-> tokens: the words of a task, or bytes --------------------------------------------------

const END = R.words.length - 1;         // of a text: the token that ends it
const decode = ids => R.task ? ids.map(id => R.words[id]).join(' ')
  : new TextDecoder().decode(Uint8Array.from(ids.filter(id => id < END)));

// -> the tokens, and a line on what was not read
function encode(text) {
  const parts = R.task ? text.split(/\s+/).filter(Boolean) : [...new TextEncoder().encode(text)];
  const unknown = R.task ? [...new Set(parts.filter(word => !R.words.includes(word)))] : [];
  const read = R.task ? parts.map(word => R.words.indexOf(word)).filter(id => id >= 0) : parts;
  const lines = [];
  if (unknown.length) {
    const few = unknown.slice(0, 5).map(word => word.slice(0, 20)).join(', ');
    lines.push(`Not a word, and not read: ${few}${unknown.length > 5 ? ', \u2026' : ''}. ` +
               `The words are ${R.words.join(' ')}, with blanks between them.`);
  }
  if (read.length > R.most)
    lines.push(`Only the first ${R.most} ${R.task ? 'words' : 'letters (bytes)'} are read; ` +
               `${read.length - R.most} more are left out.`);
  return {tokens: read.slice(0, R.most), notice: lines.join(' ')};
}

// where the model's sight begins: it moves by half a block (decode)
const half_block = Math.max(1, M.block_size >> 1);
const sight_of = n => half_block * Math.max(0, Math.ceil((n - M.block_size) / half_block));

// of a text the next token is the label; of calc what tasks.Calc computes; of another task the
// labels of its problem, up to the first change
function labels_of(ids) {
  if (!R.task) return ids.map((_, t) => ({answer: ids[t + 1] ?? -1, depth: -1}));
  const {p, right, depth} = R.task, changed = R.task.ids.findIndex((id, t) => id !== ids[t]);
  let value = NaN, steps = 0;
  return ids.map((id, t) => {
    if (!p) {
      const known = t < right.length && (changed < 0 || t < changed);
      return {answer: known ? right[t] : -1, depth: known ? depth[t] : -1};
    }
    const sign = R.words[id][0], n = +R.words[id].slice(1);     // token n is the word `=n`
    value = (sign === '=' ? n : sign === '+' ? value + n : value * n) % p;
    steps = sign === '=' ? 0 : steps + 1;
    return isNaN(value) ? {answer: -1, depth: -1} : {answer: value, depth: steps};
  });
}

// the controls ------------------------------------------------------------------------------------

const CONTROLS = ['rule', 'loops', 'tau', 'hits', 'wake', 'reading', 'temperature', 'group'];
const BASES = {loops: 2, tau: 10};      // of sliders in logarithms
const get = id => BASES[id] ? BASES[id] ** +$(id).value : $(id).value;
function set(id, value) {
  $(id).value = BASES[id] ? Math.log(value) / Math.log(BASES[id]) : value;
}
function set_rule(name) {
  set('rule', name);
  set('hits', R.rules[name]?.hits ?? 1);
  set('tau', R.rules[name]?.tau ?? .1);
  set('loops', name ? R.loops : Math.min(R.loops, 32));
}

function how_to_read() {
  const name = get('rule');
  const hits = Math.max(1, Math.round(get('hits')) || 1);
  // without a rule: no signal lies below 0
  const rule = name ? {signal: name, tau: get('tau'), hits, keep: R.rules[name].keep}
                    : {signal: 'norm_rel', tau: 0, hits: 1, keep: true};
  return {rule, loops: Math.round(get('loops')), wake: get('wake') === '1',
          one_by_one: get('reading') === '1'};
}

// The state of the page stands in its address: text, controls and token, where they are not as at
// first. The address follows a little later, since browsers bear few changes in a second
let at_first = {}, sharing = 0;
function state_of_page() {
  const state = {text: $('text').value};
  for (const id of CONTROLS) state[id] = `${BASES[id] ? +get(id).toPrecision(4) : get(id)}`;
  return state;
}
function share() {
  clearTimeout(sharing);
  const state = Object.entries(state_of_page()).filter(([id, value]) => value !== at_first[id]);
  if (chosen !== ids.length - 1) state.push(['token', chosen]);
  history.replaceState(null, '', `#${new URLSearchParams(state)}`);
}
function share_soon() {
  clearTimeout(sharing);
  sharing = setTimeout(share, 400);
}
function take_address() {
  const state = {...at_first, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))};
  const fits = id => $(id).options ? [...$(id).options].some(({value}) => value === state[id])
    : BASES[id] ? +state[id] > 0 : +state[id] >= 0;
  for (const id of CONTROLS) set(id, fits(id) ? state[id] : at_first[id]);
  $('text').value = state.text;
  take_text();
  chosen = between(0, Math.floor(+(state.token ?? Infinity)) || 0, Math.max(0, ids.length - 1));
  return update();
}

// the model reads ---------------------------------------------------------------------------------

let ids = [];
let chosen = 0;
let written = 0;                        // from this position on, the model has written the text
let known_steps = [];                   // of each token of the text: its loop steps in each group
let view = null;
let shown_step = Infinity;
let newest = 0;                         // how many times the page has begun to read
let drawn = Promise.resolve();          // kept when the newest text has been read and drawn

// a generator that reads tokens, and reads again only what depends on a change
function reader() {
  let settings = '', tokens = [];
  return function* (ids, how, repair) {
    const wanted = JSON.stringify(how);
    const edit = edited(wanted === settings ? tokens : [], ids, repair);
    yield edit.tokens;
    yield* read(edit.tokens, edit.from, how);
    settings = wanted;
    tokens = edit.tokens;
  };
}
let read_with_exits = reader();
const read_without = reader();

// read the text in slices, so that the page answers meanwhile, and draw it. The newest text wins
const update = () => drawn = read_and_draw();
async function read_and_draw() {
  const turn = ++newest;
  if (!ids.length) return draw_nothing();
  const next = new_view();
  let paused = performance.now(), next_picture = paused + 60;
  for (const work = passes(next); !work.next().done;) {
    const now = performance.now();
    if (now - paused < 12) continue;
    if (now > next_picture) {           // a fifth of the time, at most
      draw_progress(next);
      next.pictured = true;
      next_picture = now + Math.max(60, 5 * (performance.now() - now));
    }
    await (globalThis.scheduler?.yield?.() ?? new Promise(done => setTimeout(done)));
    if (turn !== newest) return drawn;
    paused = performance.now();
  }
  view = next;
  draw_view();
  share_soon();
}

function new_view() {
  const start = sight_of(ids.length), how = how_to_read();
  chosen = between(start, chosen, ids.length - 1);
  $('tau-shown').textContent = get('tau').toPrecision(3);
  $('loops-shown').textContent = how.loops;
  $('wake').disabled = !get('rule') || how.one_by_one;
  return {how, start, at: chosen - start, tokens: [], group: +get('group'),
          layer: M.groups[get('group')], labels: labels_of(ids.slice(start)), guesses: []};
}

function* passes(next) {
  const {how, start, layer} = next, in_sight = ids.slice(start);
  const together = get('rule') && !how.one_by_one;
  // a problem is repaired after an edit; of a text the same letters always give the same states
  const reading = read_with_exits(in_sight, how, R.task && together && how.wake);
  next.tokens = reading.next().value;
  yield* reading;
  next.shown = next.tokens;
  if (!R.task && together) {
    const reading = read_without(in_sight, {...how, rule: {...how.rule, tau: 0}}, false);
    next.shown = reading.next().value;
    yield* reading;
  }
  next.passes = Math.max(1, ...next.shown.map(({cells}) => cells[layer].frames.at(-1).k));
  next.tokens.forEach((token, t) => known_steps[start + t] = M.groups.map(i => evals(token, i)));
  yield* ask_chosen(next);
}

// in how many loop steps a token was computed, in layer i
const evals = ({cells}, i) => cells[i].frames.length - 1;

// what the chosen token answers after each of its loop steps; after some of them if they are many
function* ask_chosen(next) {
  const {shown, at, layer, guesses} = next;
  next.frames = shown[at].cells[layer].frames.filter(({k, kept}) => k || kept);
  const every = Math.ceil(next.frames.length / MOST_ROWS);
  guesses.thinned = every > 1;
  for (const {k} of next.frames.filter((_, n) => n % every === 0)) {
    guesses.push({k, log_p: log_softmax(lens(shown, layer, k, at)[0])});
    yield;
  }
}

// drawing -----------------------------------------------------------------------------------------

function draw_nothing() {
  view = null;
  $('tokens').replaceChildren();
  $('summary').textContent = `There is no word to read. Type some of ${R.words.join(' ')}`;
  for (const id of ['map', 'think', 'signal', 'chosen']) $(id).replaceChildren();
}

function draw_progress(next) {
  if (!next.pictured) draw_tiles(next);
  if (!next.tokens[0]?.cells[next.layer]) return;
  draw_map(next);
  const awake_at = k => next.tokens.filter(({cells}) => cells[next.layer]?.frames.at(-1).k === k);
  const k = Math.max(...next.tokens.map(({cells}) => cells[next.layer]?.frames.at(-1).k ?? 0));
  $('summary').textContent = `Loop ${k}: ${count(awake_at(k).length, 'token')} awake \u2026`;
}

function draw_view() {
  const {labels, at, start, layer, tokens, shown} = view, {answer, depth} = labels[at];
  if (!canvas.isConnected) $('map').replaceChildren(canvas);
  draw_tiles(view);
  $('chosen').textContent = `Token ${start + at}, ${R.words[ids[start + at]]}` +
    (answer >= 0 ? `: ${R.words[answer]} is ${R.task ? 'right' : 'the next token'}` : '') +
    (depth >= 0 ? `, depth ${depth}` : '');
  draw_think(view);
  draw_signal(view.frames, view.how.rule);
  if (M.groups.length > 1) draw_path(M.groups.map(i => ({
    states: shown[at].cells[i].frames.slice(1).map(frame => frame.x),
    steps: tokens[at].cells[i].frames.slice(1).filter(({thrown}) => !thrown).length,
  })), R.names);
  $('step').max = view.passes;
  reveal();
}

// the last loop step whose result a token keeps
const steps_kept = ({frames}) => frames.reduce((k, frame) => frame.thrown ? k : frame.k, 0);

// a tile: token, answer, loop steps. Those of the text before are used again
function draw_tiles({start, group}) {
  const box = $('tokens');
  while (box.children.length > ids.length) box.lastChild.remove();
  while (box.children.length < ids.length) {
    const i = box.children.length;
    const tile = make('button', {type: 'button'}, make('bdi', {}), make('small', {}),
                      make('small', {class: 'soft'}));
    tile.onclick = () => choose(i);
    box.append(tile);
  }
  ids.forEach((token, i) => {
    const tile = box.children[i], [word, answer, steps] = tile.children;
    if (word.textContent !== R.words[token]) answer.textContent = '\u2026';
    put(word, R.words[token]);
    put(steps, `${known_steps[i]?.[group] ?? ''}`);
    tile.setAttribute('aria-label', `${R.words[token]}, loop steps: ${steps.textContent}`);
    tile.setAttribute('aria-pressed', i === chosen);
    tile.tabIndex = i === chosen ? 0 : -1;
    tile.disabled = i < start;
    tile.className = i < written ? '' : 'written';
  });
}
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// what is there after loop step `shown_step`: answers, who is awake, what the panels show
function reveal() {
  const {passes, tokens, shown, layer, labels, start} = view, k = Math.min(shown_step, passes);
  const at_end = shown_step >= passes;
  const answers = at_end ? tokens.map(({logits}) => argmax(logits))
    : k ? lens(shown, layer, k).map(argmax) : [];
  const is_wrong = t => R.task && t in answers && labels[t].answer >= 0 &&
    answers[t] !== labels[t].answer;
  const wrong = [...labels.keys()].filter(is_wrong);
  const awake = tokens.filter(({cells}) => !at_end && k && frame_at(cells[layer], k).k === k);
  const is_awake = new Set(awake);
  [...$('tokens').children].slice(start).forEach((tile, t) => {
    const small = tile.children[1], cross = is_wrong(t) ? '\u2717' : '';
    put(small, t in answers ? R.words[answers[t]] + cross : '\u2026');
    small.className = is_wrong(t) ? 'wrong' : '';
    tile.classList.toggle('awake', is_awake.has(tokens[t]));
  });
  $('step').value = k;
  $('step-shown').textContent = `${k} of ${passes}`;
  for (const mark of document.querySelectorAll('[data-k]'))
    mark.style.opacity = mark.dataset.k > k ? .1 : 1;
  draw_map(view, at_end ? Infinity : k, wrong);
  $('summary').textContent = at_end ? summary_at_end(view, wrong.length)
    : summary_of_step(view, k, answers.length ? wrong.length : NaN, awake.length);
}

// the summary: what one sees, in words ------------------------------------------------------------

const labelled = labels => labels.filter(({answer}) => answer >= 0).length;
const share_right = (labels, n_wrong) =>
  `${labelled(labels) - n_wrong} of ${count(labelled(labels), 'answer')} right`;

function summary_of_step({labels, tokens}, k, n_wrong, n_awake) {
  if (isNaN(n_wrong)) return 'Before the first loop: every state is noise.';
  const right = R.task && labelled(labels) ? `${share_right(labels, n_wrong)}, ` : '';
  return `After loop ${k}: ${right}${n_awake} of ${count(tokens.length, 'token')} awake.`;
}

function summary_at_end(view, n_wrong) {
  if (!R.task) return summary_of_text(view);
  const {labels, tokens, layer, how, passes} = view, sentences = [];
  const with_rule = get('rule') !== '', for_good = with_rule && !how.wake && !how.one_by_one;
  if (labelled(labels))
    sentences.push(share_right(labels, n_wrong) + (n_wrong && for_good
      ? ': the others stopped before the news had reached them.' : '.'));
  const computed = tokens.map(token => evals(token, layer));
  const average = `A token was computed ${mean(computed).toFixed(1)} times on average`;
  if (tokens.some(({cells}) => cells[layer].frames[0].kept)) {
    const woken = computed.filter(n => n).length;
    sentences.push(`Your change: ${count(woken, 'token')} of ${tokens.length} woke, for ` +
                   `${count(woken && passes, 'loop')}; the others slept.`);
    if (n_wrong) sentences.push('To read it anew, from noise: "let it wake".');
  } else if (how.one_by_one) {
    sentences.push(`One by one: ${passes} passes one after another. ${average}, since all that ` +
                   'it reads is done.');
  } else {
    const slept = with_rule && how.wake ? ', and slept the rest' : '';
    sentences.push(`${count(passes, 'loop')}${travel(view, n_wrong)}. ${average}${slept}.`);
  }
  const moving = tokens.filter(({cells}) => cells[layer].frames.at(-1).moved).length;
  if (with_rule && moving && passes >= how.loops)
    sentences.push(`The budget of ${how.loops} loops is spent, and ${moving} still move.`);
  return sentences.join(' ');
}

// how far the deepest answer has come in a loop, if it has arrived
function travel({labels, how, passes}, n_wrong) {
  const deepest = Math.max(...labels.map(({depth}) => depth));
  if (deepest < 1 || n_wrong || !get('rule') || !how.wake) return '';
  return `, and the deepest answer has depth ${deepest}: it travelled about ` +
    `${(deepest / passes).toFixed(1)} tokens per loop`;
}

function summary_of_text({labels, tokens, shown, how}) {
  const nats = read => mean(read.filter((_, t) => labels[t].answer >= 0).map(({logits}, t) =>
    -log_softmax(logits)[labels[t].answer])).toFixed(3);
  const steps = R.names.map((name, g) =>
    `${mean(tokens.map(token => evals(token, M.groups[g]))).toFixed(2)} (${name})`);
  const loss = tokens.length < 2 ? '' : ` Loss: ${nats(tokens)} nats per byte` +
    (shown === tokens ? '.' : `; ${nats(shown)} with all ${how.loops}.`);
  return `Loop steps on average, of ${how.loops}: ${steps.join(', ')}.${loss}`;
}

// what a reader does ------------------------------------------------------------------------------

async function choose(i) {
  chosen = i;
  await update();
  $('tokens').children[chosen]?.focus();
}
$('tokens').onkeydown = event => {
  const to = chosen + {ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9}[event.key];
  if (isNaN(to)) return;
  choose(between(0, to, ids.length - 1));
  event.preventDefault();
};
canvas.onclick = event => choose(view.start + place_on_map(view, event).t);
canvas.onmousemove = event => {
  const {t, k, awake} = place_on_map(view, event);
  canvas.title = `token ${view.start + t}, ${R.words[view.tokens[t].id]}, loop ${k}: ` +
    (awake ? 'awake' : 'asleep');
};

function take_text() {
  const {tokens, notice} = encode($('text').value), before = ids;
  $('notice').textContent = notice;
  ids = tokens.length || R.task ? tokens : [END];
  let same = 0;
  while (same < ids.length && ids[same] === before[same]) same++;
  known_steps.length = Math.min(known_steps.length, same);
  written = ids.length;
  chosen = ids.length - 1;
  stop_writing();
  show_step(Infinity);
  return update();
}

// The model writes: tokens drawn from what the last one predicts, at this temperature
// (decode.choose). `writing` changes with each start and stop
const MOST_WRITTEN = 400;       // letters a click
let writing = 0;

function write_token() {
  const temperature = Math.max(0, +get('temperature')), {logits} = view.tokens.at(-1);
  const gumbel = () => -Math.log(-Math.log(Math.random()));
  ids.push(argmax(temperature ? logits.map(value => value / temperature + gumbel()) : logits));
  chosen = ids.length - 1;
  put_text(decode(ids));
  return update();
}
// the caret stays where the reader has put it, so that a letter typed meanwhile lands there
function put_text(text) {
  const box = $('text'), {selectionStart, selectionEnd} = box;
  const at_end = selectionEnd === box.value.length;
  box.value = text;
  if (!at_end) box.setSelectionRange(selectionStart, selectionEnd);
}
function stop_writing() {
  writing = 0;
  $('write').textContent = 'write on';
}
async function write() {
  const mine = writing = Math.random();
  $('write').textContent = 'stop';
  for (let n = 0; n < MOST_WRITTEN && ids.length < R.most && writing === mine; n++) {
    await write_token();
    if (ids.at(-1) === END) break;
    await new Promise(done => setTimeout(done, 30));
  }
  if (writing !== mine) return;
  stop_writing();
  if (ids.length >= R.most)
    $('notice').textContent = `The text is full: the page has room for ${R.most} letters.`;
}

// step by step: the whole run in about eight seconds
let playing = false;
function show_step(k) {
  shown_step = k;
  if (k === Infinity) stop_playing();
}
function stop_playing() {
  playing = false;
  $('play').textContent = '\u25b6 step by step';
}
async function play() {
  playing = true;
  $('play').textContent = '\u25a0 stop';
  const stride = Math.ceil(view.passes / 400);
  for (let k = 0; playing && k < view.passes; k += stride) {
    shown_step = k;
    reveal();
    pulse();
    await new Promise(done => setTimeout(done, between(20, 8000 / view.passes, 500)));
  }
  if (!playing) return;
  show_step(Infinity);
  reveal();
}
function pulse() {
  $('scheme').classList.remove('pulse');
  void $('scheme').offsetWidth;         // so that the animation starts again
  $('scheme').classList.add('pulse');
}

// problems for a reader to look at: one chain, as deep as it is long. The same numbers each time
let n_problems = 0;
function chain() {
  n_problems++;
  let seed = n_problems;
  const draw = words => words[(seed = seed * 48271 % 2147483647) % words.length];
  const sets = R.words.filter(word => word[0] === '=');
  const changes = R.words.filter(word => word[0] !== '=');
  for (let n = 0; n < 10; n++) draw(sets);              // numbers near the seed are alike
  return [draw(sets.slice(1)), ...Array.from({length: R.deep - 1}, () => draw(changes))].join(' ');
}
function tell(text, wake) {
  set_rule(R.rule);
  set('wake', wake);
  set('reading', '');
  $('text').value = text;
  read_with_exits = reader();           // from noise
  return take_text();
}
// the problem in the box, if it is a deep one
const deep_text = () => Math.max(...labels_of(ids).map(({depth}) => depth)) >= R.deep / 3
  ? $('text').value : chain();

// the page begins ---------------------------------------------------------------------------------

for (const name of Object.keys(R.rules).filter(name => SIGNALS[name]))
  $('rule').append(make('option', {value: name}, name));
R.names.forEach((name, g) => $('group').append(make('option', {value: g}, name)));
$('loops').max = Math.log2(R.most_loops);
$('group').parentNode.hidden = $('path-panel').hidden = M.groups.length === 1;
$('write').hidden = $('temperature').parentNode.hidden = !!R.task;
$('stories').hidden = !R.task?.p;
for (const node of document.querySelectorAll(R.task ? '.texts' : '.task')) node.hidden = true;
$('key-awake').style.background = `linear-gradient(90deg, ${VIRIDIS})`;
draw_scheme(R.names);

set_rule(R.rule);
set('group', M.groups.length - 1);
set('wake', R.task ? '1' : '0');        // as sample.py does, see decode/defaults.py
$('text').value = R.start;
at_first = state_of_page();

$('text').oninput = take_text;
$('rule').oninput = () => set_rule(get('rule'));
for (const id of CONTROLS)
  if (id !== 'temperature') $(id).addEventListener('input', () => update());
$('deep').onclick = () => tell(chain(), '1');
$('early').onclick = () => tell(deep_text(), '0');
$('again').onclick = () => tell(deep_text(), '1');
$('write').onclick = () => writing ? stop_writing() : write();
$('play').onclick = () => {
  if (playing) stop_playing();
  else if (view) play();
};
$('step').oninput = () => {
  if (!view) return;
  stop_playing();
  show_step(+$('step').value < view.passes ? +$('step').value : Infinity);
  reveal();
};
onhashchange = take_address;
onresize = () => view && reveal();
take_address();
