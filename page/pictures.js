// The pictures of the page: each function draws one, of a view (see page.js), into its element.
'use strict';

// viridis: how much a token moves in a loop step, from hardly to much. No other thing has one of
// these colours
const VIRIDIS = '#472d7b #3b528b #2c728e #21918c #28ae80 #5ec962 #addc30 #fde725'.split(' ');
const DECADES = 3;              // from violet to yellow: updates of 0.1% to 100% of the state

function colour_of_move(change) {
  const share = 1 + Math.log10(Math.max(change, 1e-9)) / DECADES;
  return VIRIDIS[Math.round(7 * Math.min(1, Math.max(0, share)))];
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const between = (low, value, high) => Math.min(high, Math.max(low, value));

// text is only ever set as textContent or value
function make(name, attributes, ...children) {
  const in_svg = ['svg', 'rect', 'line', 'circle', 'path', 'text'].includes(name);
  const node = in_svg ? document.createElementNS('http://www.w3.org/2000/svg', name)
                      : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const svg = (width, height, label) =>
  make('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label});
const text = (x, y, words, attributes) => make('text', {x, y, ...attributes}, words);
const line = ([x1, y1], [x2, y2], attributes) => make('line', {x1, y1, x2, y2, ...attributes});
const dot = ([cx, cy], k, attributes) =>
  make('circle', {cx, cy, r: 3, 'data-k': k, ...attributes});

// the model: its layers, and those that loop ------------------------------------------------------

function draw_scheme(names) {
  const wide = 62, gap = 16, high = 34, top = 30, boxes = [{words: 'embed'}];
  let number = 0;                       // of the first layer in a box
  M.layers.forEach(({length: loops}, i) => {
    boxes.push({words: loops ? names[M.groups.indexOf(i)] : `layer ${number}`, loops});
    number += loops || 1;
  });
  boxes.push({words: 'head'});
  const width = boxes.length * (wide + gap) - gap + 2;
  const picture = svg(width, top + high + 2, 'the layers of the model');
  boxes.forEach(({words, loops}, n) => {
    const x = 1 + n * (wide + gap), y = top + high / 2;
    picture.append(make('rect', {x, y: top, width: wide, height: high, rx: 4,
                                 class: loops ? 'loops' : ''}), text(x + wide / 2, y + 4, words));
    if (n) picture.append(...arrow([x - gap + 2, y], [x - 3, y], [-4, -4], [-4, 4]));
    if (!loops) return;
    const back = `M ${x + wide - 8} ${top} C ${x + wide} 4, ${x} 4, ${x + 8} ${top - 2}`;
    const tip = [x + 8, top - 2];
    picture.append(make('path', {d: back}), ...arrow(tip, tip, [-5, -5], [5, -6]));
  });
  $('scheme').style.flexBasis = `${width}px`;
  $('scheme').replaceChildren(picture);
}

// a line with a tip, whose two strokes begin at these distances from its end
const arrow = (from, to, ...strokes) => [line(from, to), ...strokes.map(([dx, dy]) =>
  line([to[0] + dx, to[1] + dy], to))];

// the map of tokens by loops, on a canvas ---------------------------------------------------------

const MAP = {left: 34, top: 18, bottom: 30, height: 430, widest: 44, highest: 22};
const canvas = make('canvas', {});

// where things lie on the map, in CSS pixels
function layout_of_map({tokens, layer}, width) {
  const cells = tokens.map(token => token.cells[layer]);
  const passes = Math.max(1, ...cells.map(cell => cell?.frames.at(-1).k ?? 0));
  const w = between(1, (width - MAP.left - 2) / tokens.length, MAP.widest);
  const h = Math.min(MAP.highest, MAP.height / passes);
  return {cells, passes, w, h, x: t => MAP.left + w * t, y: k => MAP.top + h * (k - 1),
          right: MAP.left + w * tokens.length, end: MAP.top + h * passes,
          gap_x: w > 6 ? 1 : 0, gap_y: h > 6 ? 1 : 0};
}

// step: the loop step that is shown, of all that were taken; wrong: whose answer is wrong then
function draw_map(view, step = Infinity, wrong = []) {
  const map = layout_of_map(view, $('map').clientWidth);
  const scale = globalThis.devicePixelRatio || 1;
  const width = map.right + 2, height = map.end + MAP.bottom;
  Object.assign(canvas, {width: Math.ceil(width * scale), height: Math.ceil(height * scale)});
  Object.assign(canvas.style, {width: `${width}px`, height: `${height}px`});
  canvas.setAttribute('aria-label', `${view.tokens.length} tokens by ${map.passes} loops`);
  const pen = canvas.getContext('2d');
  pen.scale(scale, scale);

  draw_awake(pen, map, step);
  if (!view.how.one_by_one) draw_depths(pen, view, map);
  wrong.forEach(t => paint(pen, colour('wrong'), map.x(t), map.end + 3, map.x(t + 1) - map.gap_x,
                           map.end + 9));
  pen.strokeStyle = colour('chosen');
  pen.lineWidth = 1.5;
  pen.strokeRect(map.x(view.at) - .75, MAP.top - 1, Math.max(map.w, 2) + .75,
                 map.end - MAP.top + 2);
  label_axes(pen, view, map);
}

// a rectangle, on whole pixels of the screen
function paint(pen, style, left, top, right, bottom) {
  const scale = globalThis.devicePixelRatio || 1;
  const snap = place => Math.round(place * scale) / scale;
  pen.fillStyle = style;
  pen.fillRect(snap(left), snap(top), Math.max(snap(right) - snap(left), 1 / scale),
               Math.max(snap(bottom) - snap(top), 1 / scale));
}

// asleep is dark, awake bright; steps later than the shown one are covered
function draw_awake(pen, {cells, passes, x, y, right, end, gap_x, gap_y}, step) {
  const asleep = colour('asleep');
  paint(pen, asleep, MAP.left, MAP.top, right, end);
  cells.forEach((cell, t) => cell?.frames.slice(1).forEach(({k, change}) => paint(
    pen, colour_of_move(change), x(t), y(k), x(t + 1) - gap_x, y(k + 1) - gap_y)));
  pen.globalAlpha = .85;
  if (step < passes) paint(pen, asleep, MAP.left, y(step + 1), right, end);
  pen.globalAlpha = 1;
}

// a dot where as many loops have been taken as an answer is deep
function draw_depths(pen, {labels}, {passes, x, y, w}) {
  pen.strokeStyle = '#000';
  labels.forEach(({answer, depth}, t) => {
    if (answer < 0 || depth < 0 || depth > passes) return;
    const middle = y(depth + 1);
    if (w < 5) return paint(pen, '#fff', x(t), middle - .5, x(t + 1), middle + .5);
    pen.fillStyle = '#fff';
    pen.beginPath();
    pen.arc(x(t) + w / 2, middle, Math.min(3, w / 3), 0, 7);
    pen.fill();
    if (w > 8) pen.stroke();
  });
}

// loops at the left, positions below, and where there is room words above
function label_axes(pen, {tokens, at, start}, {passes, x, y, w, h, right, end}) {
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000];
  const rows = every.find(n => n * h >= 18) ?? 5000;
  const columns = every.find(n => n * w >= 40) ?? 5000;
  pen.font = '11px system-ui, sans-serif';
  pen.fillStyle = colour('soft');
  pen.textAlign = 'right';
  for (let k = rows; k <= passes; k += rows) pen.fillText(k, MAP.left - 5, y(k) + h / 2 + 4);
  pen.textAlign = 'center';
  for (let t = 0; t < tokens.length; t += columns)
    pen.fillText(start + t, x(t) + w / 2, end + 22);
  const words = tokens.map(({id}) => R.words[id].slice(0, 4));
  const write = t => pen.fillText(words[t], Math.min(x(t) + w / 2, right - 8), MAP.top - 5);
  const there_is_room = w >= 7 * Math.max(...words.map(word => word.length)) + 2;
  words.forEach((_, t) => { if (there_is_room && t !== at) write(t); });
  pen.fillStyle = colour('chosen');
  write(at);
}

// the token at a place of the canvas, and the loop step
function place_on_map(view, {offsetX, offsetY}) {
  const {w, h, passes, cells} = layout_of_map(view, $('map').clientWidth);
  const t = between(0, Math.floor((offsetX - MAP.left) / w), cells.length - 1);
  const k = between(1, 1 + Math.floor((offsetY - MAP.top) / h), passes);
  return {t, k, awake: frame_at(cells[t], k).k === k};
}

// the chosen token: its answers, its signal, its path ---------------------------------------------

const MOST_ROWS = 40;           // of the table

function draw_think({guesses, labels, at}) {
  const rows = [];
  guesses.forEach(({k, log_p}, n) => {
    const slept = n && !guesses.thinned ? k - guesses[n - 1].k - 1 : 0;
    if (slept) rows.push(make('tr', {'data-k': k}, make('td', {colspan: 6, class: 'soft'},
                                                        `asleep for ${count(slept, 'loop')}`)));
    const best = [...log_p.keys()].sort((a, b) => log_p[b] - log_p[a]).slice(0, 5);
    const answers = best.map(token => make('td', {
      'data-token': token, class: token === labels[at].answer ? 'right' : '',
    }, make('bdi', {}, R.words[token]), ` ${(100 * Math.exp(log_p[token])).toFixed(0)}`));
    rows.push(make('tr', {'data-k': k}, make('th', {}, `${k || 'before'}`), ...answers));
  });
  $('think').replaceChildren(...rows);
}

function draw_signal(frames, {signal: name, tau}) {
  const width = 460, height = 190;
  const left = 48, bottom = 24;
  const points = frames.filter(frame => frame.signal > 0).map(({k, signal}) => [k, signal]);
  const logs = [...points.map(point => point[1]), tau || 1e-3].map(Math.log10);
  const low = Math.max(-9, Math.floor(Math.min(...logs)));
  const top = Math.max(low + 1, Math.ceil(Math.max(...logs)));
  const first = points[0]?.[0] ?? 1, last = Math.max(first + 1, points.at(-1)?.[0] ?? 2);
  const x = k => left + (width - left - 6) * (k - first) / (last - first);
  const y = value =>
    (height - bottom) * (top - between(low, Math.log10(value), top)) / (top - low) + 4;
  const place = ([k, value]) => [x(k), y(value)];
  const picture = svg(width, height, `${name} by loop step`);
  for (let e = low; e <= top; e++)
    picture.append(line([left, y(10 ** e)], [width, y(10 ** e)], {class: 'grid'}),
                   text(left - 6, y(10 ** e) + 4, `1e${e}`, {style: 'text-anchor: end'}));
  if (tau) picture.append(line([left, y(tau)], [width, y(tau)], {class: 'dashed'}));
  points.forEach((point, n) => {
    if (n && points[n - 1][0] === point[0] - 1)
      picture.append(line(place(points[n - 1]), place(point), {'data-k': point[0]}));
    picture.append(dot(place(point), point[0]));
  });
  for (const k of new Set([first, Math.round((first + last) / 2), last]))
    picture.append(text(between(left + 8, x(k), width - 12), height - 4, `${k}`));
  $('signal').replaceChildren(picture);
}

// states -> their places on two principal axes, by power iteration
function pca_2d(states) {
  const mean_state = states[0].map((_, i) => mean(states.map(x => x[i])));
  const centred = states.map(x => minus(x, mean_state));
  const product = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  let products = centred.map(a => centred.map(b => product(a, b)));
  const axes = [0, 1].map(() => {
    let axis = centred.map((_, n) => Math.sin(n * n + 1)), size;
    for (let i = 0; i < 100; i++) {
      const next = products.map(row => product(row, axis));
      size = length_of(next) || 1;
      axis = next.map(value => value / size);
    }
    products = products.map((row, n) => row.map((value, m) => value - size * axis[n] * axis[m]));
    return axis.map(value => value * Math.sqrt(size));
  });
  return centred.map((_, n) => axes.map(axis => axis[n]));
}

// points around `middle`, which is `half` from the nearer sides of a panel -> their places on it
const placed = (points, middle, half, width, height) => points.map(point => [0, 1].map(i =>
  [width, height][i] / 2 +
  (i ? -1 : 1) * Math.min(width, height) / 2 * (point[i] - middle[i]) / (half || 1)));

// of each group: the states after its loop steps, and the last one that the token keeps
function draw_path(paths, names) {
  const flat = pca_2d(paths.flatMap(({states}) => states));
  const [[x0, x1], [y0, y1]] = [0, 1].map(i => flat.map(point => point[i]))
    .map(values => [Math.min(...values), Math.max(...values)]);
  const half = .75 * Math.max(x1 - x0, y1 - y0);
  const all = placed(flat, [(x0 + x1) / 2, (y0 + y1) / 2], half, 460, 210);
  const lines = points => points.slice(1).map((p, i) => line(points[i], p, {'data-k': i + 2}));
  const whole = svg(460, 210, 'the path of the state through the groups'), zooms = [];
  let from = 0;
  paths.forEach(({states, steps}, g) => {
    const points = flat.slice(from, from + states.length), end = points.at(-1);
    const places = all.slice(from, from + states.length), [x, y] = places.at(-1);
    if (g) whole.append(line(all[from - 1], places[0], {class: 'dashed'}));
    whole.append(...lines(places), dot([x, y], 0), text(x, y < 105 ? y - 10 : y + 19, names[g]));
    // the same loop steps magnified, from the second one on, and the exit
    const far = Math.max(0, ...points.slice(1).flatMap(point => minus(point, end).map(Math.abs)));
    const near = 1.2 * far || half || 1, inside = placed(points, end, near, 150, 150);
    const zoom = svg(150, 150, `${names[g]} magnified`);
    zoom.append(...lines(inside), ...inside.map((place, i) => dot(place, i + 1)),
                ...inside.slice(steps - 1, steps).map(place =>
                  dot(place, steps, {r: 8, style: 'fill: none'})));
    const larger = `at ${+(half / near * 75 / 105).toPrecision(2)}\u00d7 the scale`;
    zooms.push(make('div', {}, zoom, `${names[g]}, ${larger}; exits after step ${steps}`));
    from += states.length;
  });
  $('path').replaceChildren(whole, ...zooms);
}
