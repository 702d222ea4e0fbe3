// A maze, solved before your eyes: the maze, the model's passes over it, the picture, the controls.
//
//     maze        {side, doors, goals}: the doors of each room as a sum of 2 ** door (0 north,
//                 1 east, 2 south, 3 west); goals: does the room have one?
//     truth       {depth, right}: of each room the doors between it and the nearest goal, Infinity
//                 if there is no way; which doors are right, a sum of 2 ** door
//     pass        a pass of the model: {work, tokens, how, limit, loops, ran, awake, done, edits,
//                 repairs, first}. work: the generator; loops: done so far, at most limit; ran: in
//                 how many of them each room was computed; awake: who is in the next loop; edits:
//                 how many it goes on from; repairs: has it begun in a maze that was solved?
//                 first: {loops, per_room} of that solve, if it was one from the start
//     answers     of each room {door, sure}: the likeliest door and its probability
//     chosen      the room that the keys have chosen
//     hover       the wall or room under the mouse, {room, door}
//     past        what was there before each edit: {doors, goals, pass, answers, playing}; after a
//                 restart the doors and goals alone
'use strict';

const $ = id => document.getElementById(id);
const STEPS = [[-1, 0], [0, 1], [1, 0], [0, -1]];
const NAMES = ['north', 'east', 'south', 'west'];
const GOAL = 16, ARROW = 32;            // words: doors, doors and goal, arrows
const LOOPED = M.groups[0];              // the layer that loops
// from few loops to many: no violet, which is for rooms that are awake, and no green, red or blue
const AMBER = '#fff3c4 #fedb83 #fdb63f #f58f1d #d96a0b #a8480a #6f2d08'.split(' ');
const is_dark = matchMedia('(prefers-color-scheme: dark)');
const amber = () => is_dark.matches ? [...AMBER].reverse() : AMBER;     // few are near the ground
// how near to a wall a click changes the wall, as a share of a room, by the choice `click`
const NEAR = {both: .15, walls: .4, goal: 0, goals: 0, look: 0};
const colour = name =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// write only what differs: a screen reader hears each change of a role=status
const put = (id, words) => $(id).textContent === words || ($(id).textContent = words);
const count = (n, word) => `${n.toLocaleString('en')} ${word}${n === 1 ? '' : 's'}`;

let maze, truth, pass, answers, chosen = 0, hover, past = [], playing = false;
let has_edited = false;                 // has the reader changed a maze?
const is_touched = matchMedia('(pointer: coarse)').matches;     // by fingers, and not by a mouse
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
  const n_goals = maze.goals.filter(Boolean).length;
  const n_cut_off = truth.depth.filter(depth => depth === Infinity).length;
  const parts = [];
  if (n_goals !== 1) parts.push(n_goals ? `${n_goals} goals` : 'no goal');
  if (n_goals && n_cut_off) parts.push(`${count(n_cut_off, 'room')} without a way to the goal`);
  if (has_rings()) parts.push('two ways to the same room');
  return parts.length ? `The model was not trained for this: ${parts.join('; ')}.` : '';
}

// without rings there are as many doors as rooms, but one, in each separate part
function has_rings() {
  const {doors} = maze;
  const n_doors = doors.reduce((sum, of_room) => sum + [0, 1, 2, 3].filter(
    door => of_room >> door & 1).length, 0) / 2;
  return n_doors > doors.length - components();
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
  const {loops, ran} = fresh || pass.done ? {loops: 0, ran: doors.map(() => 0)}
    : {loops: pass.loops, ran: [...pass.ran]};
  const repairs = !fresh && (pass.done || pass.repairs);
  const first = fresh ? undefined
    : pass.done ? pass.repairs ? undefined : {loops: pass.loops, per_room: mean(pass.ran)}
    : pass.first;
  const edits = fresh ? 0 : pass.done ? 1 : pass.edits + 1;
  pass = {work: read(tokens, 0, how), tokens, how, limit: loops + how.loops, loops, ran,
          awake: fresh ? [...doors.keys()] : [], done: false, edits, repairs, first};
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
    if (frames.at(-1).k > steps[room]) pass.ran[room]++;
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
const is_wrong = room => asked(room) && !is_right(room);

// the room with a label that is farthest from a goal, or undefined
const farthest_room = () => [...maze.doors.keys()].filter(asked).reduce(
  (most, room) => most === undefined || truth.depth[room] > truth.depth[most] ? room : most,
  undefined);

// where the scale of loops ends: one room of twenty may have run more
const most_loops = () => {
  const sorted = pass.ran.filter(Boolean).sort((a, b) => a - b);
  return sorted[Math.floor(.95 * (sorted.length - 1))] ?? 1;
};

// did the last loop change the room by more than the threshold?
const is_restless = room => pass.tokens[room].cells[LOOPED]?.frames.at(-1).change >= tau();

// the rooms that are painted and counted as awake; where no room sleeps, those that still change
const active = () => !pass.loops ? []
  : $('sleep').value === 'off' ? pass.awake.filter(is_restless) : pass.awake;

// The rooms on the way along right arrows, up to a goal or to a wrong arrow. Each is nearer to the
// goal than the one before, so that the way has an end
function way_from(room) {
  const way = [room];
  while (asked(room) && is_right(room)) way.push(room = behind(room, answers[room].door));
  return way;
}

// the room that the mouse is in, or that the keys have chosen, or undefined
const looked_at = () => hover ? hover.room
  : document.activeElement === canvas ? chosen : undefined;

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
  const awake = new Set(active());
  const shades = pass.done && $('shade').checked, most = most_loops();
  // the way from the room that is looked at, or from the farthest one. It hides arrows at the end
  const farthest = farthest_room(), looked = looked_at();
  const from = looked !== undefined && asked(looked) ? looked : farthest;
  const way = from !== undefined && pass.loops ? way_from(from) : [];
  const under_line = new Set(pass.done ? way.slice(0, -1) : []);

  for (let room = 0; room < n; room++) {
    const x = room % side * size, y = Math.floor(room / side) * size;
    const change = pass.tokens[room].cells[LOOPED]?.frames.at(-1).change;
    const wrong = pass.loops > 0 && is_wrong(room), is_cut_off = truth.depth[room] === Infinity;
    pen.fillStyle = awake.has(room) ? colour_of(change, colours)
      : is_cut_off ? colours['cut-off'] : colours.room;
    fill_rect(x, y, x + size, y + size);
    let ink = wrong ? colours.wrong : colours.arrow;
    // wrong arrows stay on the plain colour, and rooms that did not settle on theirs
    if (shades && pass.ran[room] && !wrong && !is_cut_off && !awake.has(room)) {
      const shade = mix(amber(), Math.min(1, pass.ran[room] / most));
      draw_floor(x, y, doors[room], shade);
      ink = ink_on(shade);
    }
    if (pass.loops && !goals[room] && !under_line.has(room)) {
      const {door, sure} = answers[room];
      pen.globalAlpha = .12 + .88 * sure;
      draw_arrow(x, y, door, ink);
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
  draw_way(way, colours);
  for (const room of goals.keys()) {
    if (goals[room]) draw_goal(room % side * size, Math.floor(room / side) * size, colours.goal);
  }
  if (farthest !== undefined) draw_start(farthest, colours);
  if (document.activeElement === canvas) {
    pen.strokeStyle = colours.chosen;
    pen.lineWidth = Math.min(3, size / 7);      // the goal is seen in it
    const inset = Math.min(2, size / 9);
    pen.strokeRect(chosen % side * size + inset, Math.floor(chosen / side) * size + inset,
                   size - 2 * inset, size - 2 * inset);
  }
  const changes = $('click').value;
  if (hover && changes !== 'look' && (changes !== 'walls' || hover.door !== undefined)) {
    draw_hover(colours.chosen);
  }
  $('bar').style.background = `linear-gradient(90deg, ${amber()})`;
  draw_numbers();
}

// The colour of a room that is awake: from the threshold, which is also for a room that an edit has
// woken and no step has computed, to a change by its whole length (or by five times the threshold)
function colour_of(change, {least, most}) {
  const log_share = Math.log((change ?? 0) / tau()) / Math.log(Math.max(1 / tau(), 5));
  const share = Math.min(1, Math.max(0, log_share));
  return `rgb(${mix([least, most], share)})`;
}

// the colour at a share of the way through some colours '#rrggbb' -> [r, g, b]
function mix(colours, share) {
  const at = share * (colours.length - 1), first = Math.min(Math.floor(at), colours.length - 2);
  const [from, to] = colours.slice(first, first + 2).map(
    hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)));
  return from.map((part, i) => Math.round(part + (at - first) * (to[i] - part)));
}

// black or white, which can be read on a colour
const ink_on = ([red, green, blue]) =>
  .3 * red + .59 * green + .11 * blue > 105 ? '#111111' : '#ffffff';

// the floor of a room, with a gap before each wall, so that walls can be seen on each colour
function draw_floor(x, y, doors, rgb) {
  const [north, east, south, west] = [0, 1, 2, 3].map(door => doors >> door & 1 ? 0 : size * .13);
  pen.fillStyle = `rgb(${rgb})`;
  fill_rect(x + west, y + north, x + size - east, y + size - south);
}

// in whole pixels: no seams
function fill_rect(...edges) {
  const [left, top, right, bottom] = edges.map(Math.round);
  pen.fillRect(left, top, right - left, bottom - top);
}

function draw_way(way, colours) {
  pen.lineCap = pen.lineJoin = 'round';
  const thick = pass.done ? .14 : .07;        // thinner while arrows are seen under it
  for (const [width, stroke] of [[2 * thick, colours.room], [thick, colours.chosen]]) {
    pen.lineWidth = Math.max(1.5, size * width);
    pen.strokeStyle = stroke;
    pen.beginPath();
    for (const room of way) {
      pen.lineTo((room % maze.side + .5) * size, (Math.floor(room / maze.side) + .5) * size);
    }
    pen.stroke();
  }
}

// a ring around the farthest room: here the question starts
function draw_start(room, colours) {
  const x = (room % maze.side + .5) * size, y = (Math.floor(room / maze.side) + .5) * size;
  for (const [width, stroke] of [[size * .2, colours.room], [size * .1, colours.chosen]]) {
    pen.lineWidth = Math.max(1.5, width);
    pen.strokeStyle = stroke;
    pen.beginPath();
    pen.arc(x, y, size * .38, 0, 2 * Math.PI);
    pen.stroke();
  }
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

const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : '-';

const quiet = () => $('sleep').value === 'off' ? 'settled' : 'asleep';

// what has happened, in sentences
function summary(n_asked, right) {
  const {loops, edits, first} = pass, n = maze.doors.length, wrong = n_asked - right;
  const sleep = $('sleep').value, fresh = !edits;
  if (!loops) {
    return 'Press play. Each arrow is then the model\'s guess of the way to the green dot. Red ' +
      'guesses are wrong: watch the red disappear. The blue line follows the arrows from the ' +
      `farthest room.${is_touched ? ' You can tap a room at any time to move the goal.' : ''}`;
  }
  if (!pass.done) {
    return (playing ? '' : `Paused after ${count(loops, 'loop')}. `) + (n_asked && !wrong
      ? 'All arrows are right, but violet rooms still change: an arrow may still turn.'
      : sleep === 'off' ? 'All rooms loop until all of them are settled; violet ones still change.'
      : sleep === 'on' ? 'Violet rooms are at work. The others sleep until news reaches them, ' +
        'even if their arrow is still wrong (red). News starts at the goal and at dead ends, and ' +
        'goes from room to room. The blue line follows the arrows from the farthest room.'
      : 'Violet rooms are at work and still change. Red arrows are wrong so far.');
  }
  const n_awake = active().length, at_limit = pass.awake.length > 0;
  const solved = n_asked > 0 && !wrong;
  const some_cut_off = n_asked + maze.goals.filter(Boolean).length < n;
  const arrows = !n_asked ? 'no arrow can be right'
    : (solved ? `all ${n_asked}` : `${right} of ${n_asked}`) + ' arrows are right' +
      (some_cut_off ? ' (in rooms that have a way to the goal)' : '');
  const words = [at_limit
    ? `The model stops after ${count(loops, 'loop')} (the limit: 2 × rooms + 100` +
      `${edits ? ' since your last change' : ''}): ${arrows}, ` +
      `${solved ? 'but' : 'and'} ${count(n_awake, 'room')} did not settle.`
    : solved && !some_cut_off ? `Solved: ${arrows} after ${count(loops, 'loop')}.`
    : `All rooms are ${quiet()} after ${count(loops, 'loop')}: ${arrows}.`];
  if (sleep === 'on' && fresh && !at_limit && solved) {
    words.push(`On average a room was at work in only ${mean(pass.ran).toFixed(1)} of them, and ` +
      'slept in the others.');
  }
  if (sleep === 'exit' && wrong) {
    words.push('Each room stopped for good as soon as it settled, often before news from the ' +
      'goal arrived.');
  }
  if (pass.repairs && solved) {
    const woken = pass.ran.filter(Boolean).length;
    words.push('The repair ' + (sleep === 'off' ? '' : `woke ${woken} of ${n} rooms and `) +
      `took ${count(loops, 'loop')}, ${mean(pass.ran).toFixed(1)} per room` +
      (first === undefined ? '.' : `; the solve before it took ${first.loops}, ` +
        `${first.per_room.toFixed(1)} per room.`));
  }
  if (wrong && sleep !== 'exit') {
    if (!fresh) {
      const n_goals = maze.goals.filter(Boolean).length;
      words.push(has_rings() || n_goals > 1
        ? 'The model has not learned this; undo takes your change back.'
        : 'Press "again" to solve the maze from the start: that usually helps.');
    } else if (tau() > 1.25 * R.tau) words.push('The threshold is probably too loose.');
    else words.push('The model is not always right. Try another goal, or a new maze.');
  }
  if (!has_edited && solved && !at_limit) {
    words.push(`Now ${is_touched ? 'tap' : 'click'} a room to move the goal. Or open a wall: a ` +
      'second way to the goal, which the model has never seen, usually confuses it.');
  }
  return words.join(' ');
}

// a room, in sentences
function describe(room) {
  const {depth} = truth, {door, sure} = answers[room], {loops} = pass;
  const n_goals = maze.goals.filter(Boolean).length, {side} = maze;
  const doors = NAMES.filter((_, door) => maze.doors[room] >> door & 1).join(', ') || 'none';
  const place = maze.goals[room] ? `${n_goals > 1 ? 'a' : 'the'} goal`
    : depth[room] < Infinity
      ? `${count(depth[room], 'door')} from the ${n_goals > 1 ? 'nearest ' : ''}goal`
      : n_goals ? 'no way to the goal' : 'no goal';
  const words = [`Row ${Math.floor(room / side) + 1}, column ${room % side + 1}: ${place}; ` +
                 `doors: ${doors}.`];
  if (!loops) return words[0];
  const since = pass.repairs ? ' since your edit' : '';
  const state = pass.done ? '' : !active().includes(room) ? ` and is ${quiet()}`
    : $('sleep').value === 'off' ? ' and still changes' : ' and is awake';
  words.push(`It ran ${count(pass.ran[room], 'loop')}${since}${state}.`);
  if (asked(room)) {
    const way = way_from(room), meets_wrong = is_right(room) && !maze.goals[way.at(-1)];
    words.push(`It points ${NAMES[door]}, ${Math.round(100 * sure)}% sure: ` +
      (meets_wrong ? `right, but its way meets a wrong arrow after ${count(way.length - 1, 'door')}.`
        : is_right(room) ? 'right.' : 'wrong.'));
  }
  return words.join(' ');
}

function draw_numbers() {
  const rooms = [...maze.doors.keys()].filter(asked), n = maze.doors.length;
  const right = rooms.filter(is_right).length, n_goals = maze.goals.filter(Boolean).length;
  const deepest = rooms.reduce((most, room) => Math.max(most, truth.depth[room]), 0);
  const begun = pass.loops > 0;
  put('deepest', rooms.length ? count(deepest, 'door') : '-');
  put('loops-name', pass.repairs ? 'loops since edit' : 'loops');
  put('loops', `${pass.loops}`);
  put('awake-name', $('sleep').value === 'off' ? 'still changing' : 'awake now');
  put('awake', begun ? `${active().length} of ${count(n, 'room')}` : '-');
  put('computed', mean(pass.ran).toFixed(1));
  put('most', !pass.done ? '\u2026'
    : `${most_loops()} loops${most_loops() < Math.max(...pass.ran) ? ' or more' : ''}`);
  const all_loop = $('sleep').value === 'off';
  put('white', !pass.done || !$('shade').checked ? all_loop ? 'settled' : 'asleep'
    : pass.repairs ? 'wrong/not woken' : 'wrong');
  put('violet', all_loop ? 'changing' : 'at work');
  put('ticker', begun ? `loop ${pass.loops} · ${active().length} awake · ${right} of ` +
    `${rooms.length} right` : '');
  document.body.classList.toggle('looks', $('click').value === 'look');
  put('right', !n_goals ? 'no goal' : begun && rooms.length
    ? `${right} of ${rooms.length}, ${percent(right, rooms.length)}` : '-');
  put('notice', [unread, unseen()].filter(Boolean).join(' '));
  put('summary', summary(rooms.length, right));
  $('step').setAttribute('aria-disabled', pass.done);       // it keeps the focus, and does nothing
  $('undo').setAttribute('aria-disabled', !past.length);
  put('play', playing ? '❚❚ pause' : pass.done ? '▶ again' : '▶ play');
  canvas.setAttribute('aria-label', `a maze of ${maze.side} by ${maze.side} rooms; arrow keys ` +
    'choose a room, Shift and an arrow key open or close a wall, Enter moves the goal, Space ' +
    'plays, Z undoes a change');
  const looked = looked_at();
  put('chosen', looked === undefined
    ? (is_touched ? 'To look at a room, choose "look" above and tap it.'
      : 'Point at a room, or choose one with the arrow keys.') +
      ' Then you see its way, and read how long it ran.'
    : describe(looked));
}

// a screen reader hears of the chosen room when a key was pressed and at the end, not in each loop
const say_chosen = () =>
  put('said', looked_at() === undefined ? '' : $('chosen').textContent);

// controls ----------------------------------------------------------------------------------------

const tau = () => 10 ** Number($('tau').value);
const set_tau = value => $('tau').value = Math.log10(value);

function new_maze() {
  const side = Number($('side').value), goal = Math.random() * side * side | 0;
  const doors = carve(side, $('kind').value === 'long');
  show(doors.map((of_room, room) => of_room + (room === goal ? GOAL : 0)));
}

function first_maze() {
  $('kind').value = at_first.kind;
  show(R.task.ids);
}

// a maze in words
function show(ids) {
  const side = Math.sqrt(ids.length);
  maze = {side, doors: ids.map(id => id % GOAL), goals: ids.map(id => id >= GOAL)};
  $('side').value = side;
  chosen = Math.min(chosen, ids.length - 1);
  hover = undefined;
  past = [];
  restart();
}

function restart() {
  unread = '';
  put('said', '');
  past = past.map(({doors, goals}) => ({doors, goals}));
  begin();
  label();
  draw();
  share_soon();
}

// what can be linked stands in the address, where it is not as at first; see page.js
const CONTROLS = ['side', 'kind', 'tau', 'sleep'];
let at_first = {}, sharing = 0;
let unread = '';                        // a line on what was not read in the address
const get = id => id === 'tau' ? `${Number(tau().toPrecision(2))}` : $(id).value;
function share_soon() {
  clearTimeout(sharing);
  sharing = setTimeout(share, 400);
}
function share() {
  const state = CONTROLS.map(id => [id, get(id)]).filter(([id, value]) => value !== at_first[id]);
  history.replaceState(null, '', `#${new URLSearchParams(state)}`);
}
function fits(id, value) {
  if (!CONTROLS.includes(id)) return false;
  if (id === 'tau') return value >= 1e-4 && value <= 1;
  const {options, min, max} = $(id);
  return options ? [...options].some(option => option.value === value)
    : Number.isInteger(+value) && +value >= +min && +value <= +max;
}
function take_address() {
  const state = {...at_first}, bad = [];
  for (const [id, value] of new URLSearchParams(location.hash.slice(1))) {
    if (fits(id, value)) state[id] = value;
    else bad.push(`${id}=${value}`.slice(0, 40));
  }
  for (const id of ['side', 'kind', 'sleep']) $(id).value = state[id];
  set_tau(state.tau);
  if (get('side') === at_first.side && get('kind') === at_first.kind) first_maze();
  else new_maze();
  if (bad.length) unread = `This in the address was not read: ${bad.join(', ')}.`;
  draw();
}

// the maze has changed: go on from the states that are there, and play unless the reader has stopped
function changed() {
  const begun = pass.loops > 0, plays = playing || pass.done;
  has_edited = true;
  unread = '';
  begin(false);
  if (begun) loop();                    // of the rooms that the change has woken
  if (begun && plays && !pass.done) play(true);
  draw();
}

function remember() {
  past.push({doors: [...maze.doors], goals: [...maze.goals], pass, answers, playing});
}

// the maze as it was before the last edit, and its states, if they are still known
function undo() {
  if (!past.length) return;
  const before = past.pop();
  Object.assign(maze, {doors: before.doors, goals: before.goals});
  if (!before.pass) return changed();
  ({pass, answers} = before);
  truth = search(maze);
  playing &&= !pass.done;
  put('said', '');
  if (before.playing) play(true);
  draw();
}

// continues: is it a further step of a drag, which is undone with the first one?
function toggle_wall(room, door, open, continues = false) {
  const next = behind(room, door);
  if (next === undefined || open === Boolean(maze.doors[room] >> door & 1)) return;
  if (!continues) remember();
  maze.doors[room] ^= 1 << door;
  maze.doors[next] ^= 1 << (door + 2) % 4;
  changed();
}

function set_goal(room, add, continues = false) {
  if (!add && maze.goals.every((is_goal, other) => is_goal === (other === room))) return draw();
  if (!continues) remember();
  else if (past.at(-1).pass) ({pass, answers} = past.at(-1));     // from where the drag began
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
  // of the walls that can be opened: not of the edge of the board
  const distances = [y, 1 - x, 1 - y, x].map(
    (distance, door) => behind(room, door) === undefined ? Infinity : distance);
  const nearest = Math.min(...distances), door = distances.indexOf(nearest);
  const near = NEAR[$('click').value];
  // in small rooms a hand needs six pixels
  const reach = near && Math.max(near, Math.min(.3, 6 / size));
  return {room, door: nearest < reach ? door : undefined};
}

// what the mouse does where it is dragged: {open}, do the walls open or close that it passes? or
// {goal: true}, the goal goes with it; changed: has it done so yet? undefined: nothing
let dragging;
let pressed;                            // what a finger or pen has pressed, and where: {at, x, y}
function edit({room, door}, add) {
  chosen = room;
  if ($('click').value === 'look') return draw();
  const before = past.length;
  if (door === undefined && $('click').value === 'walls') return draw();
  if (door === undefined) {
    const adds = add || $('click').value === 'goals';
    set_goal(room, adds);
    dragging = adds ? undefined : {goal: true};
  } else {
    dragging = {open: !(maze.doors[room] >> door & 1)};
    toggle_wall(room, door, dragging.open);
  }
  if (dragging) dragging.changed = past.length > before;
  say_chosen();
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
  const {room, door} = at_point(event), before = past.length;
  if (dragging.goal) set_goal(chosen = room, false, dragging.changed);
  else if (door !== undefined) toggle_wall(room, door, dragging.open, dragging.changed);
  dragging.changed ||= past.length > before;
};
canvas.onpointercancel = () => dragging = pressed = undefined;
window.onpointerup = ({clientX, clientY, shiftKey}) => {
  if (pressed && Math.hypot(clientX - pressed.x, clientY - pressed.y) < 8)
    edit(pressed.at, shiftKey);
  dragging = pressed = undefined;
};
canvas.onkeydown = event => {
  hover = undefined;
  const door = ['ArrowUp', 'ArrowRight', 'ArrowDown', 'ArrowLeft'].indexOf(event.key);
  if (door >= 0) {
    if (event.shiftKey) toggle_wall(chosen, door, !(maze.doors[chosen] >> door & 1));
    else chosen = behind(chosen, door) ?? chosen;
  } else if (event.key === 'Enter') set_goal(chosen, event.shiftKey);
  else if (event.key === ' ') play();
  else if (event.key.toLowerCase() === 'z') undo();
  else return;
  event.preventDefault();
  draw();
  say_chosen();
};
canvas.onfocus = canvas.onblur = () => draw();
$('play').onclick = () => play();
$('step').onclick = step;
$('again').onclick = restart;
$('undo').onclick = undo;
// it begins by itself, unless the reader wants nothing to move
const can_move = !matchMedia('(prefers-reduced-motion: reduce)').matches;
const and_play = show_maze => () => (show_maze(), can_move && play(true));
$('new').onclick = $('side').onchange = $('kind').onchange = and_play(new_maze);
$('first').onclick = and_play(first_maze);
$('tau').oninput = $('sleep').oninput = restart;
$('side').oninput = $('speed').oninput = label;
$('shade').oninput = () => draw();
onhashchange = take_address;
new ResizeObserver(() => requestAnimationFrame(draw)).observe(canvas);
is_dark.onchange = () => draw();

put('trained', `${R.side} by ${R.side}`);
// a finger seldom hits what it aims at: what it changes is the goal, until another is chosen
if (is_touched) $('click').value = 'goal';
put('clicks', is_touched ? 'a tap changes:' : 'a click changes:');
set_tau(R.tau);
put('tau-first', `${Number((100 * R.tau).toPrecision(2))}%`);
$('side').value = Math.sqrt(R.task.ids.length);
at_first = Object.fromEntries(CONTROLS.map(id => [id, get(id)]));
take_address();
if (can_move) setTimeout(() => pass.loops || has_edited || play(true), 1000);
