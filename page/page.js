'use strict';
const R = JSON.parse(document.getElementById('record').textContent), M = R.model;
const $ = id => document.getElementById(id);
const G = R.names.length, mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const argmax = x => x.reduce((best, value, i) => value > x[best] ? i : best, 0);

// the numbers of the model, which are base64 here
const numbers = (text, type) => new Float32Array(new type(Uint8Array.fromBase64(text).buffer));
M.x0 = M.noise.map(text => numbers(text, Float32Array));
M.W = {};
for (const [name, text] of Object.entries(M.weights))
  M.W[name] = numbers(text, M.half ? Float16Array : Float32Array);

// the signals of exits.py: (x0, x1, memo, read) -> [value, memo]; the value is undefined at first
const EPS = 1e-8, minus = (a, b) => a.map((value, i) => value - b[i]);
const vector_norm = x => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
function accel(x0, x1, memo, over) {            // over: what the acceleration is divided by
  const delta = minus(x1, x0);
  return [memo && vector_norm(minus(delta, memo)) / over(delta), delta];
}
const SIGNALS = {
  norm: (x0, x1) => [vector_norm(minus(x1, x0))],
  norm_rel: (x0, x1) => [vector_norm(minus(x1, x0)) / (vector_norm(x0) + EPS)],
  kl(x0, x1, memo, read) {
    const before = memo ?? log_softmax(read(x0)), now = log_softmax(read(x1));
    return [Math.max(0, now.reduce((sum, p, i) => sum + Math.exp(p) * (p - before[i]), 0)), now];
  },
  accel: (x0, x1, memo) => accel(x0, x1, memo, () => 1),
  accel_hat: (x0, x1, memo) =>
    accel(x0, x1, memo, delta => vector_norm(delta) + vector_norm(memo) + EPS),
  accel_rel: (x0, x1, memo) => accel(x0, x1, memo, () => vector_norm(x0) + EPS),
};

// Algorithm 1 for any signal: a function that says whether a token exits. `signals`: of this loop
// step, by position; -Infinity where a token has exited, so that nobody waits for it
function make_exit({name, tau, hits, past, keep}) {
  return (token, signals) => {
    const [x0, x1] = token.states.slice(-2);
    [signals[token.t], token.memo] = SIGNALS[name](x0, x1, token.memo, readout);
    const value = Math.max(...signals.subarray(past ? 0 : token.t, token.t + 1));
    token.streak = value < tau ? (token.streak ?? 0) + 1 : 0;   // NaN, while undefined, is no hit
    if (token.streak >= hits && !keep) token.states.pop();      // the step that triggered
    return token.streak >= hits;
  };
}

// text <-> tokens: bytes, or the words of a task
const word = RegExp(R.words.map(text => text.replace(/\W/g, '\\$&'))
  .sort((a, b) => b.length - a.length).join('|'), 'g');
const encode = text => R.problem ? (text.match(word) ?? []).map(text => R.words.indexOf(text))
                                 : [...new TextEncoder().encode(text)];
const decode = ids => R.problem ? ids.map(id => R.words[id]).join(' ')
  : new TextDecoder().decode(Uint8Array.from(ids.filter(id => id < 256)));

// a generator that reads tokens, and does not read again what it has read before in the same way
function reader() {
  let how, tokens, found, memory;
  return function* (ids, n_loop, rule) {
    const settings = JSON.stringify([n_loop, rule]);
    if (settings !== how) [how, tokens, found, memory] = [settings, [], [], {}];
    const other = ids.findIndex((id, t) => id !== tokens[t]), same = other < 0 ? ids.length : other;
    [tokens, found] = [tokens.slice(0, same), found.slice(0, same)];
    if (other < 0) return found;
    const fresh = yield* read(ids, same, memory, {n_loop, rule: rule && {exits: make_exit(rule)}});
    tokens = ids;
    return found = [...found, ...fresh];
  };
}
const read_without = reader(), read_with_exits = reader();

// what all tokens predict, or token t alone, from their states after step k of group g; those of
// the last group go through the layers after it (geometry.logits_of)
const coda = M.layers.map((_, i) => `h.${i}`).slice(1 + M.layers.findLastIndex(core => core[0]));
function lens({full, g}, k, t) {
  const at = [...full.keys()], memory = {}, V = R.words.length;
  let X = stack(full.map(one => one.groups[g].states[k]));
  for (const name of g < G - 1 ? [] : coda) {
    if (t === undefined || name !== coda.at(-1)) X = block(name, X, at, k, memory);
    else {      // of the other tokens, only keys and values are needed
      attention(name + '.attn', norm(name + '.n1', X), at, table(memory, name, k, 2 * M.C));
      return [readout(block(name, row(X, t), [t], k, memory))];
    }
  }
  const logits = readout(t === undefined ? X : row(X, t));
  return Array.from({length: logits.length / V}, (_, n) => row(logits, n, V));
}

// where the context window begins, as in decode.window
const hop = Math.max(1, M.block_size >> 1);
const window_of = n => hop * Math.max(0, Math.ceil((n - M.block_size) / hop));

// the right answer of each token and its depth, -1 if unknown: of a text the next token; of calc
// what tasks.Calc computes; of another task those of its problem, up to the first change
function answers(tokens) {
  const {p, ids: before, right, depth} = R.problem ?? {};
  const same = before?.findIndex((id, t) => id !== ids[t]);     // -1: all of them
  let value = NaN, steps = 0;
  return tokens.map((id, t) => {
    if (!R.problem) return [tokens[t + 1] ?? -1, -1];
    if (!p) return same < 0 || t < same ? [right[t] ?? -1, depth[t]] : [-1, -1];
    const sign = R.words[id][0], n = +R.words[id].slice(1);     // token n is the word `=n`
    value = (sign === '=' ? n : sign === '+' ? value + n : value * n) % p;
    steps = sign === '=' ? 0 : steps + 1;
    return isNaN(value) ? [-1, -1] : [value, steps];
  });
}

// text is only ever set as textContent or value
function make(name, attributes, ...children) {
  const svg = ['svg', 'rect', 'line', 'circle', 'text'].includes(name);
  const node = svg ? document.createElementNS('http://www.w3.org/2000/svg', name)
                   : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// viridis, from light to dark: by a share from 0 to 1, or by loop steps
const VIRIDIS =
  '#fde725 #addc30 #5ec962 #28ae80 #21918c #2c728e #3b528b #472d7b #440154'.split(' ');
const colour = share => VIRIDIS[Math.round(8 * Math.min(1, Math.max(0, share)))];
const of_steps = k => colour(Math.log(k || 1) / Math.log(+$('loops').value + .1));

// the text; where the model has written it; the token that is looked at; the loop steps of each
let ids = [], written = 0, chosen = 0, kept = [], shown = Infinity, view, newest = 0, drawn;

// read the text in slices, so that the page answers meanwhile, and draw it. The newest text wins
const update = () => drawn = read_and_draw();
async function read_and_draw() {
  const v = view_of_controls(), turn = ++newest, work = passes(v);
  for (let since = performance.now(); !work.next().done;) {
    if (performance.now() - since < 12) continue;
    await (globalThis.scheduler?.yield() ?? new Promise(done => setTimeout(done)));
    if (turn !== newest) return drawn;
    since = performance.now();
  }
  view = v;
  for (const panel of [heat, think, signal, path, summary]) panel(v);
  reveal();
}

function view_of_controls() {
  const K = +$('loops').value, tau = 10 ** +$('tau').value, name = $('rule').value;
  const hits = Math.max(1, Math.round(+$('hits').value) || 1), past = $('past').value === '1';
  const rule = name ? {name, tau, hits, past, keep: R.rules[name].keep} : null;
  const start = window_of(ids.length), tokens = ids.slice(start), known = answers(tokens);
  chosen = Math.min(Math.max(chosen, start), ids.length - 1);
  $('tau-shown').textContent = tau.toPrecision(3);
  $('loops-shown').textContent = $('k').max = K;
  return {K, tau, rule, name: name || 'norm_rel', g: +$('group').value, tokens, start,
          t: chosen - start, right: known.map(one => one[0]), depth: known.map(one => one[1])};
}

// with exits, which is drawn at once; without; and what the chosen token predicts step by step
function* passes(v) {
  v.real = yield* read_with_exits(v.tokens, v.K, v.rule);
  v.steps = v.real.map(one => one.groups[v.g].steps);
  kept = [...kept.slice(0, v.start), ...v.real.map(one => one.groups.map(({steps}) => steps))];
  tiles(v);
  v.full = v.rule ? yield* read_without(v.tokens, v.K, null) : v.real;
  v.log_p = [];
  for (let k = 1; k <= v.K; k++) {
    v.log_p.push(log_softmax(lens(v, k, v.t)[0]));
    yield;
  }
}

function summary({K, full, real, right}) {
  const labelled = [...right.keys()].filter(t => right[t] >= 0), n = labelled.length;
  const loss = found => mean(labelled.map(t => -log_softmax(found[t].logits)[right[t]])).toFixed(4);
  const hit = found => labelled.filter(t => argmax(found[t].logits) === right[t]).length;
  const steps = R.names.map((name, g) =>
    `${mean(real.map(one => one.groups[g].steps)).toFixed(2)} (${name})`);
  $('summary').textContent = `Loop steps: ${steps.join(', ')}, of ${K}.`;
  if (n) $('summary').append(` With exits: ${loss(real)} nats, ${hit(real)} of ${n} right; ` +
                             `without: ${loss(full)}, ${hit(full)}.`);
}

function tiles(v) {
  $('tokens').replaceChildren(...ids.map((token, i) => {
    const steps = kept[i]?.[v.g] ?? '', back = of_steps(steps), button = make('button', {
      type: 'button', 'aria-pressed': i === chosen, tabindex: i === chosen ? 0 : -1,
      'aria-label': `${R.words[token]}, loop steps: ${steps}`, class: i < written ? '' : 'written',
      style: `background: ${back}; color: ${VIRIDIS.indexOf(back) > 3 ? '#fff' : '#111'}`,
    }, make('bdi', {}, R.words[token]), make('small', {}, `${steps}`), make('small', {}));
    return Object.assign(button, {disabled: i < v.start, onclick: () => choose(i)});
  }));
  guess(v, v.real.map(({logits}) => argmax(logits)));
}
function guess({start, right}, tokens) {        // right or wrong? For a problem alone
  [...$('tokens').children].slice(start).forEach((tile, t) => {
    const sign = !R.problem || right[t] < 0 ? '' : tokens[t] === right[t] ? ' \u2713' : ' \u2717';
    tile.lastChild.textContent = t in tokens ? R.words[tokens[t]] + sign : '\u2026';
  });
}
async function choose(i) {
  chosen = i;
  await update();
  $('tokens').children[chosen].focus();
}
$('tokens').onkeydown = event => {
  const to = chosen + {ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9}[event.key];
  if (!isNaN(to)) choose(to), event.preventDefault();
};

// hide what comes after loop step `shown`: each mark of a panel knows its step
function reveal() {
  const k = Math.min(shown, view.K);
  $('k').value = $('k-shown').textContent = k;
  for (const mark of document.querySelectorAll('[data-k]'))
    mark.style.opacity = mark.dataset.k > k ? .1 : 1;
  const found = shown > k ? view.real.map(one => one.logits) : k ? lens(view, k) : [];
  guess(view, found.map(argmax));
}

// the parts of pictures
const svg = (w, h, label) =>
  make('svg', {viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': label});
const text = (x, y, words, how) => make('text', {x, y, ...how}, words);
const line = ([x1, y1], [x2, y2], how) => make('line', {x1, y1, x2, y2, ...how});
const dot = ([cx, cy], k, how) =>
  make('circle', {cx, cy, r: 4, fill: of_steps(k), 'data-k': k, ...how});
const ticks = (K, x, y) => [...Array(K + 1).keys()].filter(k => k % Math.ceil(K / 8) === 0)
  .map(k => text(x(k), y, `${k}`));

function heat({K, g, full, tokens, t: at, right, depth, steps}) {
  const left = 74, width = Math.max(8, Math.floor(420 / (K + 1))), height = 13;
  const x = k => left + width * k, bottom = height * tokens.length;
  const distance = full.map(({groups: {[g]: {states}}}) =>
    states.map(x => vector_norm(minus(x, states[K]))));
  const logs = distance.flat().filter(d => d > 0).map(Math.log10), top = Math.max(-9, ...logs);
  const fill = d => colour(d > 0 ? (top - Math.log10(d)) / 4 : 1);      // over four decades
  const box = (t, k, how) => make('rect', {x: x(k), y: height * t, width: width - .5,
                                           height: height - .5, 'data-k': k, ...how});
  const rows = tokens.flatMap((token, t) => [
    text(left - 5, height * t + 10, R.words[token].slice(0, 10),
         {style: `text-anchor: end; ${t === at ? 'fill: var(--mark)' : ''}`}),
    ...distance[t].map((d, k) => box(t, k, {fill: fill(d)})), box(t, steps[t], {class: 'mark'}),
    ...R.problem && right[t] >= 0 ? [make('circle', {
      cx: x(depth[t] + .5), cy: height * (t + .5), r: 3, class: 'depth'})] : []]);
  const picture = svg(x(K + 1), bottom + 18, 'distance to the last state by token and loop step');
  picture.append(...rows, ...ticks(K, k => x(k + .5), bottom + 13));
  $('heat').replaceChildren(picture);
}

function think({t, tokens, log_p, right, depth, steps}) {
  $('chosen').textContent = `Token ${chosen}, ${R.words[tokens[t]]}` +
    (right[t] >= 0 ? `; right answer ${R.words[right[t]]}` : '') +
    (right[t] >= 0 && R.problem ? `, depth ${depth[t]}` : '');
  $('think').replaceChildren(...log_p.map((log_p, i) => {
    const best = [...log_p.keys()].sort((a, b) => log_p[b] - log_p[a]).slice(0, 5);
    return make('tr', {'data-k': i + 1, class: steps[t] === i + 1 ? 'exits' : ''},
      make('th', {}, `${i + 1}`), ...best.map(token =>
        make('td', {'data-token': token, class: token === right[t] ? 'right' : ''},
             make('bdi', {}, R.words[token]), ` ${(100 * Math.exp(log_p[token])).toFixed(0)}`)));
  }));
}

function signal({K, name, g, t, tau, full}) {
  const w = 460, h = 190, left = 48, bottom = 24, {states} = full[t].groups[g], points = [];
  let memo, value;
  for (let k = 1; k <= K; k++) {
    [value, memo] = SIGNALS[name](states[k - 1], states[k], memo, readout);
    if (value > 0) points.push([k, value]);
  }
  const logs = [...points.map(([, s]) => Math.log10(s)), Math.log10(tau)];
  const low = Math.max(-9, Math.floor(Math.min(...logs)));
  const top = Math.max(low + 1, Math.ceil(Math.max(...logs)));
  const x = k => left + (w - left - 6) * (k - 1) / Math.max(1, K - 1);
  const y = s => (h - bottom) * (top - Math.max(low, Math.log10(s))) / (top - low) + 4;
  const at = ([k, s]) => [x(k), y(s)], picture = svg(w, h, `${name} by loop step`);
  for (let e = low; e <= top; e++)
    picture.append(line([left, y(10 ** e)], [w, y(10 ** e)], {class: 'grid'}),
                   text(left - 6, y(10 ** e) + 4, `1e${e}`, {style: 'text-anchor: end'}));
  picture.append(line([left, y(tau)], [w, y(tau)], {class: 'mark', 'stroke-dasharray': '6 4'}),
    ...points.slice(1).map((p, i) => line(at(points[i]), at(p), {'data-k': p[0]})),
    ...points.map(p => dot(at(p), p[0])), ...ticks(K, x, h - 4).slice(1));
  $('signal').replaceChildren(picture);
}

// states -> their places on two principal axes, by power iteration
function pca_2d(states) {
  const middle = states[0].map((_, i) => mean(states.map(x => x[i])));
  const X = states.map(x => minus(x, middle));
  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  let products = X.map(a => X.map(b => dot(a, b)));
  const places = [0, 1].map(() => {
    let axis = X.map((_, n) => Math.sin(n * n + 1)), size;
    for (let i = 0; i < 100; i++) {
      const next = products.map(row => dot(row, axis));
      size = vector_norm(next) || 1;
      axis = next.map(value => value / size);
    }
    products = products.map((row, n) => row.map((value, m) => value - size * axis[n] * axis[m]));
    return axis.map(value => value * Math.sqrt(size));
  });
  return X.map((_, n) => places.map(on_axis => on_axis[n]));
}

// points around `middle`, which is `half` from the nearer sides of a panel -> their places on it
const placed = (points, middle, half, w, h) => points.map(p => [0, 1].map(i => [w, h][i] / 2 +
  (i ? -1 : 1) * Math.min(w, h) / 2 * (p[i] - middle[i]) / (half || 1)));

function path({K, t, full, real}) {
  const flat = pca_2d(full[t].groups.flatMap(({states}) => states.slice(1)));
  const [[x0, x1], [y0, y1]] = [0, 1].map(i => flat.map(p => p[i]))
    .map(all => [Math.min(...all), Math.max(...all)]);
  const half = .75 * Math.max(x1 - x0, y1 - y0);
  const all = placed(flat, [(x0 + x1) / 2, (y0 + y1) / 2], half, 460, 210);
  const lines = points => points.slice(1).map((p, i) => line(points[i], p, {'data-k': i + 2}));
  const whole = svg(460, 210, 'the path of the state through the groups');
  const zooms = R.names.map((name, g) => {
    const [points, at] = [flat, all].map(of => of.slice(g * K, (g + 1) * K)), [x, y] = at.at(-1);
    if (g) whole.append(line(all[g * K - 1], at[0], {class: 'mark'}));
    whole.append(...lines(at), dot([x, y], K, {'data-k': 0}),
                 text(x, y < 105 ? y - 10 : y + 19, name));
    // the same loop steps magnified, from the second one on, and the exit
    const end = points.at(-1), {steps} = real[t].groups[g];
    const far = Math.max(0, ...points.slice(1).flatMap(p => minus(p, end).map(Math.abs)));
    const near = 1.2 * far || half || 1, inside = placed(points, end, near, 150, 150);
    const zoom = svg(150, 150, `${name} magnified`);
    zoom.append(...lines(inside), ...inside.map((p, i) => dot(p, i + 1)),
                ...inside.slice(steps - 1, steps).map(p => dot(p, steps, {r: 8, class: 'mark'})));
    const larger = `at ${+(half / near * 75 / 105).toPrecision(2)}\u00d7 the scale`;
    return make('div', {}, zoom, `${name}, ${larger}; exits after step ${steps}`);
  });
  $('path').replaceChildren(whole, ...zooms);
}

// the model writes: tokens drawn from what the last one predicts, at this temperature
// (decode.choose). `writing` changes with each start and stop
const END = R.words.length - 1;         // the token that ends a text
let writing = 0, player = 0;
function write_token() {
  const temperature = Math.max(0, +$('temperature').value), {logits} = view.real.at(-1);
  const gumbel = () => -Math.log(-Math.log(Math.random()));
  ids.push(argmax(temperature ? logits.map(value => value / temperature + gumbel()) : logits));
  chosen = ids.length - 1;
  $('text').value = decode(ids);
  return update();
}
async function write(on) {
  const mine = writing = on ? Math.random() : 0;
  $('write').textContent = on ? 'stop' : 'write on';
  while (on && writing === mine) {
    await write_token();
    await new Promise(done => setTimeout(done, 30));
    if (ids.length > 400 || ids.at(-1) === END) return write(false);
  }
}
function show_up_to(k) {
  shown = k < +$('loops').value ? k : Infinity;
  reveal();
  if (shown > k) play(false);
}
function play(on) {
  clearInterval(player);
  player = on && setInterval(() => show_up_to(shown + 1), 500);
  $('play').textContent = on ? '\u25a0 stop' : '\u25b6 step by step';
}

// the controls
function take_text() {
  const before = ids, read = encode($('text').value);
  ids = read.length ? read : [R.problem ? R.problem.ids[0] : END];
  const same = ids.findIndex((id, t) => id !== before[t]);
  kept.length = same < 0 ? ids.length : same;
  [written, chosen] = [ids.length, ids.length - 1];
  write(false);
  return update();
}
for (const name of Object.keys(SIGNALS)) $('rule').append(make('option', {value: name}, name));
R.names.forEach((name, g) => $('group').append(make('option', {value: g}, name)));
const first = {group: G - 1, rule: 'norm_rel', loops: R.loops, text: R.start};
for (const id in first) $(id).value = first[id];
$('dots').hidden = !R.problem;
$('write').hidden = $('temperature').parentNode.hidden = R.problem;
$('text').oninput = take_text;
$('rule').oninput = () => { $('hits').value = R.rules[$('rule').value]?.hits ?? 1; };
for (const id of ['loops', 'group', 'past', 'hits', 'tau', 'rule'])
  $(id).addEventListener('input', update);
$('write').onclick = () => write(!writing);
$('play').onclick = () => { if (!player) show_up_to(0); play(!player); };
$('k').oninput = () => show_up_to(+$('k').value);
take_text();
