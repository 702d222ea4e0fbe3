// A Sudoku: its units, a search for its solutions, the board, and what a reader changes.
//
//     n          cells of a side, digits, and candidates of a unit
//     board      {n, h, w, clues}: rows and columns of a box; the digit of each cell, 0 = open
//     t          a candidate, a digit in a cell: t = cell * n + digit - 1. It is a token
//     unit       of n candidates, exactly one is right. There are four kinds: a cell; a digit in a
//                row, in a column, in a box
//
// As text, a board has a letter for each cell: a digit (A is 10) or a dot.
'use strict';
const BOXES = {4: [2, 2], 6: [2, 3], 9: [3, 3], 12: [3, 4], 16: [4, 4]};
const DIGITS = '123456789ABCDEFG';
const [OPEN, GIVEN, RULED_OUT] = [0, 1, 2];
const MOST_NODES = 20000;               // of a search
const NOUNS = {
  problem: 'board',
  token: 'candidate',
  answer: 'open cell',
  name: cell => `row ${Math.floor(cell / board.n) + 1}, column ${cell % board.n + 1}` +
    (board.clues[cell] ? ', a clue' : ''),
  is_silent: cell => board.clues[cell] > 0,
  before: 'In each loop every candidate at work says how sure it is that it is right.',
  likely: 'By loop, the four surest digits with their % (bold: right)',
};
// A place is a cell; its answers are the digits, each as likely as its candidate says. A cell is
// decided if the model says yes to one candidate alone. Unless a search finds one solution, a digit
// is wrong if it stands twice in a unit.
const ANSWERS = {
  words: () => [...DIGITS].slice(0, board.n),
  tokens: cell => candidates(cell),
  likely: ({logits}, cell) =>
    candidates(cell).map(t => 1 / (1 + Math.exp(logits[2 * t] - logits[2 * t + 1]))),
  best: p => p.filter(value => value > .5).length === 1 ? argmax(p) : undefined,
  is_wrong(step, cell, digit) {
    const {right} = pass.labels[cell];
    if (right.length || board.clues[cell]) return right.length > 0 && !right.includes(digit);
    const {of, members} = units_of(board.n);
    const cells = of[cell * board.n + digit].slice(1).flatMap(unit => members[unit])
      .map(t => Math.floor(t / board.n));
    return cells.some(other => other !== cell && digit ===
      (board.clues[other] ? board.clues[other] - 1 : this.best(this.likely(step, other))));
  },
  score(view) {
    if (n_solutions === 0) return 'no solution: check the clues';
    const open = view.filter((_, cell) => !board.clues[cell]);
    const n_decided = open.filter(({best}) => best !== undefined).length;
    const n_wrong = open.filter(({is_wrong}) => is_wrong).length;
    const n_right = n_decided - n_wrong;
    const words = `${n_decided} of ${count(open.length, NOUNS.answer)} decided`;
    if (pass.labels.some(({right}) => right.length))
      return n_right < open.length ? `${words}, ${n_right} right` : `solved, all ${n_right} right`;
    if (n_wrong) return `${words}, ${count(n_wrong, 'digit')} against the rules (red)`;
    if (n_decided === open.length) return `${words}, a solution: it keeps all rules`;
    return at_end() ? `${words}: of several solutions it has not chosen one` : words;
  },
};
let board = null;
let n_solutions;                        // 2 = several, undefined = the search gave up
let standing = '';                      // what the line beside the board says
const earlier = [];                     // boards before the reader's changes, as text

const candidates = cell => Array.from({length: board.n}, (_, digit) => cell * board.n + digit);

// units -------------------------------------------------------------------------------------------

const UNITS = {};                       // by n, {of, members}: see units_of

// of: the four units of each candidate, as numbers; members: the candidates of each unit.
function units_of(n) {
  if (UNITS[n]) return UNITS[n];
  const [h, w] = BOXES[n];
  const of = Array.from({length: n ** 3}, (_, t) => {
    const cell = Math.floor(t / n);
    const digit = t % n;
    const row = Math.floor(cell / n);
    const column = cell % n;
    const box = Math.floor(row / h) * h + Math.floor(column / w);
    return [cell, row * n + digit, column * n + digit, box * n + digit]
      .map((unit, kind) => kind * n * n + unit);
  });
  const members = Array.from({length: 4 * n * n}, () => []);
  of.forEach((units, t) => units.forEach(unit => members[unit].push(t)));
  return UNITS[n] = {of, members};
}

// A quarter of the heads reads the cell of a candidate, the others its row, column and box.
M.attention = {
  reads(t, head) {
    const {of, members} = units_of(board.n);
    return members[of[t][Math.floor(4 * head * M.D / M.C)]];
  },
  readers(mask) {
    const {of, members} = units_of(board.n);
    const has_one = members.map(unit => unit.some(t => mask[t]));
    return mask.map((_, t) => of[t].some(unit => has_one[unit]));
  },
  score: product => product * Math.log(board.n) / Math.log(9),
};
M.skip = .2;                            // in all starts but the first, as in sample.py

// The first two solutions of clues that keep the rules; undefined after too many nodes.
function solutions_of({n, clues}) {
  const {of, members} = units_of(n);
  const DONE = 255;
  const found = [];
  let nodes = 0;

  // Candidate t is right, its rivals are not. left: how many candidates each unit has.
  function choose(t, {open, left}) {
    for (const unit of of[t]) {
      for (const rival of members[unit]) {
        if (rival === t || !open[rival]) continue;
        open[rival] = 0;
        for (const other of of[rival]) if (left[other] !== DONE) left[other]--;
      }
      left[unit] = DONE;
    }
  }
  // Go on at the unit with the fewest candidates; where it has none, there is no way.
  function search({open, left}) {
    if (++nodes > MOST_NODES || found.length === 2) return;
    const fewest = left.reduce((best, count, unit) => count < left[best] ? unit : best, 0);
    if (left[fewest] === DONE) found.push(open);
    else for (const t of members[fewest].filter(t => open[t])) {
      const branch = {open: open.slice(), left: left.slice()};
      choose(t, branch);
      search(branch);
    }
  }
  const state = {open: new Uint8Array(n ** 3).fill(1), left: new Uint8Array(4 * n * n).fill(n)};
  clues.forEach((digit, cell) => digit && choose(cell * n + digit - 1, state));
  search(state);
  return nodes > MOST_NODES && found.length < 2 ? undefined : found.map(open =>
    clues.map((_, cell) => open.subarray(cell * n, cell * n + n).indexOf(1) + 1));
}

// boards ------------------------------------------------------------------------------------------

// A text -> a board. An Error in words if it is none.
function read_board(text) {
  const letters = [...text.toUpperCase().replace(/[\s|+-]/g, '')];
  const n = Math.sqrt(letters.length);
  if (!BOXES[n])
    throw Error('A board has 16, 36, 81, 144 or 256 cells, a digit or a dot for each, and not ' +
      `${letters.length}.`);
  const digits = DIGITS.slice(0, n);
  const unknown = letters.find(letter => !`.0_*${digits}`.includes(letter));
  if (unknown) throw Error(`"${unknown}" is no digit of this board: they are ${digits}, and . ` +
    'or 0 for an open cell.');
  const [h, w] = BOXES[n];
  const read = {n, h, w, clues: letters.map(letter => digits.indexOf(letter) + 1)};
  check_rules(read);
  return read;
}

function check_rules({n, clues}) {
  const is_given = t => clues[Math.floor(t / n)] === t % n + 1;
  const kinds = ['cell', 'row', 'column', 'box'];
  units_of(n).members.forEach((unit, number) => {
    const given = unit.filter(is_given);
    if (given.length > 1) throw Error(`A ${DIGITS[given[0] % n]} would stand twice in ` +
      `${kinds[Math.floor(number / n / n)]} ${Math.floor(number / n) % n + 1}.`);
  });
}

const text_of = ({clues}) => clues.map(digit => digit ? DIGITS[digit - 1] : '.').join('');

// The tokens of a board, and the labels of its cells. A line says if it has not one solution.
function look_up(board) {
  const {n, clues} = board;
  const ids = clues.flatMap(clue => Array.from({length: n}, (_, digit) =>
    !clue ? OPEN : clue === digit + 1 ? GIVEN : RULED_OUT));
  const solutions = solutions_of(board);
  n_solutions = solutions?.length;
  const only = n_solutions === 1 && solutions[0];
  const found = {0: 'finds no solution', 2: 'finds several solutions'}[n_solutions];
  standing = !only ? `A search ${found ?? 'gives up'}.`
    : `violet works, white sleeps${get('noise') > 1 ? ' or skips' : ''}, red is wrong`;
  put($('notice'), standing);
  return [ids, clues.map((clue, cell) => ({right: only && !clue ? [only[cell] - 1] : []}))];
}

// Read a board, from the start. Of a text that is none a line says why, and the board stays.
function take(new_text) {
  try {
    board = read_board(new_text);
  } catch ({message}) {
    if (!board) take(R.start);
    put($('why'), `${message} The board stays.`);
    put($('notice'), $('why').textContent);
    return false;
  }
  if (!pass || text !== new_text) chosen = Math.max(0, board.clues.indexOf(0));
  if (pass && text !== new_text) earlier.push(text);
  if (pass && text !== new_text) canvas.scrollIntoView({block: 'nearest'});
  const sets = Object.keys(R.problems).filter(name => name.startsWith(`${board.n} x`));
  if (sets.length && !sets.includes(get('set'))) set('set', sets[0]);
  text = new_text;
  show_board();
  begin(...look_up(board));
  return true;
}

// The board as text, unless that is being typed; and a button for each digit.
function show_board() {
  put($('why'), '');
  if (document.activeElement !== $('text')) $('text').value = text;
  const button = (word, change) => Object.assign(make('button', {}, word), {onclick() {
    change();
    canvas.focus({preventScroll: true});        // for the next key
  }});
  if ($('pad').children.length !== board.n + 3) $('pad').replaceChildren(
    ...ANSWERS.words().map((word, digit) => button(word, () => set_clue(digit + 1))),
    button('clear', () => set_clue(0)), button('clear all', clear_all), button('undo', undo));
  $('pad').lastChild.setAttribute('aria-disabled', !earlier.length);
}

// Take all clues away. The board waits until the reader plays it.
function clear_all() {
  set('noise', 1);
  take('.'.repeat(board.clues.length));
  stop();
}

// Bring back the board before the last change. If a clue differs, the model goes on.
function undo() {
  if (!earlier.length) return;
  const was = earlier.pop();
  const {n, clues} = read_board(was);
  const n_changed = clues.filter((clue, cell) => clue !== board.clues[cell]).length;
  if (n === board.n && n_changed < 2) return put_board(was);
  text = was;           // the board that goes is not kept
  take(was);
  present();
}

function put_board(new_text) {
  text = new_text;
  board = read_board(text);
  show_board();
  go_on(...look_up(board));
}

// Give the chosen cell a clue, or open it (0), and go on from the states that are there.
function set_clue(digit) {
  const clues = board.clues.with(chosen, digit);
  if (digit === board.clues[chosen]) return put($('notice'), standing);
  try {
    check_rules({...board, clues});
  } catch ({message}) {
    setTimeout(() => put($('notice'), standing), 5000);
    return put($('notice'), `✗ ${message}`);
  }
  earlier.push(text);
  put_board(text_of({clues}));
}

// the picture -------------------------------------------------------------------------------------

const MOST_MARKS = 9;                   // larger boards have marks in the chosen cell alone
let size = 0;                           // of a cell, in pixels of the page

function draw_picture(view) {
  const {n, h, w, clues} = board;
  const width = clear_square();
  size = width / n;
  const colours = colours_of_square();
  pen.textAlign = 'center';
  pen.textBaseline = 'middle';
  view.forEach((seen_of_cell, cell) => {
    const left = cell % n * size;
    const top = Math.floor(cell / n) * size;
    pen.fillStyle = clues[cell] ? colours['cut-off'] : colours.room;
    fill_rect(left, top, left + size, top + size);
    if (clues[cell])
      return write(clues[cell] - 1, left + size / 2, top + size / 2, .62, colours.arrow, 'bold');
    draw_work(cell, left, top, colours);
    if (seen_of_cell.p) draw_answer(cell, seen_of_cell, left, top, colours);
  });
  pen.fillStyle = colours.wall;
  for (let line = 0; line <= n; line++) {
    const place = between(1, line * size, width - 1);
    const [across, down] = [h, w].map(every => line % every ? .6 : 2.5);
    pen.fillRect(0, place - across / 2, width, across);
    pen.fillRect(place - down / 2, 0, down, width);
  }
  const [row, column] = [Math.floor(chosen / n), chosen % n];    // it reads its row, column and box
  pen.strokeStyle = colours.chosen;
  pen.lineWidth = 1.5;
  pen.strokeRect(0, row * size, width, size);
  pen.strokeRect(column * size, 0, size, width);
  pen.strokeRect((column - column % w) * size, (row - row % h) * size, w * size, h * size);
  pen.lineWidth = 3;
  pen.strokeRect(column * size + 1.5, row * size + 1.5, size - 3, size - 3);
}

const has_marks = cell => board.n <= MOST_MARKS || cell === chosen;

const place_of_mark = digit =>
  [(digit % board.w + .5) / board.w, (Math.floor(digit / board.w) + .5) / board.h];

// The candidates of a cell that are at work, or all of the cell where there is no room for marks.
function draw_work(cell, left, top, colours) {
  const {awake, change} = pass.steps[shown];
  if (!shown || all_rest()) return;
  const at_work = candidates(cell).filter(t => awake[t]);
  if (!has_marks(cell) && at_work.length) {
    pen.fillStyle = violet_of(mean(at_work.map(t => change[t])), colours);
    return fill_rect(left, top, left + size, top + size);
  }
  for (const t of at_work) {
    const [x, y] = place_of_mark(t % board.n);
    const [half_w, half_h] = [.5 / board.w, .5 / board.h];
    pen.fillStyle = violet_of(change[t], colours);
    fill_rect(left + (x - half_w) * size, top + (y - half_h) * size,
              left + (x + half_w) * size, top + (y + half_h) * size);
  }
}

// A digit if the cell is decided, or else, if there is room for them, all marks, each as strong as
// the model believes in it.
function draw_answer(cell, {p, best, is_wrong}, left, top, colours) {
  pen.globalAlpha = p[best] ?? 1;
  if (best !== undefined)
    write(best, left + size / 2, top + size / 2, .62, is_wrong ? colours.wrong : colours.arrow);
  else if (has_marks(cell)) p.forEach((value, digit) => {
    const [x, y] = place_of_mark(digit);
    pen.globalAlpha = .25 + .75 * value;
    write(digit, left + x * size, top + y * size, .75 / board.w, colours.arrow);
  });
  pen.globalAlpha = 1;
}

function write(digit, x, y, share, style, weight = '') {
  pen.font = `${weight} ${share * size}px system-ui, sans-serif`;
  pen.fillStyle = style;
  pen.fillText(DIGITS[digit], x, y + .04 * share * size);
}

// what a reader does ------------------------------------------------------------------------------

function choose(row, column) {
  chosen = between(0, row, board.n - 1) * board.n + between(0, column, board.n - 1);
  put($('notice'), standing);
  draw();
}
canvas.onclick = ({offsetX, offsetY}) =>
  choose(Math.floor(offsetY / size), Math.floor(offsetX / size));
canvas.onkeydown = event => {
  const {n} = board;
  const [row, column] = [Math.floor(chosen / n), chosen % n];
  const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  const digit = DIGITS.slice(0, n).indexOf(event.key.toUpperCase()) + 1;
  if ((event.ctrlKey || event.metaKey) && event.key === 'z') undo();
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (moves[event.key]) {
    const [down, right] = moves[event.key];
    choose(row + down, column + right);
  } else if (event.key === ' ') $('play').click();
  else if (['0', '.', 'Backspace', 'Delete'].includes(event.key)) set_clue(0);
  else if (event.key.length === 1 && digit) set_clue(digit);
  else return;
  event.preventDefault();
};
canvas.tabIndex = 0;
canvas.setAttribute('role', 'application');
canvas.setAttribute('aria-label', 'a board; arrows choose a cell, digits change it, space plays');
$('text').oninput = async () => {
  const typed = $('text').value;
  await pause(1000);                    // a board is read when the typing pauses
  if ($('text').value !== typed) return;
  set('noise', 1);
  if (take(typed)) present();
};
start();
