// A maze, solved before your eyes: the maze, the model's passes over it, the picture, the controls.
//
//     maze        {side, doors, goals}: the doors of each room as a sum of 2 ** door (0 north,
//                 1 east, 2 south, 3 west); goals: does the room have one?
//     truth       {depth, right}: of each room the doors between it and the nearest goal, Infinity
//                 if there is no way; which doors are right, a sum of 2 ** door
//     pass        a pass of the model: {work, tokens, how, limit, loops, computed, touched, awake,
//                 done, edits, first}. work: the generator; loops: done so far, at most limit;
//                 computed: block maps of all rooms together; touched: the rooms that were
//                 computed; awake: who is in the next loop; edits: how many it repairs, from the
//                 states before them; first: loops per room of the last solve from the start, if
//                 it repairs that one
//     answers     of each room {door, sure}: the likeliest door and its probability
//     chosen      the room that the keys have chosen
//     hover       the wall or room under the mouse, {room, door}
'use strict';

const $ = id => document.getElementById(id);
const STEPS = [[-1, 0], [0, 1], [1, 0], [0, -1]];
const NAMES = ['north', 'east', 'south', 'west'];
const GOAL = 16, ARROW = 32;            // words: doors, doors and goal, arrows
const LOOPED = M.groups[0];              // the layer that loops
const colour = name =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// write only what differs: a screen reader hears each change of a role=status
const put = (id, words) => $(id).textContent === words || ($(id).textContent = words);
const count = (n, word) => `${n.toLocaleString('en')} ${word}${n === 1 ? '' : 's'}`;

let maze, truth, pass, answers, chosen = 0, hover, playing = false;
let has_edited = false;                 // has the reader changed a maze?
let drawn = Promise.resolve();          // kept when all that was asked for is drawn

// rooms -------------------------------------------------------------------------------------------

// the room behind a door, or undefined at the edge of the board
function behind(room, door, side = maze.side) {
  const row = Math.floor(room / side) + STEPS[door][0], column = room % side + STEPS[door][1];
  return row >= 0 && row < side && column >= 0 && column < side ? row * side + column : undefined;
}

// A maze with one way between any two rooms, as zoo/maze.py carves it: it grows from a room, beside
// the newest that has space (deep), which makes long corridors, or beside any
function carve(side, deep) {
  const doors = new Array(side * side).fill(0), there = new Set(), any = n => Math.random() * n | 0;
  const growing = [any(side * side)];
  there.add(growing[0]);
  while (growing.length) {
    const place = deep ? growing.length - 1 : any(growing.length), room = growing[place];
    const free = [0, 1, 2, 3].filter(door => {
      const next = behind(room, door, side);
      return next !== undefined && !there.has(next);
    });
    if (!free.length) {
      growing.splice(place, 1);
      continue;
    }
    const door = free[any(free.length)], next = behind(room, door, side);
    doors[room] += 1 << door;
    doors[next] += 1 << (door + 2) % 4;
    there.add(next);
    growing.push(next);
  }
  return doors;
}

// breadth first from the goals
function search({doors, goals}) {
  const depth = doors.map((_, room) => goals[room] ? 0 : Infinity);
  const todo = [...doors.keys()].filter(room => goals[room]);
  const neighbours = room => [0, 1, 2, 3].filter(door => doors[room] >> door & 1)
    .map(door => [door, behind(room, door)]);
  for (const room of todo) {            // it grows meanwhile
    for (const [, next] of neighbours(room)) {
      if (depth[next] < Infinity) continue;
      depth[next] = depth[room] + 1;
      todo.push(next);
    }
  }
  const right = doors.map((_, room) => neighbours(room).reduce(
    (sum, [door, next]) => sum + (depth[next] < depth[room] ? 1 << door : 0), 0));
  return {depth, right};
}

// what the model has never seen in training, in words
function unseen() {
  const {doors, goals} = maze, n = doors.length, n_goals = goals.filter(Boolean).length;
  const n_doors = doors.reduce((sum, of_room) => sum + [0, 1, 2, 3].filter(
    door => of_room >> door & 1).length, 0) / 2;
  const n_cut_off = truth.depth.filter(depth => depth === Infinity).length;
  const parts = [];
  if (n_goals !== 1) parts.push(n_goals ? `${n_goals} goals` : 'no goal');
  if (n_goals && n_cut_off) parts.push(`${count(n_cut_off, 'room')} without a way to the goal`);
  // one way between any two rooms: as many doors as rooms, but one, in each separate part
  if (n_doors > n - components()) parts.push('rings, and so more than one way');
  return parts.length ? `The model was not trained for this: ${parts.join('; ')}.` : '';
}

function components() {
  const {doors} = maze, seen = new Set();
  let parts = 0;
  for (const first of doors.keys()) {
    if (seen.has(first)) continue;
    parts++;
    seen.add(first);
    for (const todo = [first]; todo.length;) {
      const room = todo.pop();
      for (const door of [0, 1, 2, 3]) {
        const next = doors[room] >> door & 1 ? behind(room, door) : undefined;
        if (next === undefined || seen.has(next)) continue;
        seen.add(next);
        todo.push(next);
      }
    }
  }
  return parts;
}

// the model: a room reads the rooms next door and itself ------------------------------------------

let next_door = [];                     // of each room
reads = room => next_door[room];
bias = (name, room, other, head) => {
  const by = other - room, {side} = maze;
  const direction = by === -side ? 0 : by === 1 ? 1 : by === side ? 2 : by === -1 ? 3 : 4;
  return M.W[`${name}.direction`][direction * M.C / M.D + head / M.D];
};
readers = (has, from, end) => {
  const moved = next_door.map((_, room) => has(room));
  if ($('sleep').value === 'off') return moved.some(Boolean) ? [...moved.keys()] : [];
  return [...moved.keys()].filter(room => next_door[room].some(other => moved[other]));
};

const word_of = room => maze.doors[room] + (maze.goals[room] ? GOAL : 0);

// Begin a pass over the maze, from the start or, after an edit, from the states that are there:
// then only those rooms are awake that are not what they were, and their neighbours. An edit before
// the end is no new pass: the counts go on
function begin(from_start = true) {
  const {side, doors} = maze, fresh = from_start || !pass?.loops;
  next_door = doors.map((_, room) => [...[0, 1, 2, 3].map(door => behind(room, door))
    .filter(other => other !== undefined), room]);
  truth = search(maze);
  const tokens = doors.map((_, room) => ({
    id: word_of(room), cells: fresh ? [] : pass.tokens[room].cells.map(at_rest)}));
  const rule = {...R.rules[R.rule], signal: R.rule, tau: tau()};
  const how = {rule, loops: 2 * side * side + 100, wake: $('sleep').value !== 'exit'};
  const {loops, computed, touched} = fresh || pass.done
    ? {loops: 0, computed: 0, touched: new Set()} : pass;
  const first = fresh ? undefined : pass.first ?? (pass.done ? pass.computed / doors.length
                                                             : undefined);
  const edits = fresh ? 0 : pass.done ? 1 : pass.edits + 1;
  pass = {work: read(tokens, 0, how), tokens, how, limit: loops + how.loops, loops, computed,
          touched, awake: fresh ? [...doors.keys()] : [], done: false, edits, first};
  if (fresh) answers = doors.map(() => ({door: 0, sure: 0}));
}

// One loop step. When nobody is awake, or the budget is used up, the pass is done
function loop() {
  if (pass.done) return;
  const steps = pass.tokens.map(({cells}) => cells[LOOPED]?.frames.at(-1).k ?? 0);
  let part = pass.work.next();
  while (!part.done && !part.value) part = pass.work.next();    // parts of the step
  if (part.value) {
    pass.loops++;
    pass.awake = part.value;
  }
  pass.tokens.forEach(({cells}, room) => {
    const {frames} = cells[LOOPED];
    if (frames.at(-1).k > steps[room]) {
      pass.computed++;
      pass.touched.add(room);
    }
    frames.splice(0, frames.length - 1);        // earlier steps are not looked at again
  });
  ask();
  pass.done = part.done || !pass.awake.length || pass.loops === pass.limit;
}

// what the rooms answer from their states: the layers after the loop, where something has changed
function ask() {
  const {tokens, how} = pass;
  let X = tokens.map(({cells}) => cells[LOOPED].frames.at(-1).x);
  for (let i = LOOPED + 1; i < M.layers.length; i++) {
    const work = layer(i, tokens, 0, X, how);
    X = work.next().value;              // such a layer is done at once
  }
  const logits = readout(stack(X)), V = logits.length / X.length;
  answers = tokens.map((token, room) => {
    token.logits = row(logits, room, V);
    const log_p = log_softmax(token.logits).slice(ARROW, ARROW + 4);
    const door = log_p.indexOf(Math.max(...log_p));
    return {door, sure: Math.exp(log_p[door])};
  });
}

const asked = room => !maze.goals[room] && truth.depth[room] < Infinity;
const is_right = room => truth.right[room] >> answers[room].door & 1;

// the picture -------------------------------------------------------------------------------------

const canvas = $('maze'), pen = canvas.getContext('2d');
let size = 0;                           // of a room, in pixels of the page

function draw() {
  const {side, doors, goals} = maze, n = side * side, width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  size = width / side;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== canvas.width) canvas.height = canvas.width;
  pen.setTransform(canvas.width / width, 0, 0, canvas.width / width, 0, 0);
  const colours = Object.fromEntries(['room', 'cut-off', 'goal', 'wall', 'arrow', 'wrong', 'chosen',
    'least', 'most'].map(name => [name, colour(name)]));
  const awake = new Set(pass.loops ? pass.awake : []);

  for (let room = 0; room < n; room++) {
    const x = room % side * size, y = Math.floor(room / side) * size;
    const change = pass.tokens[room].cells[LOOPED]?.frames.at(-1).change;
    pen.fillStyle = awake.has(room) ? colour_of(change, colours)
      : truth.depth[room] < Infinity ? colours.room : colours['cut-off'];
    pen.fillRect(x, y, size + .5, size + .5);
    if (goals[room]) draw_goal(x, y, colours.goal);
    else if (pass.loops) {
      const {door, sure} = answers[room], wrong = asked(room) && !is_right(room);
      pen.globalAlpha = .12 + .88 * sure;
      draw_arrow(x, y, door, wrong ? colours.wrong : colours.arrow);
      pen.globalAlpha = 1;
    }
  }

  // walls; rooms that have no door on one side alone are drawn with a wall there
  pen.strokeStyle = colours.wall;
  pen.lineWidth = Math.max(1, size / 14);
  pen.lineCap = 'square';
  pen.beginPath();
  for (let room = 0; room < n; room++) {
    const x = room % side * size, y = Math.floor(room / side) * size;
    const [left, top] = [Math.max(x, 1), Math.max(y, 1)];
    const [right, bottom] = [Math.min(x + size, width - 1), Math.min(y + size, width - 1)];
    const lines = [[left, top, right, top], [right, top, right, bottom],
                   [left, bottom, right, bottom], [left, top, left, bottom]];
    for (const [door, [x1, y1, x2, y2]] of lines.entries()) {
      if (doors[room] >> door & 1) continue;
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
    }
  }
  pen.stroke();
  if (document.activeElement === canvas) {
    pen.strokeStyle = colours.chosen;
    pen.lineWidth = Math.min(3, size / 7);      // the goal is seen in it
    const inset = Math.min(2, size / 9);
    pen.strokeRect(chosen % side * size + inset, Math.floor(chosen / side) * size + inset,
                   size - 2 * inset, size - 2 * inset);
  }
  if (hover) draw_hover(colours.chosen);
  draw_numbers();
}

// The colour of a room that is awake: from the threshold, which is also for a room that an edit has
// woken and no step has computed, to a change by its whole length (or by five times the threshold)
function colour_of(change, {least, most}) {
  const log_share = Math.log((change ?? 0) / tau()) / Math.log(Math.max(1 / tau(), 5));
  const share = Math.min(1, Math.max(0, log_share));
  const [from, to] = [least, most].map(hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)));
  return `rgb(${from.map((part, i) => Math.round(part + share * (to[i] - part)))})`;
}

function draw_goal(x, y, fill) {
  pen.fillStyle = fill;
  pen.beginPath();
  pen.arc(x + size / 2, y + size / 2, size * .32, 0, 2 * Math.PI);
  pen.fill();
  pen.strokeStyle = '#fff';
  pen.lineWidth = size * .08;
  pen.stroke();
}

function draw_arrow(x, y, door, fill) {
  const [down, right] = STEPS[door];
  const point = (along, across) => [x + size * (.5 + along * right - across * down),
                                    y + size * (.5 + along * down + across * right)];
  pen.fillStyle = pen.strokeStyle = fill;
  pen.lineWidth = Math.max(1, size * .09);
  pen.lineCap = 'butt';
  pen.beginPath();
  pen.moveTo(...point(-.28, 0));
  pen.lineTo(...point(.1, 0));
  pen.stroke();
  pen.beginPath();
  pen.moveTo(...point(.32, 0));
  pen.lineTo(...point(.04, .2));
  pen.lineTo(...point(.04, -.2));
  pen.fill();
}

// what a click would change: a wall, or a hollow goal
function draw_hover(stroke) {
  const {room, door} = hover, [down, right] = STEPS[door] ?? [0, 0];
  const x = (room % maze.side + .5 + right / 2) * size;
  const y = (Math.floor(room / maze.side) + .5 + down / 2) * size;
  pen.strokeStyle = stroke;
  pen.lineWidth = Math.max(2, size / 8);
  pen.beginPath();
  if (door === undefined) pen.arc(x, y, size * .32, 0, 2 * Math.PI);
  else {
    pen.moveTo(x - down * size / 2, y - right * size / 2);
    pen.lineTo(x + down * size / 2, y + right * size / 2);
  }
  pen.stroke();
}

const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : '-';

const quiet = () => $('sleep').value === 'off' ? 'settled' : 'asleep';

// what has happened, in sentences
function summary(n_asked, right) {
  const {loops, awake, edits, first} = pass, n = maze.doors.length, wrong = n_asked - right;
  const sleep = $('sleep').value;
  if (!loops) {
    return 'Press play. In each loop a room hears only from the four rooms beside it, walls or ' +
      'not. So certainty spreads from the goal, and from dead ends, which have only one way out.' +
      (sleep === 'on' ? ' A room that settles sleeps until a neighbour changes.' : '');
  }
  if (!pass.done) {
    return n_asked && !wrong
      ? 'All arrows are right, but some rooms still change: an arrow may still turn.'
      : sleep === 'off' ? 'All rooms loop until all of them are settled.'
      : 'Rooms that change are awake' +
        (sleep === 'on' ? ', and they wake the rooms beside them.' : '.');
  }
  const arrows = n_asked ? `${right} of ${n_asked} arrows are right` : 'no arrow can be right';
  const words = [awake.length
    ? `The model stops after ${count(loops, 'loop')} (the limit: 2 × rooms + 100` +
      `${edits ? ' since your last change' : ''}): ${arrows}, ` +
      `${wrong ? 'and' : 'but'} ${count(awake.length, 'room')} could not settle.`
    : `All rooms are ${quiet()} after ${count(loops, 'loop')}: ${arrows}.`];
  if (sleep === 'on' && !edits) {
    words.push(`A room ran ${(pass.computed / n).toFixed(1)} loops on average; without sleep ` +
      `each would have run about ${loops} or more.`);
    if (maze.side > R.side)
      words.push(`The model has only seen mazes of at most ${R.side} by ${R.side} rooms.`);
  }
  if (sleep === 'exit' && wrong) {
    words.push('Each room stopped for good as soon as it settled, often before news from the ' +
      'goal arrived.');
  }
  if (first !== undefined) {
    if (sleep !== 'off') {
      words.push(`Your change${edits > 1 ? 's' : ''} woke ${pass.touched.size} of ${n} rooms.`);
    }
    words.push(`The repair took ${(pass.computed / n).toFixed(1)} loops per room; the last solve ` +
      `from the start took ${first.toFixed(1)}.`);
  }
  const lost = [...maze.doors.keys()].filter(
    room => asked(room) && !is_right(room) && !awake.includes(room)).length;
  if (edits && lost && sleep !== 'exit') {
    words.push(`${count(lost, 'arrow')} ${lost === 1 ? 'is' : 'are'} wrong and ${quiet()}: ` +
      'press play to solve it from the start.');
  }
  if (!has_edited) words.push('Now click a room to move the goal, or a wall to open it.');
  return words.join(' ');
}

function draw_numbers() {
  const rooms = [...maze.doors.keys()].filter(asked), n = maze.doors.length;
  const right = rooms.filter(is_right).length, n_goals = maze.goals.filter(Boolean).length;
  const deepest = rooms.reduce((most, room) => Math.max(most, truth.depth[room]), 0);
  const begun = pass.loops > 0;
  put('deepest', rooms.length ? `${count(deepest, 'door')} away` : '-');
  put('loops-name', pass.first === undefined ? 'loops' : 'loops since your edit');
  put('loops', `${pass.loops}`);
  put('awake', begun ? `${pass.awake.length} of ${count(n, 'room')}` : '-');
  put('computed', (pass.computed / n).toFixed(1));
  put('without', !begun || pass.edits || $('sleep').value !== 'on' ? '-'
    : pass.done ? `about ${pass.loops} or more` : `${pass.loops} so far`);
  put('right', !n_goals ? 'no goal' : begun && rooms.length
    ? `${right} of ${rooms.length}, ${percent(right, rooms.length)}` : '-');
  put('notice', unseen());
  put('summary', summary(rooms.length, right));
  $('step').setAttribute('aria-disabled', pass.done);       // it keeps the focus, and does nothing
  put('play', playing ? '❚❚ stop' : '▶ play');
  canvas.setAttribute('aria-label', `a maze of ${maze.side} by ${maze.side} rooms; arrow keys ` +
    'choose a room');
  const {depth} = truth, {door, sure} = answers[chosen];
  put('chosen', document.activeElement !== canvas ? '' :
    `Row ${Math.floor(chosen / maze.side) + 1}, column ${chosen % maze.side + 1}: ` +
    (maze.goals[chosen] ? `${n_goals > 1 ? 'a' : 'the'} goal. ` : depth[chosen] < Infinity
      ? `${count(depth[chosen], 'door')} from the ${n_goals > 1 ? 'nearest ' : ''}goal. `
      : n_goals ? 'no way to the goal. ' : '') +
    `Doors: ${NAMES.filter((_, door) => maze.doors[chosen] >> door & 1).join(', ') || 'none'}.` +
    (begun && asked(chosen) ? ` The model says ${NAMES[door]}, ${percent(sure, 1)} sure, ` +
      `${is_right(chosen) ? 'right' : 'wrong'}; ` +
      `${pass.awake.includes(chosen) ? 'awake' : quiet()}.` : ''));
}

// a screen reader hears of the chosen room when a key was pressed and at the end, not in each loop
const say_chosen = () => put('said', $('chosen').textContent);

// controls ----------------------------------------------------------------------------------------

const tau = () => 10 ** Number($('tau').value);
const set_tau = value => $('tau').value = Math.log10(value);

function new_maze() {
  const side = Number($('side').value), goal = Math.random() * side * side | 0;
  const doors = carve(side, $('deep').value === '1');
  show(doors.map((of_room, room) => of_room + (room === goal ? GOAL : 0)));
}

// a maze in words
function show(ids) {
  const side = Math.sqrt(ids.length);
  maze = {side, doors: ids.map(id => id % GOAL), goals: ids.map(id => id >= GOAL)};
  $('side').value = side;
  chosen = Math.min(chosen, ids.length - 1);
  restart();
}

function restart() {
  begin();
  label();
  draw();
}

// the maze has changed: go on from the states that are there, and play unless the reader has stopped
function changed() {
  const begun = pass.loops > 0, plays = playing || pass.done;
  has_edited = true;
  begin(false);
  if (begun) loop();                    // of the rooms that the change has woken
  if (begun && plays && !pass.done) play(true);
  draw();
}

function toggle_wall(room, door, open) {
  const next = behind(room, door);
  if (next === undefined || open === Boolean(maze.doors[room] >> door & 1)) return;
  maze.doors[room] ^= 1 << door;
  maze.doors[next] ^= 1 << (door + 2) % 4;
  changed();
}

function set_goal(room, add) {
  if (!add && maze.goals.every((is_goal, other) => is_goal === (other === room))) return draw();
  if (add) maze.goals[room] = !maze.goals[room];
  else maze.goals = maze.goals.map((_, other) => other === room);
  changed();
}

// play: loop steps at the chosen speed, or as fast as the machine can
let next_step = 0;
function play(on = !playing) {
  if (on && pass.done) begin();         // the same maze again
  if (on === playing) return;
  playing = on;
  if (on) {
    next_step = performance.now();
    drawn = run();
  }
  draw();
}

async function run() {
  while (playing) {
    await new Promise(done => requestAnimationFrame(done));
    const now = performance.now();
    if (!playing || now < next_step) continue;
    next_step = Math.max(next_step + 1000 / Number($('speed').value), now - 100);
    loop();
    if (pass.done) playing = false;
    draw();
  }
  say_chosen();
}

function step() {
  playing = false;
  loop();                               // nothing happens after the end
  draw();
}

function label() {
  const percent_of_tau = `${Number((100 * tau()).toPrecision(2))}%`;
  $('tau').setAttribute('aria-valuetext', percent_of_tau);
  put('tau-shown', percent_of_tau);
  put('side-shown', $('side').value);
  put('speed-shown', $('speed').value);
}

// the wall or room at a point of the picture: {room, door}, door undefined in the middle of a room
function at_point({offsetX, offsetY}) {
  const {side} = maze, size = canvas.getBoundingClientRect().width / side;      // as it is now
  const column = Math.min(side - 1, Math.max(0, Math.floor(offsetX / size)));
  const line = Math.min(side - 1, Math.max(0, Math.floor(offsetY / size)));
  const x = offsetX / size - column, y = offsetY / size - line, room = line * side + column;
  const distances = [y, 1 - x, 1 - y, x], door = distances.indexOf(Math.min(...distances));
  return {room, door: distances[door] < .25 && behind(room, door) !== undefined ? door : undefined};
}

let dragging;                           // do walls open that the mouse passes? undefined: none do
let pressed;                            // what a finger or pen has pressed, and where: {at, x, y}
function edit({room, door}, add) {
  chosen = room;
  if (door === undefined) return set_goal(room, add || $('add').checked);
  dragging = !(maze.doors[room] >> door & 1);
  toggle_wall(room, door, dragging);
}
canvas.onpointerdown = event => {
  dragging = pressed = undefined;
  if (event.button) return;
  const at = at_point(event);
  // a finger may begin to scroll: wait until it goes up
  if (event.pointerType === 'mouse') edit(at, event.shiftKey);
  else pressed = {at, x: event.clientX, y: event.clientY};
};
function point_to(at) {
  if (at?.room === hover?.room && at?.door === hover?.door) return;
  hover = at;
  draw();
}
canvas.onpointerleave = () => point_to();
canvas.onpointermove = event => {
  point_to(event.pointerType === 'mouse' ? at_point(event) : undefined);
  if (dragging === undefined || !event.buttons) return;
  const {room, door} = at_point(event);
  if (door !== undefined) toggle_wall(room, door, dragging);
};
canvas.onpointercancel = () => dragging = pressed = undefined;
window.onpointerup = ({clientX, clientY, shiftKey}) => {
  if (pressed && Math.hypot(clientX - pressed.x, clientY - pressed.y) < 8)
    edit(pressed.at, shiftKey);
  dragging = pressed = undefined;
};
canvas.onkeydown = event => {
  const door = ['ArrowUp', 'ArrowRight', 'ArrowDown', 'ArrowLeft'].indexOf(event.key);
  if (door >= 0) {
    if (event.shiftKey) toggle_wall(chosen, door, !(maze.doors[chosen] >> door & 1));
    else chosen = behind(chosen, door) ?? chosen;
  } else if (event.key === 'Enter') set_goal(chosen, event.shiftKey);
  else if (event.key === ' ') play();
  else return;
  event.preventDefault();
  draw();
  say_chosen();
};
canvas.onfocus = canvas.onblur = () => draw();
$('play').onclick = () => play();
$('step').onclick = step;
$('again').onclick = restart;
$('new').onclick = new_maze;
$('side').onchange = $('deep').onchange = new_maze;
$('tau').oninput = $('sleep').oninput = restart;
$('side').oninput = $('speed').oninput = label;
new ResizeObserver(() => requestAnimationFrame(draw)).observe(canvas);
matchMedia('(prefers-color-scheme: dark)').onchange = () => draw();

set_tau(R.tau);
show(R.task.ids);
